"""Which tensors a model is made of: their Hugging Face names and shapes.

The transformer asks for weights under these names; the check refuses files that lack one, or bring one that
this model would not use. Never opens a file.
"""

from collections.abc import Mapping

from engine.errors import ModelError
from engine.model.architecture import ModelConfig

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"

_IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)
"""Buffers that old checkpoints carry; they follow from the configuration."""


def layer_prefix(layer: int) -> str:
    return f"model.layers.{layer}."


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name to shape of every tensor of the model."""
    shapes: dict[str, tuple[int, ...]] = {
        EMBEDDING: (config.vocab_size, config.hidden_size),
        FINAL_NORM: (config.hidden_size,),
    }
    if not config.tie_word_embeddings:
        shapes[HEAD] = (config.vocab_size, config.hidden_size)
    for layer in range(config.layers):
        for name, shape in _layer_shapes(config).items():
            shapes[layer_prefix(layer) + name] = shape
    return shapes


def check_shapes(config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises ModelError for the first tensor that is missing, misshapen, or of no use to this model."""
    expected = expected_shapes(config)
    for name, shape in expected.items():
        found = shapes.get(name)
        if found is None:
            raise ModelError(f"tensor {name} is missing")
        if found != shape:
            raise ModelError(f"tensor {name} has shape {list(found)}, wanted {list(shape)}")
    for name in sorted(shapes.keys() - expected.keys()):
        tied_copy = name == HEAD and config.tie_word_embeddings
        if not tied_copy and not name.endswith(_IGNORED_SUFFIXES):
            raise ModelError(f"tensor {name[:80]!r} has no place in this {config.architecture} model")


def _layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    if config.qk_norm:
        shapes["self_attn.q_norm.weight"] = (config.head_dim,)
        shapes["self_attn.k_norm.weight"] = (config.head_dim,)
    projections = {
        "self_attn.q_proj": (queries, hidden, config.qkv_bias),
        "self_attn.k_proj": (keys, hidden, config.qkv_bias),
        "self_attn.v_proj": (keys, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, queries, config.output_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    for name, (rows, columns, bias) in projections.items():
        shapes[f"{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)
    return shapes
