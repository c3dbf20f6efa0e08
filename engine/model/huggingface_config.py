"""The configuration of a Hugging Face model folder: config.json and generation_config.json.

Called by `read_config` and when weights are opened. Never opens a weight file; refuses what it would serve
wrongly. Defaults are those of transformers' configuration class for the model type: files may leave them out.
"""

import json
from pathlib import Path

from engine.errors import ModelError
from engine.model.architecture import Architecture, LinearRope, Llama3Rope, ModelConfig, RopeScaling
from engine.model.fields import Fields
from engine.model.packed_format import read_packed_format

JSON_BYTES_MAX = 64 * 2**20
LAYERS_MAX = 1024

_QWEN3_HEAD_DIM = 128
_MISTRAL_WINDOW = 4096


def read_huggingface_config(folder: Path) -> ModelConfig:
    """Raises ModelError for anything that is missing, broken or not served."""
    fields = Fields(read_json(folder / "config.json"))
    architecture = _architecture(fields)
    _refuse_what_is_not_served(fields)
    layers = fields.integer("num_hidden_layers")
    if layers > LAYERS_MAX:
        raise ModelError(f"num_hidden_layers is {layers}, the limit is {LAYERS_MAX}")
    hidden_size, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    head_dim = _QWEN3_HEAD_DIM if architecture is Architecture.QWEN3 else max(1, hidden_size // heads)
    bias = fields.flag("attention_bias", False)
    takes_bias_flag = architecture in (Architecture.LLAMA, Architecture.QWEN3)
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        layers=layers,
        heads=heads,
        kv_heads=fields.integer("num_key_value_heads", heads),
        head_dim=fields.integer("head_dim", head_dim),
        intermediate_size=fields.integer("intermediate_size"),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=_rope_theta(fields),
        rope_scaling=_rope_scaling(fields),
        max_position=fields.integer("max_position_embeddings"),
        windows=_windows(fields, architecture, layers),
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        qkv_bias=architecture is Architecture.QWEN2 or (takes_bias_flag and bias),
        output_bias=takes_bias_flag and bias,
        mlp_bias=architecture is Architecture.LLAMA and fields.flag("mlp_bias", False),
        qk_norm=architecture is Architecture.QWEN3,
        eos_token_ids=_eos_token_ids(folder, fields),
        bos_token_id=fields.optional_integer("bos_token_id"),
    )


def read_json(path: Path) -> dict[str, object]:
    """A JSON object from a file of bounded size. Raises ModelError."""
    if not path.is_file():
        raise ModelError(f"{path.name} is missing")
    if path.stat().st_size > JSON_BYTES_MAX:
        raise ModelError(f"{path.name} is larger than {JSON_BYTES_MAX} bytes")
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path.name} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path.name} is not a JSON object")
    return value


def _architecture(fields: Fields) -> Architecture:
    name = fields.text("model_type")
    try:
        return Architecture(name)
    except ValueError:
        served = ", ".join(Architecture)
        raise ModelError(f"model_type {name[:60]!r} is not served; served are {served}") from None


def _refuse_what_is_not_served(fields: Fields) -> None:
    read_packed_format(fields)
    activation = fields.text("hidden_act", "silu")
    if activation != "silu":
        raise ModelError(f"hidden_act {activation[:60]!r} is not served; served is silu")


def _rope_sections(fields: Fields) -> tuple[Fields, ...]:
    """Newest spelling first: rope_parameters replaced rope_scaling in transformers 5."""
    return fields.section("rope_parameters"), fields.section("rope_scaling")


def _rope_theta(fields: Fields) -> float:
    for section in (*_rope_sections(fields), fields):
        if section.has("rope_theta"):
            return section.number("rope_theta")
    return 10_000.0


def _rope_scaling(fields: Fields) -> RopeScaling | None:
    for section in (*_rope_sections(fields), fields):
        if section.number("partial_rotary_factor", 1.0) != 1.0:
            raise ModelError("partial_rotary_factor other than 1 is not served")
    for section in _rope_sections(fields):
        if section.sections():
            raise ModelError("rotary parameters that differ from layer to layer are not served")
        kind = section.text("rope_type", section.text("type", "default"))
        if kind == "linear":
            return LinearRope(factor=section.number("factor"))
        if kind == "llama3":
            return _llama3_rope(section, fields)
        if kind != "default":
            raise ModelError(f"rope_type {kind[:60]!r} is not served; served are default, linear, llama3")
    return None


def _llama3_rope(section: Fields, fields: Fields) -> Llama3Rope:
    low, high = section.number("low_freq_factor"), section.number("high_freq_factor")
    if low >= high:
        raise ModelError(f"low_freq_factor {low} is not below high_freq_factor {high}")
    original = "original_max_position_embeddings"
    return Llama3Rope(
        factor=section.number("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position=section.integer(original, fields.integer("max_position_embeddings")),
    )


def _windows(fields: Fields, architecture: Architecture, layers: int) -> tuple[int | None, ...]:
    match architecture:
        case Architecture.LLAMA:
            return (None,) * layers
        case Architecture.MISTRAL:
            return (_mistral_window(fields),) * layers
        case Architecture.QWEN2 | Architecture.QWEN3:
            return _qwen_windows(fields, layers)


def _mistral_window(fields: Fields) -> int | None:
    if fields.names("sliding_window"):
        return fields.optional_integer("sliding_window", low=1)
    return _MISTRAL_WINDOW


def _qwen_windows(fields: Fields, layers: int) -> tuple[int | None, ...]:
    if not fields.flag("use_sliding_window", False):
        return (None,) * layers
    window = fields.integer("sliding_window", 4096)
    if not fields.has("layer_types"):
        first = fields.integer("max_window_layers", 28, low=0)
        return tuple(window if layer >= first else None for layer in range(layers))
    kinds = fields.texts("layer_types")
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
    if unknown:
        raise ModelError(f"layer type {min(unknown)[:60]!r} is not served")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _eos_token_ids(folder: Path, fields: Fields) -> tuple[int, ...]:
    """generation_config.json knows every token that ends an answer; config.json often only one of them."""
    path = folder / "generation_config.json"
    if path.exists():
        ids = Fields(read_json(path)).token_ids("eos_token_id")
        if ids:
            return ids
    return fields.token_ids("eos_token_id")
