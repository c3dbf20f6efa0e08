"""What the engine's tests share: backends, the default model's file, a plain way to compute a sequence."""

import copy
import platform
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.cache.kv_cache import KVCache
from engine.cache.layout import KVLayout
from engine.errors import NoCompiler
from engine.kernels.backend import Backend
from engine.kernels.cpu.build import COMPILERS, built, default_cache_folder, host_flags
from engine.kernels.cpu.crew import Crew
from engine.kernels.cpu.library import Library
from engine.kernels.cpu.operations import CpuOperations
from engine.kernels.cpu.sampling import CpuSampling
from engine.kernels.reference import ReferenceBackend
from engine.kernels.select import choose_backend
from engine.model.load import load_model
from engine.model.transformer import Transformer
from engine.runner import TransformerRunner
from tests.fakes.batches import BatchItem, batch_of
from tests.fakes.tiny_checkpoint import write_tiny

BLOCK_SIZE = 4


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    """A folder with a tiny random model."""
    folder: Path = tmp_path_factory.mktemp("tiny")
    write_tiny(folder)
    return folder


@pytest.fixture(scope="session", params=["reference", "cpu"])
def backend(request) -> Backend:
    """Each float32 backend that this machine has."""
    if request.param == "reference":
        return ReferenceBackend(torch.float32)
    chosen = choose_backend(torch.float32, threads=2)
    if chosen.note is not None:
        pytest.skip(chosen.note)
    return chosen.backend


@pytest.fixture(scope="session")
def default_model(default_model_path, backend) -> Transformer:
    """In float32, for sequences of up to 512 tokens."""
    return load_model(default_model_path, backend, max_model_len=512)


@pytest.fixture(scope="session", params=["native", "portable", "reference"])
def backend_of(request) -> Callable[[torch.dtype, int], CpuOperations | ReferenceBackend]:
    """Makes backends of (dtype, threads): kernels for this processor, for an older one, and plain torch.

    Each has its operations one at a time too."""
    if request.param == "reference":
        return lambda dtype, threads: ReferenceBackend(dtype)
    library = library_for(request.param)
    return lambda dtype, threads: CpuOperations(dtype, Crew(library, threads))


@pytest.fixture(scope="session", params=["native", "portable"])
def compiled_sampling(request) -> CpuSampling:
    """For this processor, and for an older one."""
    return CpuSampling(Crew(library_for(request.param), threads=2))


def library_for(processor: str) -> Library:
    """processor: native or portable. Skips where there is no compiler, or no older processor to build for."""
    if processor == "portable" and platform.machine() != "x86_64":
        pytest.skip("there is no older target to build for")
    target = host_flags() if processor == "native" else ("-march=x86-64-v3",)
    try:
        return Library(built(default_cache_folder(), COMPILERS, target))
    except NoCompiler as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def runner_of() -> Callable[..., TransformerRunner]:
    """A runner over a fresh cache of so many blocks of four positions, float32 unless said."""

    def make(model: Transformer, blocks: int, dtype: torch.dtype = torch.float32) -> TransformerRunner:
        config = model.config
        layout = KVLayout(
            model_digest="test",
            layers=config.layers,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            block_size=BLOCK_SIZE,
            dtype=dtype,
        )
        return TransformerRunner(model, KVCache(layout, blocks))

    return make


@pytest.fixture(scope="session")
def logits_of(backend, runner_of) -> Callable[[Path, list[int]], torch.Tensor]:
    """Logits [T, vocab] after each token of a sequence, computed one token at a time in scattered blocks."""

    def compute(path: Path, tokens: list[int]) -> torch.Tensor:
        model = load_model(path, backend, max_model_len=len(tokens))
        blocks = -(-len(tokens) // BLOCK_SIZE)
        runner = runner_of(model, blocks)
        table = tuple(reversed(range(blocks)))
        items = (
            BatchItem(
                tokens=(token,),
                first_position=position,
                block_table=table[: position // BLOCK_SIZE + 1],
                wants_logits=True,
            )
            for position, token in enumerate(tokens)
        )
        return torch.cat([runner.run(batch_of(item, block_size=BLOCK_SIZE)) for item in items])

    return compute


@pytest.fixture(scope="session")
def random_model_of():
    """A transformers model of a configuration with random weights, norms and biases, the same every time."""
    import transformers

    def make(config):
        torch.manual_seed(7)
        model = transformers.AutoModelForCausalLM.from_config(
            copy.deepcopy(config), attn_implementation="eager"
        )
        model.train(mode=False)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name or name.endswith("bias"):
                    parameter.add_(torch.randn_like(parameter) * 0.2)
        return model

    return make


@pytest.fixture(scope="session")
def assert_logits_close():
    """Within 1e-4 of what the transformers model says after each token."""

    def check(logits, model, tokens):
        with torch.no_grad():
            wanted = model(torch.tensor([tokens])).logits[0]
        torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=1e-4)

    return check


@pytest.fixture
def dots_in_order(monkeypatch):
    """Kernels in Triton's interpreter sum as a GPU does."""
    from triton.runtime.interpreter import InterpreterBuilder

    from benchmarks.gpu_interpreter import ordered_dot

    monkeypatch.setattr(InterpreterBuilder, "create_dot", ordered_dot)
