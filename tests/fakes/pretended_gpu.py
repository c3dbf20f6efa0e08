"""A GPU that is none: what an engine on one is put together from, on the processor.

Whoever asks is told of a device cuda: the backend, and whoever looks at the cache. Copies are those of a lagging lane,
steps are recorded as work that is done again, tokens are drawn by the kernel in Triton's interpreter.
"""

import functools
from types import SimpleNamespace

import torch

import engine.assembly
import engine.kernels.triton.copy_lane
import engine.kernels.triton.graphs
import engine.kernels.triton.sampling
import engine.loading
from engine.cache.staged_cache import StagedKVCache
from engine.distribution import PlainSampling
from engine.kernels.reference import ReferenceBackend
from engine.kernels.select import ChosenBackend
from engine.recorded_runner import RecordedRunner
from engine.runner import TransformerRunner
from tests.fakes.lagging_lane import LaggingLane
from tests.fakes.tape import Tape

GPU = torch.device("cuda", 0)


class PretendedGpu:
    """free_bytes: of its memory. tape: of steps. drawn: how often that was done. short_of_memory: the kinds of work for
    which it has too little: "record", "step" of a plain runner, and "take", which is all memory that is taken there
    by name; taken_bytes: of it."""

    def __init__(self, free_bytes=1 << 30):
        self.free_bytes = free_bytes
        self.tape, self.drawn, self.taken_bytes = Tape(), 0, 0
        self.short_of_memory = set()

    def install(self, monkeypatch):
        lane, graphs = engine.kernels.triton.copy_lane, engine.kernels.triton.graphs
        sampling = engine.kernels.triton.sampling
        monkeypatch.setattr(engine.loading, "choose_backend", self._backend)
        monkeypatch.setattr(engine.loading, "StagedKVCache", _CacheThere)
        monkeypatch.setattr(lane, "CudaCopyLane", lambda device: LaggingLane())
        monkeypatch.setattr(graphs, "CudaGraphs", lambda: self._record)
        monkeypatch.setattr(sampling, "draw", functools.partial(self._draw, sampling.draw))
        monkeypatch.setattr(engine.assembly, "TransformerRunner", self._plain_runner)
        monkeypatch.setattr(engine.assembly, "RecordedRunner", _recorded_runner)
        monkeypatch.setattr(torch, "empty", functools.partial(self._empty, torch.empty))
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (self.free_bytes, self.free_bytes))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)

    def _backend(self, dtype, *threads, **rest):
        backend = ReferenceBackend(dtype)
        backend.device = GPU
        return ChosenBackend(backend=backend, sampling=PlainSampling(), note=None)

    def _record(self, work):
        self._need_memory("record")
        return self.tape(work)

    def _draw(self, draw, *asked):
        self.drawn += 1
        return draw(*asked)

    def _plain_runner(self, model, cache):
        runner = TransformerRunner(model, _on_host(cache))
        compute = runner.run

        def run(batch):
            self._need_memory("step")
            return compute(batch)

        runner.run = run
        return runner

    def _empty(self, make, *shape, **options):
        if options.get("device") != GPU:
            return make(*shape, **options)
        self._need_memory("take")
        made = make(*shape, **{**options, "device": "meta"})
        self.taken_bytes += made.nbytes
        return made

    def _need_memory(self, work):
        if work in self.short_of_memory:
            raise torch.OutOfMemoryError


class _There(torch.Tensor):
    """A tensor that says that it is on the GPU."""

    device = GPU
    __torch_function__ = torch._C._disabled_torch_function_impl


class _CacheThere(StagedKVCache):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.tensor = self.tensor.as_subclass(_There)


def _on_host(cache):
    """What a runner may see of it: tensors of its own would lie where the cache says that it lies."""
    return SimpleNamespace(tensor=cache.tensor.as_subclass(torch.Tensor), layout=cache.layout)


def _recorded_runner(model, cache, record, **bounds):
    return RecordedRunner(model, _on_host(cache), record, **bounds)
