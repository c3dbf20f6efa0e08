"""Tiny random checkpoints give the logits that transformers gives."""

import pytest
import torch
import transformers as hf

TOKENS = [3, 17, 5, 91, 2, 44, 44, 8, 60, 23, 71, 1, 39, 12, 88, 64, 30, 7, 55, 19]

SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
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
CONFIGS = {
    "llama": hf.LlamaConfig(**SMALL),
    "llama, no sharing of heads, tied": hf.LlamaConfig(
        **SMALL | {"num_key_value_heads": 4}, tie_word_embeddings=True
    ),
    "llama, one key head, all biases": hf.LlamaConfig(
        **SMALL | {"num_key_value_heads": 1}, attention_bias=True, mlp_bias=True
    ),
    "llama, linear rope": hf.LlamaConfig(
        **SMALL, rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    ),
    "llama, llama3 rope": hf.LlamaConfig(**SMALL, rope_parameters=LLAMA3),
    "mistral, window": hf.MistralConfig(**SMALL, sliding_window=5),
    "mistral, no window": hf.MistralConfig(**SMALL, sliding_window=None, head_dim=16),
    "qwen2": hf.Qwen2Config(**SMALL),
    "qwen2, window from layer 1": hf.Qwen2Config(
        **SMALL, use_sliding_window=True, sliding_window=6, max_window_layers=1, tie_word_embeddings=True
    ),
    "qwen3": hf.Qwen3Config(**SMALL, head_dim=24),
    "qwen3, attention bias": hf.Qwen3Config(**SMALL, head_dim=16, attention_bias=True),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_those_of_transformers(name, random_model_of, logits_of, assert_logits_close, tmp_path):
    model = random_model_of(CONFIGS[name])
    model.save_pretrained(tmp_path)
    assert_logits_close(logits_of(tmp_path, TOKENS), model, TOKENS)


def test_logits_of_a_sharded_checkpoint_equal_those_of_the_model(
    random_model_of, logits_of, assert_logits_close, tmp_path
):
    model = random_model_of(CONFIGS["llama"])
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    assert_logits_close(logits_of(tmp_path, TOKENS), model, TOKENS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_half_precision_checkpoint_is_computed_from_its_stored_values(
    dtype, random_model_of, logits_of, assert_logits_close, tmp_path
):
    random_model_of(CONFIGS["qwen2"]).to(dtype).save_pretrained(tmp_path)
    model = hf.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    )
    assert_logits_close(logits_of(tmp_path, TOKENS), model, TOKENS)
