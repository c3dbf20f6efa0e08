"""What a dense decoder looks like: the numbers that fix its shapes and its arithmetic.

Made by the readers of model files, read by the transformer and by everybody who sizes memory. Never touches a
file, never holds a weight.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from engine.errors import ModelError


class Architecture(StrEnum):
    LLAMA = "llama"
    MISTRAL = "mistral"
    QWEN2 = "qwen2"
    QWEN3 = "qwen3"


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearRope:
    """Every frequency divided by `factor` (position interpolation, arXiv 2306.15595)."""

    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Rope:
    """Llama 3.1's scaling: wavelengths longer than original / low are divided by `factor`, those shorter than
    original / high are kept, and those between are blended. high_freq_factor > low_freq_factor > 0."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FactorRope:
    """Frequency i divided by factors[i], i in [0, head_dim / 2): how GGUF files state a scaling."""

    factors: tuple[float, ...]


RopeScaling: TypeAlias = LinearRope | Llama3Rope | FactorRope


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A dense decoder with grouped-query attention, rotary positions, RMS norms and a gated MLP.

    max_position: positions the model was trained for. windows: per layer, how many positions a row attends
    to, None for all before it. qkv_bias, output_bias, mlp_bias: whether those projections add a bias.
    qk_norm: whether each query and key head is normed before it is rotated. eos_token_ids: may be empty.

    Raises ModelError when the numbers do not fit together.
    """

    architecture: Architecture
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_position: int
    windows: tuple[int | None, ...]
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ModelError(f"{self.heads} heads cannot share {self.kv_heads} key/value heads evenly")
        if self.head_dim % 2:
            raise ModelError(f"rotary positions need an even head size, not {self.head_dim}")
        if len(self.windows) != self.layers:
            raise ModelError(f"attention windows are given for {len(self.windows)} of {self.layers} layers")
        if isinstance(self.rope_scaling, FactorRope) and len(self.rope_scaling.factors) != self.head_dim // 2:
            raise ModelError(
                f"{len(self.rope_scaling.factors)} rotary factors for {self.head_dim // 2} frequencies"
            )
        for token_id in (*self.eos_token_ids, self.bos_token_id or 0):
            if not 0 <= token_id < self.vocab_size:
                raise ModelError(f"special token {token_id} is outside the vocabulary of {self.vocab_size}")

    def require_shares(self, ranks: int) -> None:
        """Raises ModelError for numbers that so many ranks cannot share evenly. The vocabulary need not be."""
        names = ("heads", "kv_heads", "hidden_size", "intermediate_size")
        odd = [f"{name} {count}" for name in names if (count := getattr(self, name)) % ranks]
        if odd:
            raise ModelError(f"tensor_parallel_size {ranks} does not divide the model's {', '.join(odd)}")
