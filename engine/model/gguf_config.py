"""The configuration of a GGUF file, from its metadata.

Called by `read_config` and when weights are opened. Reads no weights but the rotary factors; refuses what it
would serve wrongly.
"""

from engine.errors import ModelError
from engine.model.architecture import Architecture, FactorRope, LinearRope, ModelConfig, RopeScaling
from engine.model.fields import Fields
from engine.model.gguf_file import GgufFile
from engine.model.huggingface_config import LAYERS_MAX

ROPE_FACTORS = "rope_freqs.weight"

_END_KEYS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot"))


def read_gguf_config(file: GgufFile) -> ModelConfig:
    """Raises ModelError for anything that is missing or not served."""
    fields = Fields(file.fields)
    architecture = _architecture(fields)
    key = f"{architecture}.{{}}".format
    _refuse_what_is_not_served(fields, architecture)
    layers = fields.integer(key("block_count"))
    if layers > LAYERS_MAX:
        raise ModelError(f"{key('block_count')} is {layers}, the limit is {LAYERS_MAX}")
    hidden_size, heads = fields.integer(key("embedding_length")), fields.integer(key("attention.head_count"))
    window = fields.optional_integer(key("attention.sliding_window")) or None
    return ModelConfig(
        architecture=architecture,
        vocab_size=_vocab_size(file),
        hidden_size=hidden_size,
        layers=layers,
        heads=heads,
        kv_heads=fields.integer(key("attention.head_count_kv"), heads),
        head_dim=_head_dim(fields, architecture, max(1, hidden_size // heads)),
        intermediate_size=fields.integer(key("feed_forward_length")),
        rms_norm_eps=fields.number(key("attention.layer_norm_rms_epsilon")),
        rope_theta=fields.number(key("rope.freq_base"), 10_000.0),
        rope_scaling=_rope_scaling(file, fields, architecture),
        max_position=fields.integer(key("context_length")),
        windows=(window,) * layers,
        tie_word_embeddings="output.weight" not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_up.bias" in file.tensors,
        qk_norm=architecture is Architecture.QWEN3,
        eos_token_ids=_eos_token_ids(fields),
        bos_token_id=fields.optional_integer("tokenizer.ggml.bos_token_id"),
    )


def _architecture(fields: Fields) -> Architecture:
    name = fields.text("general.architecture")
    served = (Architecture.LLAMA, Architecture.QWEN2, Architecture.QWEN3)
    if name not in served:
        raise ModelError(
            f"architecture {name[:60]!r} is not served from GGUF; served are {', '.join(served)}"
        )
    return Architecture(name)


def _refuse_what_is_not_served(fields: Fields, architecture: Architecture) -> None:
    if fields.optional_integer(f"{architecture}.expert_count"):
        raise ModelError("mixtures of experts are not served")
    if (fields.optional_integer("split.count") or 1) > 1:
        raise ModelError("one part of a split GGUF file; merge the parts first")


def _vocab_size(file: GgufFile) -> int:
    """Rows of the embedding: the metadata's own count is optional, and says the same."""
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError("tensor token_embd.weight is missing")
    return embedding.shape[0]


def _head_dim(fields: Fields, architecture: Architecture, default: int) -> int:
    head_dim = fields.integer(f"{architecture}.attention.key_length", default)
    for name in ("attention.value_length", "rope.dimension_count"):
        size = fields.integer(f"{architecture}.{name}", head_dim)
        if size != head_dim:
            raise ModelError(f"{architecture}.{name} is {size}, served is the head size, {head_dim}")
    return head_dim


def _rope_scaling(file: GgufFile, fields: Fields, architecture: Architecture) -> RopeScaling | None:
    kind = fields.text(f"{architecture}.rope.scaling.type", "none")
    if kind not in ("none", "linear"):
        raise ModelError(f"rope scaling {kind[:60]!r} is not served from GGUF; served are none, linear")
    if ROPE_FACTORS in file.tensors:
        if kind == "linear":
            raise ModelError(f"linear rope scaling together with {ROPE_FACTORS} is not served")
        return _factor_rope(file)
    if kind == "linear":
        return LinearRope(factor=fields.number(f"{architecture}.rope.scaling.factor"))
    return None


def _factor_rope(file: GgufFile) -> FactorRope:
    factors = file.read(ROPE_FACTORS).reshape(-1)
    if not (factors > 0).all():
        raise ModelError(f"{ROPE_FACTORS} holds factors that are not above 0")
    return FactorRope(factors=tuple(float(factor) for factor in factors))


def _eos_token_ids(fields: Fields) -> tuple[int, ...]:
    """End of text and end of turn; the file may name the same token for both."""
    ids = (fields.optional_integer(key) for key in _END_KEYS)
    return tuple(dict.fromkeys(token_id for token_id in ids if token_id is not None))
