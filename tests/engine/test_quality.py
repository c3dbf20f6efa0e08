"""What rounding costs on a fixed text, against float32. The float32 figure is from `python -m benchmarks.quality`."""

from pathlib import Path

import pytest
import torch

from benchmarks.quality import MODES, likelihood, model_of, token_ids

TEXT = Path(__file__).parents[1] / "data" / "quality.txt"
IDS = token_ids(TEXT.read_text(encoding="utf-8"))
BEGINNING = 1200
FLOAT32_NATS = {len(IDS): 3.50334, BEGINNING: 3.57599, 300: 4.34644}
BOUNDS = {
    ("none", None): 0.005,
    ("int8", None): 0.01,
    ("int4", None): 0.015,
    ("gguf", torch.int8): 0.015,
}
"""By mode and KV dtype."""
PACKED = {"awq": (4.71279, 0.095), "gptq": (4.77237, 0.11), "gptq8": (4.35005, 0.005)}
"""By mode: the likelihood of the first 300 tokens with the same weights in float32, and the bound."""


def test_the_default_mode_keeps_within_its_bound_of_float32():
    assert len(IDS) > 4000
    found = likelihood(IDS, dtype=torch.bfloat16, quantization=MODES["gguf"], threads=2)
    assert found == pytest.approx(FLOAT32_NATS[len(IDS)], rel=0.01)


@pytest.mark.parametrize(("mode", "kv_dtype"), BOUNDS)
def test_a_mode_keeps_within_its_bound_on_the_beginning(mode, kv_dtype):
    """Of the same text: the whole of it is for the benchmark."""
    ids = IDS[:BEGINNING]
    options = {"kv_dtype": kv_dtype, "quantization": MODES[mode], "threads": 2}
    found = likelihood(ids, dtype=torch.bfloat16, **options)
    assert found == pytest.approx(FLOAT32_NATS[BEGINNING], rel=BOUNDS[mode, kv_dtype])


@pytest.fixture
def one_torch_thread():
    """Packing is many short operations, whose threads would wait for each other where others compute too."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("mode", PACKED)
def test_weights_that_are_packed_without_calibration_keep_within_their_bound(mode, one_torch_thread):
    """Which is what rounding them cost; computing with what they are costs as little as in any mode."""
    few = IDS[:300]
    exact, bound = PACKED[mode]
    with model_of(mode) as path:
        options = {"dtype": torch.bfloat16, "quantization": MODES[mode], "threads": 2, "path": path}
        found = likelihood(few, **options)
    assert found == pytest.approx(FLOAT32_NATS[len(few)], rel=bound)
    assert found == pytest.approx(exact, rel=0.0075)


def test_keys_and_values_in_fp8_cost_little():
    """Rounded as on a GPU, in a cache that the compiled kernels have: fewer tokens, since each takes longer so."""
    few = IDS[:300]
    found = likelihood(few, dtype=torch.bfloat16, kv_dtype=torch.float8_e4m3fn, threads=2)
    assert found == pytest.approx(FLOAT32_NATS[len(few)], rel=0.005)
