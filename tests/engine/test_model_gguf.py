"""GGUF files: every served type, the order of rotary rows, and the numbers of the metadata."""

import gguf
import numpy as np
import pytest
import torch
import transformers as hf
from gguf import GGMLQuantizationType as Type

from engine.errors import ModelError
from engine.model.architecture import FactorRope, LinearRope
from engine.model.config import read_config
from engine.model.gguf_file import SERVED_TYPES, GgufFile
from tests.fakes.gguf_quantizers import write_tensor

TOKENS = [3, 17, 5, 91, 2, 44, 44, 8, 60, 23, 71, 1, 39]

SMALL = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
MODELS = {
    "llama": hf.LlamaConfig(**SMALL),
    "llama with biases, tied": hf.LlamaConfig(
        **SMALL, attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    "llama with linear rope": hf.LlamaConfig(
        **SMALL, rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    ),
    "llama with llama3 rope": hf.LlamaConfig(**SMALL, rope_parameters=LLAMA3),
    "qwen2": hf.Qwen2Config(**SMALL),
    "qwen3": hf.Qwen3Config(**SMALL, head_dim=24),
}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def stored_name(name):
    module, kind = name.rsplit(".", 1)
    if not module.startswith("model.layers."):
        return f"{NAMES[module]}.{kind}"
    layer, part = module.removeprefix("model.layers.").split(".", 1)
    return f"blk.{layer}.{NAMES[part]}.{kind}"


def interleaved(tensor, heads):
    """As llama.cpp's converter stores rotary rows of llama models."""
    return tensor.reshape(heads, 2, -1, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)


def write_model(path, model, *, quantization=Type.F32, leave_out=(), extra=()):
    """A GGUF file of a transformers model, as llama.cpp's converter lays it out."""
    config = model.config
    writer = gguf.GGUFWriter(path, config.model_type)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if config.model_type == "qwen3":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if config.rope_parameters["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config.rope_parameters["factor"])
    writer.add_token_list([f"token {index}" for index in range(config.vocab_size)])
    writer.add_token_types([1] * config.vocab_size)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(5)
    for key, value in extra:
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    if config.rope_parameters["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(model))
    for name, tensor in stored_tensors(model).items():
        if name not in leave_out:
            kind = quantization if tensor.ndim == 2 else Type.F32
            writer.add_tensor(name, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def llama3_factors(model):
    config = model.config
    exponents = np.arange(0, config.head_dim, 2) / config.head_dim
    plain = config.rope_parameters["rope_theta"] ** -exponents
    return (plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)


def stored_tensors(model):
    config = model.config
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    tensors = {}
    for name, parameter in model.named_parameters():
        tensor = parameter.detach().numpy()
        projection = name.split(".")[-2]
        if config.model_type == "llama" and projection in heads:
            tensor = interleaved(tensor, heads[projection])
        tensors[stored_name(name)] = np.ascontiguousarray(tensor)
    return tensors


@pytest.mark.parametrize("name", MODELS)
def test_logits_of_a_gguf_file_equal_those_of_the_model_it_was_made_from(
    name, random_model_of, logits_of, assert_logits_close, tmp_path
):
    model = random_model_of(MODELS[name])
    write_model(tmp_path / "model.gguf", model)
    assert_logits_close(logits_of(tmp_path / "model.gguf", TOKENS), model, TOKENS)


@pytest.mark.parametrize("kind", [Type.Q8_0, Type.Q4_0, Type.Q5_1, Type.F16, Type.BF16], ids=lambda t: t.name)
def test_a_quantised_model_computes_with_its_dequantised_weights(
    kind, random_model_of, logits_of, assert_logits_close, tmp_path
):
    model = random_model_of(MODELS["qwen2"])
    write_model(tmp_path / "model.gguf", model, quantization=kind)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                stored = gguf.quants.quantize(parameter.numpy(), kind)
                parameter.copy_(torch.from_numpy(gguf.quants.dequantize(stored, kind)))
    assert_logits_close(logits_of(tmp_path / "model.gguf", TOKENS), model, TOKENS)


@pytest.mark.parametrize("shape", [(6, 512), (32, 256), (1, 256)], ids=str)
@pytest.mark.parametrize("kind", SERVED_TYPES, ids=lambda kind: kind.name)
def test_every_served_type_dequantises_as_the_gguf_package_does(kind, shape, tmp_path):
    stored = random_blocks(kind, shape)
    write_tensor(tmp_path / "one.gguf", stored, kind)
    file = GgufFile(tmp_path / "one.gguf")
    assert file.tensors["t"].shape == shape
    assert bytes(file.raw("t")) == stored.tobytes()
    np.testing.assert_array_equal(file.read("t"), gguf.quants.dequantize(stored, kind))


def random_blocks(kind, shape):
    """Blocks with random bits whose scales, two leading float16 in most types, are ordinary numbers."""
    rng = np.random.default_rng(3)
    if kind in (Type.F32, Type.F16, Type.BF16):
        return gguf.quants.quantize(rng.standard_normal(shape, np.float32), kind)
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (shape[0] * shape[1] // block, block_bytes), np.uint8)
    scales = rng.uniform(0.01, 2, (len(blocks), 2)).astype(np.float16).view(np.uint8)
    place = slice(-2, None) if kind is Type.Q6_K else slice(0, 2)
    blocks[:, place] = scales[:, :2]
    if kind in (Type.Q4_1, Type.Q5_1, Type.Q4_K, Type.Q5_K):
        blocks[:, 2:4] = scales[:, 2:]
    return blocks.reshape(shape[0], -1)


def test_the_configuration_is_read_from_the_metadata(random_model_of, tmp_path):
    write_model(
        tmp_path / "model.gguf",
        random_model_of(MODELS["qwen3"]),
        extra=[("qwen3.attention.sliding_window", 7)],
    )
    config = read_config(tmp_path / "model.gguf")
    assert config.architecture == "qwen3"
    assert (config.vocab_size, config.hidden_size, config.layers) == (96, 64, 2)
    assert (config.heads, config.kv_heads, config.head_dim, config.intermediate_size) == (4, 2, 24, 32)
    assert config.max_position == 64
    assert config.windows == (7, 7)
    assert config.qk_norm
    assert not config.qkv_bias
    assert not config.tie_word_embeddings
    assert config.eos_token_ids == (2, 5)
    assert config.bos_token_id == 1


def test_rope_scaling_is_read_from_the_metadata_or_from_the_factors(random_model_of, tmp_path):
    write_model(tmp_path / "linear.gguf", random_model_of(MODELS["llama with linear rope"]))
    llama3 = random_model_of(MODELS["llama with llama3 rope"])
    write_model(tmp_path / "factors.gguf", llama3)
    assert read_config(tmp_path / "linear.gguf").rope_scaling == LinearRope(factor=4.0)
    factors = tuple(map(float, llama3_factors(llama3)))
    assert read_config(tmp_path / "factors.gguf").rope_scaling == FactorRope(factors=factors)


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        (("qwen2.rope.scaling.type", "yarn"), "rope scaling 'yarn' is not served"),
        (("qwen2.expert_count", 8), "mixtures of experts are not served"),
        (("split.count", 3), "one part of a split GGUF file"),
        (("qwen2.rope.dimension_count", 8), "qwen2.rope.dimension_count is 8"),
        (("qwen2.attention.key_length", 32), "has shape [64, 64], wanted [128, 64]"),
        (("tokenizer.ggml.eom_token_id", 5), None),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(extra, reason, random_model_of, logits_of, tmp_path):
    path = tmp_path / "model.gguf"
    write_model(path, random_model_of(MODELS["qwen2"]), extra=[extra])
    if reason is None:
        assert logits_of(path, TOKENS).shape == (len(TOKENS), 96)
        return
    with pytest.raises(ModelError) as raised:
        logits_of(path, TOKENS)
    assert reason in str(raised.value)


def test_a_missing_tensor_is_named(random_model_of, logits_of, tmp_path):
    write_model(tmp_path / "model.gguf", random_model_of(MODELS["llama"]), leave_out={"blk.1.ffn_up.weight"})
    with pytest.raises(ModelError, match=r"tensor model\.layers\.1\.mlp\.up_proj\.weight is missing"):
        logits_of(tmp_path / "model.gguf", TOKENS)


def test_another_architecture_is_refused_by_its_name(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match="architecture 'mamba' is not served"):
        read_config(tmp_path / "model.gguf")


def test_a_type_that_is_not_served_is_named(tmp_path):
    write_tensor(tmp_path / "one.gguf", np.zeros((1, 84), np.uint8), Type.Q2_K)
    with pytest.raises(ModelError, match="tensor 't' has type Q2_K; served are F32, F16"):
        GgufFile(tmp_path / "one.gguf")
