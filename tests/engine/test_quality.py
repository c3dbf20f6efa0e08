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


@pytest.mark.parametrize(("mode", "bound"), [("awq", 0.1), ("gptq", 0.12)])
def test_weights_that_are_packed_without_calibration_keep_within_their_bound(mode, bound, one_torch_thread):
    few = IDS[:300]
    with model_of(mode) as path:
        options = {"dtype": torch.bfloat16, "quantization": MODES[mode], "threads": 2, "path": path}
        assert likelihood(few, **options) == pytest.approx(FLOAT32_NATS[len(few)], rel=bound)


def test_keys_and_values_in_fp8_cost_little():
    """Rounded as on a GPU, in a cache that the compiled kernels have: fewer tokens, since each takes longer so."""
    few = IDS[:300]
    found = likelihood(few, dtype=torch.bfloat16, kv_dtype=torch.float8_e4m3fn, threads=2)
    assert found == pytest.approx(FLOAT32_NATS[len(few)], rel=0.005)
