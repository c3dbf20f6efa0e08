"""Puts one engine together: backend, model, cache, pool, core.

Called once per process. The only place that turns wishes into a Capacity: what the device can hold is found here,
once, and never written back into anybody's configuration. Starts no thread.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

import torch

from engine.batch import ModelRunner
from engine.cache.block_pool import BlockPool
from engine.cache.kv_cache import KVCache
from engine.cache.layout import KVLayout
from engine.cache.staged_cache import StagedKVCache
from engine.cache.swap_space import SwapSpace
from engine.core import EngineCore
from engine.errors import CapacityError
from engine.kernels.core_share import ANY_CORES, CoreShare
from engine.kernels.reference import ReferenceBackend
from engine.kernels.select import choose_backend
from engine.model.architecture import ModelConfig
from engine.model.config import read_config
from engine.model.load import load_model
from engine.model.transformer import Quantization, Transformer
from engine.model.weights import model_digest
from engine.policy import Policy
from engine.progress import SILENT, Progress
from engine.recorded_runner import RecordedRunner
from engine.runner import TransformerRunner
from engine.sampling import Sampler

KV_BYTES_DEFAULT = 2 << 30
KV_SHARE_OF_MEMORY = 0.25


_QUANTIZATIONS = {
    "auto": None,
    "none": Quantization.NONE,
    "gguf": Quantization.STORED,
    "int8": Quantization.INT8,
    "int4": Quantization.INT4,
}
_DTYPES = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}


class EngineFlags(Protocol):
    """The flags of one engine by their usual names; device is auto, cpu or cuda; dtypes are auto, float32 or bfloat16,
    of the cache also int8; quantization is auto, none, gguf, int8 or int4."""

    @property
    def device(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def kv_cache_dtype(self) -> str: ...
    @property
    def quantization(self) -> str: ...
    @property
    def threads(self) -> int | None: ...
    @property
    def max_model_len(self) -> int | None: ...
    @property
    def block_size(self) -> int: ...
    @property
    def num_gpu_blocks_override(self) -> int | None: ...
    @property
    def gpu_memory_utilization(self) -> float | None: ...
    @property
    def kv_cache_memory_bytes(self) -> int | None: ...
    @property
    def swap_space(self) -> int: ...
    @property
    def enable_prefix_caching(self) -> bool: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineWishes:
    """What an operator asked for. None: whatever is best here.

    device: auto, cpu or cuda. dtype: of the weights; kv_dtype: of the cache. max_model_len: tokens. num_blocks goes
    before kv_bytes, and that before kv_share, which is of the device's free memory, in (0, 1]. swap_bytes: of host
    memory for sequences that are given up. recorded_rows: up to so many sequences that all generate, a step is recorded
    where the device can replay it; 0: none is.
    """

    model: Path
    device: str = "auto"
    dtype: torch.dtype | None = None
    kv_dtype: torch.dtype | None = None
    quantization: Quantization | None = None
    threads: int = 1
    cores: CoreShare = ANY_CORES
    max_model_len: int | None = None
    block_size: int = 16
    num_blocks: int | None = None
    kv_bytes: int | None = None
    swap_bytes: int = 0
    kv_share: float | None = None
    caching: bool = True
    recorded_rows: int = 0

    @classmethod
    def of(cls, flags: EngineFlags, model: Path, cores: CoreShare = ANY_CORES) -> Self:
        """From flags as an operator sets them; model: where its files are."""
        return cls(
            model=model,
            device=flags.device,
            dtype=_DTYPES[flags.dtype],
            kv_dtype=_DTYPES[flags.kv_cache_dtype],
            quantization=_QUANTIZATIONS[flags.quantization],
            threads=flags.threads or len(cores.own) or 1,
            cores=cores,
            max_model_len=flags.max_model_len,
            block_size=flags.block_size,
            num_blocks=flags.num_gpu_blocks_override,
            kv_bytes=flags.kv_cache_memory_bytes,
            swap_bytes=flags.swap_space,
            kv_share=flags.gpu_memory_utilization,
            caching=flags.enable_prefix_caching,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What the device holds. tokens: in all blocks. tokens_max: of one sequence, by the model's length and the pool's
    size."""

    num_blocks: int
    tokens: int
    max_model_len: int
    tokens_max: int

    def full_requests(self) -> int:
        """Sequences of tokens_max that fit at once."""
        return self.tokens // self.tokens_max


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """note: one line for the operator about the backend, or None. borrowed_s: seconds that cores of other workers have
    computed for this engine."""

    config: ModelConfig
    model_digest: str
    capacity: Capacity
    cache: KVCache
    core: EngineCore
    backend_name: str
    note: str | None
    borrowed_s: Callable[[], float]


def assemble(
    wishes: EngineWishes, policy: Policy, *, memory_bytes: int, progress: Progress = SILENT
) -> Engine:
    """memory_bytes: free host memory. Raises ModelError or CapacityError."""
    chosen = choose_backend(
        wishes.dtype, wishes.threads, device=wishes.device, cores=wishes.cores, progress=progress
    )
    backend = chosen.backend
    torch.set_num_threads(wishes.threads if isinstance(backend, ReferenceBackend) else 1)
    if wishes.kv_dtype is torch.int8 and backend.device.type != "cpu":
        raise CapacityError(f"a KV cache in int8 is not there for device {backend.device.type}")
    config = _read_config(wishes)
    max_model_len = wishes.max_model_len or config.max_position
    quantization = _quantization(wishes)
    model = load_model(wishes.model, backend, max_model_len, quantization, progress)
    layout = KVLayout(
        model_digest=model_digest(wishes.model),
        layers=config.layers,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        block_size=wishes.block_size,
        dtype=wishes.kv_dtype or backend.dtype,
        numerics=(*backend.numerics, ("quantization", quantization.value)),
    )
    num_blocks = _num_blocks(wishes, layout, _cache_memory_bytes(backend.device, memory_bytes))
    cache = _cache(layout, num_blocks, backend.device)
    core = EngineCore(
        pool=BlockPool(num_blocks),
        block_size=layout.block_size,
        runner=_runner(model, cache, wishes.recorded_rows, progress),
        sampler=Sampler(),
        policy=policy,
        caching=wishes.caching,
        swap=_swap_space(wishes, cache, memory_bytes - num_blocks * layout.block_bytes()),
    )
    return Engine(
        config=config,
        model_digest=layout.model_digest,
        capacity=Capacity(
            num_blocks=num_blocks,
            tokens=num_blocks * layout.block_size,
            max_model_len=max_model_len,
            tokens_max=min(max_model_len, num_blocks * layout.block_size),
        ),
        cache=cache,
        core=core,
        backend_name=backend.name,
        note=chosen.note,
        borrowed_s=backend.borrowed_s,
    )


def _runner(model: Transformer, cache: KVCache, recorded_rows: int, progress: Progress) -> ModelRunner:
    """One that replays steps, on a device that can."""
    if recorded_rows == 0 or cache.tensor.device.type != "cuda":
        return TransformerRunner(model, cache)
    from engine.kernels.triton.graphs import CudaGraphs

    blocks_max = min(cache.num_blocks, cache.layout.blocks_for(model.max_model_len))
    runner = RecordedRunner(model, cache, CudaGraphs(), rows_max=recorded_rows, blocks_max=blocks_max)
    runner.record_all(progress)
    return runner


def _quantization(wishes: EngineWishes) -> Quantization:
    """What a file has as small integers is used so, unless somebody asked for a dtype."""
    if wishes.quantization is not None:
        return wishes.quantization
    return Quantization.STORED if wishes.dtype is None else Quantization.NONE


def _read_config(wishes: EngineWishes) -> ModelConfig:
    config = read_config(wishes.model)
    if wishes.max_model_len is not None and wishes.max_model_len > config.max_position:
        limit = config.max_position
        raise CapacityError(f"max_model_len {wishes.max_model_len} is over the model's own limit, {limit}")
    return config


def _cache_memory_bytes(device: torch.device, host_bytes: int) -> int:
    """Free where the cache is to be. On another device the cache takes as much host memory as is handed over."""
    if device.type == "cpu":
        return host_bytes
    free, _ = torch.cuda.mem_get_info(device)
    return min(free, host_bytes)


def _cache(layout: KVLayout, num_blocks: int, device: torch.device) -> KVCache:
    return KVCache(layout, num_blocks) if device.type == "cpu" else StagedKVCache(layout, num_blocks, device)


def _swap_space(wishes: EngineWishes, cache: KVCache, memory_bytes: int) -> SwapSpace | None:
    if wishes.swap_bytes == 0:
        return None
    needed = cache.layout.block_bytes()
    if wishes.swap_bytes < needed:
        raise CapacityError(f"{wishes.swap_bytes} bytes of swap space hold no block of {needed} bytes")
    if wishes.swap_bytes > memory_bytes:
        left = f"the {memory_bytes} that the KV cache leaves"
        raise CapacityError(f"{wishes.swap_bytes} bytes of swap space are more than {left}")
    return SwapSpace(cache, wishes.swap_bytes // needed)


def _num_blocks(wishes: EngineWishes, layout: KVLayout, memory_bytes: int) -> int:
    asked = _kv_bytes(wishes, layout, memory_bytes)
    needed = layout.block_bytes()
    if asked < needed:
        raise CapacityError(f"{asked} bytes for the KV cache hold no block of {needed} bytes")
    if asked > memory_bytes:
        raise CapacityError(f"{asked} bytes for the KV cache are more than the {memory_bytes} that are free")
    return asked // needed


def _kv_bytes(wishes: EngineWishes, layout: KVLayout, memory_bytes: int) -> int:
    if wishes.num_blocks is not None:
        return wishes.num_blocks * layout.block_bytes()
    if wishes.kv_bytes is not None:
        return wishes.kv_bytes
    if wishes.kv_share is not None:
        return int(memory_bytes * wishes.kv_share)
    return min(KV_BYTES_DEFAULT, int(memory_bytes * KV_SHARE_OF_MEMORY))
