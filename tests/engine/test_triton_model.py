"""Whole models on the GPU kernels, in Triton's interpreter, as on the reference backend."""

import pytest
import torch
import transformers as hf
from gguf import GGMLQuantizationType as Type

from benchmarks.packed_folder import write_packed_folder
from benchmarks.quality import PACKINGS
from engine.kernels.reference import ReferenceBackend
from engine.kernels.triton.backend import TritonBackend
from engine.model.load import load_model
from engine.model.transformer import Quantization
from tests.engine.conftest import BLOCK_SIZE
from tests.engine.test_model_gguf import write_model
from tests.fakes.batches import BatchItem, batch_of

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
CONFIGS = {
    "norms of heads": hf.Qwen3Config(**SMALL, head_dim=16),
    "window and biases": hf.Qwen2Config(
        **SMALL, use_sliding_window=True, sliding_window=5, max_window_layers=1
    ),
}
PROMPT = [3, 17, 5, 60, 2, 44, 44, 8, 61]


def generate(path, backend, runner_of, steps, kv_dtype=torch.float32, quantization=Quantization.NONE):
    """(logits of each token said [1, vocab], greedy tokens): the prompt in the given steps, then one at a time."""
    runner = runner_of(load_model(path, backend, 32, quantization), 8, kv_dtype)
    tokens, logits, first = list(PROMPT), [], 0
    for count in steps:
        item = BatchItem(
            tokens=tuple(tokens[first : first + count]),
            first_position=first,
            block_table=tuple(range(7, 7 - -(-(first + count) // BLOCK_SIZE), -1)),
            wants_logits=first + count == len(tokens),
        )
        logits.append(runner.run(batch_of(item, block_size=BLOCK_SIZE)))
        first += count
        if first == len(tokens):
            tokens.append(int(logits[-1].argmax()))
    return torch.cat(logits), tokens[len(PROMPT) :]


@pytest.mark.parametrize(
    ("name", "kv_dtype"),
    [
        ("norms of heads", torch.float32),
        ("window and biases", torch.int8),
        ("norms of heads", torch.float8_e4m3fn),
    ],
)
def test_a_model_says_what_it_says_on_the_reference_backend(
    name, kv_dtype, random_model_of, runner_of, tmp_path, dots_in_order
):
    random_model_of(CONFIGS[name]).save_pretrained(tmp_path)
    steps = [len(PROMPT), 1, 1]
    wanted, tokens = generate(tmp_path, ReferenceBackend(torch.float32), runner_of, steps, kv_dtype)
    tested = TritonBackend(torch.float32, torch.device("cpu"))
    got, same_tokens = generate(tmp_path, tested, runner_of, steps, kv_dtype)
    assert same_tokens == tokens
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)
    for backend, whole in ((tested, got), (ReferenceBackend(torch.float32), wanted)):
        in_chunks, _ = generate(tmp_path, backend, runner_of, [4, 5, 1, 1], kv_dtype)
        assert torch.equal(in_chunks, whole)


GGUF_TYPES = (Type.Q4_0, Type.Q4_1, Type.Q8_0)


@pytest.mark.parametrize("form", [*PACKINGS, *GGUF_TYPES], ids=lambda form: getattr(form, "name", form))
def test_packed_weights_say_what_the_same_floats_say(
    form, random_model_of, runner_of, tmp_path, dots_in_order
):
    model = random_model_of(hf.LlamaConfig(**SMALL | {"hidden_size": 64, "intermediate_size": 128}))
    path = tmp_path / "packed"
    if form in GGUF_TYPES:
        write_model(path, model, quantization=form)
    else:
        model.save_pretrained(tmp_path / "floats")
        write_packed_folder(tmp_path / "floats", path, PACKINGS[form])
    wanted, tokens = generate(path, ReferenceBackend(torch.float32), runner_of, [9])
    packed = []

    class Tested(TritonBackend):
        def pack_quantized(self, weight, bias=None):
            packed.append(weight)
            return super().pack_quantized(weight, bias)

    tested = Tested(torch.float32, torch.device("cpu"))
    got, same_tokens = generate(path, tested, runner_of, [9], quantization=Quantization.STORED)
    assert len(packed) >= 4 * SMALL["num_hidden_layers"], "the integers are multiplied as they are"
    assert same_tokens == tokens
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)


def test_kernels_run_where_the_interpreter_or_a_gpu_is():
    with pytest.raises(AssertionError, match="cannot run on cuda"):
        TritonBackend(torch.float32, torch.device("cuda"))
