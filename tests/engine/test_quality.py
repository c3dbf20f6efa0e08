"""What rounding costs on a fixed text, against float32. The float32 figure is from `python -m benchmarks.quality`."""

from pathlib import Path

import pytest
import torch

from benchmarks.quality import MODES, likelihood, token_ids

TEXT = Path(__file__).parents[1] / "data" / "quality.txt"
FLOAT32_NATS = 3.50334
BOUNDS = {"none": 0.005, "gguf": 0.01, "int8": 0.01, "int4": 0.015}


@pytest.mark.parametrize("mode", BOUNDS)
def test_a_mode_keeps_within_its_bound_of_float32(mode):
    ids = token_ids(TEXT.read_text(encoding="utf-8"))
    assert len(ids) > 4000
    found = likelihood(ids, dtype=torch.bfloat16, quantization=MODES[mode], threads=2)
    assert found == pytest.approx(FLOAT32_NATS, rel=BOUNDS[mode])
