"""Broken, foreign and hostile model files give a ModelError of one clear line; sound ones have a digest."""

import json
import struct

import gguf
import numpy as np
import pytest
import torch
import transformers as hf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from engine.errors import ModelError
from engine.model import weights
from engine.model.architecture import LinearRope, Llama3Rope
from engine.model.config import read_config
from engine.model.weights import model_digest, open_model

CONFIG = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "eos_token_id": 2,
}


@pytest.fixture
def folder(tmp_path):
    """A sound model folder that a test may break."""
    torch.manual_seed(5)
    path = tmp_path / "model"
    hf.AutoModelForCausalLM.from_config(hf.LlamaConfig(**CONFIG)).save_pretrained(path)
    (path / "generation_config.json").unlink()
    write_config(path, CONFIG)
    return path


def write_config(path, values):
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(values))


def refusal(path):
    with pytest.raises(ModelError) as raised:
        open_model(path)
    line = str(raised.value)
    assert line.startswith(f"{path}: ")
    assert "\n" not in line
    assert len(line) < 400
    return line.removeprefix(f"{path}: ")


def test_a_path_that_does_not_exist(tmp_path):
    assert refusal(tmp_path / "nothing.gguf") == "cannot be read: No such file or directory"


def test_a_folder_without_config(tmp_path):
    assert refusal(tmp_path) == "config.json is missing"


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[1]", b"[" * 100_000, b'{"a": ' + b"9" * 5000])
def test_a_config_that_is_not_a_json_object(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    assert refusal(tmp_path).startswith("config.json is not")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"model_type": "mamba"},
            "model_type 'mamba' is not served; served are llama, mistral, qwen2, qwen3",
        ),
        ({"model_type": None}, "model_type is missing"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "32"}, "hidden_size is '32', wanted an integer >= 1"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0, wanted an integer >= 1"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers is 1000000, the limit is 1024"),
        ({"vocab_size": 2**40}, f"vocab_size is {2**40}, wanted an integer >= 1"),
        ({"num_key_value_heads": 3}, "4 heads cannot share 3 key/value heads evenly"),
        ({"head_dim": 7}, "rotary positions need an even head size, not 7"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan, wanted a finite number above 0"),
        ({"rms_norm_eps": True}, "rms_norm_eps is True, wanted a number"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no', wanted true or false"),
        ({"eos_token_id": [2, 96]}, "special token 96 is outside the vocabulary of 96"),
        ({"eos_token_id": "2"}, "eos_token_id is '2', wanted token ids"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not served; served is silu"),
        ({"rope_scaling": {"type": "yarn", "factor": 2}}, "rope_type 'yarn' is not served"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear', wanted a section"),
        ({"rope_parameters": {"full_attention": {}}}, "rotary parameters that differ from layer to layer"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor other than 1 is not served"),
        (
            {"head_dim": 16},
            "tensor model.layers.0.self_attn.q_proj.weight has shape [32, 32], wanted [64, 32]",
        ),
        ({"num_hidden_layers": 3}, "tensor model.layers.2.input_layernorm.weight is missing"),
        (
            {"num_hidden_layers": 1},
            "'model.layers.1.input_layernorm.weight' has no place in this llama model",
        ),
    ],
)
def test_a_config_that_is_wrong_or_not_served(folder, change, reason):
    write_config(folder, CONFIG | change)
    assert reason in refusal(folder)


@pytest.mark.parametrize(
    ("change", "scaling"),
    [
        ({}, None),
        ({"rope_scaling": None}, None),
        ({"rope_parameters": {"rope_type": "default"}}, None),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, LinearRope(factor=2.0)),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.5}}, LinearRope(factor=2.5)),
        ({"rope_parameters": {"rope_type": "linear", "factor": 3.0}}, LinearRope(factor=3.0)),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 8192,
                }
            },
            Llama3Rope(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192),
        ),
    ],
)
def test_rope_scaling_in_old_and_new_spelling(tmp_path, change, scaling):
    write_config(tmp_path, CONFIG | change)
    assert read_config(tmp_path).rope_scaling == scaling


@pytest.mark.parametrize(
    ("change", "theta"),
    [({}, 10_000.0), ({"rope_theta": 5e5}, 5e5), ({"rope_parameters": {"rope_theta": 1e6}}, 1e6)],
)
def test_rope_theta_in_old_and_new_spelling(tmp_path, change, theta):
    write_config(tmp_path, CONFIG | change)
    assert read_config(tmp_path).rope_theta == theta


@pytest.mark.parametrize(
    ("change", "windows"),
    [
        ({"model_type": "llama", "sliding_window": 8}, (None, None)),
        ({"model_type": "mistral", "sliding_window": 8}, (8, 8)),
        ({"model_type": "mistral", "sliding_window": None}, (None, None)),
        ({"model_type": "mistral"}, (4096, 4096)),
        ({"model_type": "qwen2", "sliding_window": 8}, (None, None)),
        (
            {
                "model_type": "qwen2",
                "use_sliding_window": True,
                "sliding_window": 8,
                "max_window_layers": 1,
            },
            (None, 8),
        ),
        (
            {
                "model_type": "qwen3",
                "use_sliding_window": True,
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            (8, None),
        ),
    ],
)
def test_which_layers_have_a_window(tmp_path, change, windows):
    write_config(tmp_path, CONFIG | change)
    assert read_config(tmp_path).windows == windows


def test_end_tokens_of_the_generation_config_come_first(tmp_path):
    write_config(tmp_path, CONFIG)
    assert read_config(tmp_path).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert read_config(tmp_path).eos_token_ids == (7, 9)
    (tmp_path / "generation_config.json").write_text("{}")
    assert read_config(tmp_path).eos_token_ids == (2,)


def test_pickled_weights_are_refused_unread(folder):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n")
    assert refusal(folder) == "pickled weights are refused; convert them to safetensors"


def test_a_folder_without_weights(folder):
    (folder / "model.safetensors").unlink()
    assert refusal(folder).startswith("neither model.safetensors nor")


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_truncated_safetensors(folder, keep):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    assert refusal(folder).startswith("model.safetensors is not a sound safetensors file")


def test_a_missing_an_extra_and_a_strangely_typed_tensor(folder):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    norm = tensors.pop("model.norm.weight")
    save_file(tensors, file)
    assert refusal(folder) == "tensor model.norm.weight is missing"
    save_file(tensors | {"model.norm.weight": norm, "score.weight": norm.clone()}, file)
    assert refusal(folder) == "tensor 'score.weight' has no place in this llama model"
    save_file(tensors | {"model.norm.weight": norm.double()}, file)
    assert refusal(folder).startswith("tensor 'model.norm.weight' has dtype F64; served are")


def test_values_that_are_not_finite_are_refused(folder, logits_of):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(tensors, file)
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.up_proj\.weight holds values that are not"):
        logits_of(folder, [1])


def test_buffers_of_old_checkpoints_and_a_tied_copy_of_the_head_are_let_pass(folder):
    file = folder / "model.safetensors"
    tensors = load_file(file) | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    save_file(tensors, file)
    write_config(folder, CONFIG | {"tie_word_embeddings": True})
    config, _ = open_model(folder)
    assert config.tie_word_embeddings


@pytest.mark.parametrize(
    ("index", "reason"),
    [
        ({}, "has no weight_map"),
        (
            {"weight_map": {"a": "../x.safetensors"}},
            "names '../x.safetensors', wanted safetensors files beside it",
        ),
        ({"weight_map": {"a": "x.bin"}}, "names 'x.bin', wanted safetensors files beside it"),
        ({"weight_map": {"a": 3}}, "names '', wanted safetensors files beside it"),
        ({"weight_map": {"a": "x.safetensors"}}, "cannot be read: No such file or directory"),
    ],
)
def test_an_index_that_is_wrong(folder, index, reason):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert reason in refusal(folder)


def gguf_bytes(path):
    """A file with metadata of every shape, and two tensors."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_token_list(["a", "bc", "def"])
    writer.add_token_types([1, 1, 1])
    writer.add_tensor("token_embd.weight", np.ones((3, 8), np.float32))
    writer.add_tensor("output_norm.weight", np.ones(8, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def test_a_gguf_file_cut_anywhere(tmp_path):
    path = tmp_path / "model.gguf"
    content = gguf_bytes(path)
    for size in range(0, len(content), 7):
        path.write_bytes(content[:size])
        reason = refusal(path)
        assert "truncated" in reason or "not a GGUF file" in reason


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=200)
@given(place=st.integers(0, 400), value=st.binary(min_size=1, max_size=8))
def test_a_gguf_file_with_overwritten_bytes_never_gives_anything_but_a_model_error(tmp_path, place, value):
    path = tmp_path / "model.gguf"
    content = bytearray(gguf_bytes(path))
    content[place : place + len(value)] = value
    path.write_bytes(content)
    refusal(path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not a GGUF file: too short"),
        (b"\x7fELF" + bytes(200), "not a GGUF file"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(16), "GGUF version 1 is not served"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(16), "GGUF version 50331648 is not served"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**63, 0), "truncated"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**63), "truncated"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**63), "the limit is"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 8, 2**62), "truncated"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 12, 2**62), "truncated"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 9, 1), "nested metadata arrays"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"k", 77), "unknown metadata type 77"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"\xff", 4), "is not UTF-8"),
        (b"GGUF" + struct.pack("<IQQQ1sII", 3, 1, 0, 1, b"t", 9, 0), "tensor 't' has 9 dimensions"),
        (b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 0, 0, 0), "of shape (0,)"),
        (b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 33, 8, 0), "cannot be stored as Q8_0"),
        (b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 8, 0, 5), "begins off the alignment"),
        (b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 2**60, 0, 0), "truncated: tensor 't'"),
        (b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 8, 99, 0), "has type 99; served are"),
    ],
)
def test_a_gguf_header_that_lies(tmp_path, content, reason):
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    assert reason in refusal(path)


def test_the_digest_tells_weights_and_configurations_apart(folder):
    first = model_digest(folder)
    assert len(bytes.fromhex(first)) == 32
    assert model_digest(folder) == first
    write_config(folder, CONFIG | {"rms_norm_eps": 1e-5})
    assert model_digest(folder) != first
    write_config(folder, CONFIG)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.self_attn.k_proj.weight"][7, 7] += 1e-3
    save_file(tensors, file)
    assert model_digest(folder) != first


def test_the_digest_of_a_big_model_covers_the_ends_of_each_tensor(folder, monkeypatch):
    monkeypatch.setattr(weights, "DIGEST_WHOLE_BYTES_MAX", 1)
    monkeypatch.setattr(weights, "DIGEST_SAMPLE_BYTES", 16)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    first = model_digest(folder)
    tensors["model.embed_tokens.weight"][48, 0] += 1
    save_file(tensors, file)
    assert model_digest(folder) == first
    tensors["model.embed_tokens.weight"][-1, -1] += 1
    save_file(tensors, file)
    assert model_digest(folder) != first
