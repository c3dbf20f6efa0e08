"""GPU kernels in Triton's interpreter: close to float64, and the same bits wherever a row stands.

`make gpu-check` runs the same checks on a GPU, on the shapes of models.
"""

import pytest
import torch

from benchmarks.gpu_checks import Place, checks
from engine.kernels.triton.blocks import waves

PLACE = Place(device=torch.device("cpu"), large=False, dtypes=(torch.float32, torch.float16, torch.bfloat16))


@pytest.mark.parametrize("check", list(checks(PLACE)), ids=lambda check: check.name)
def test_kernel_keeps_within_its_bound(check, dots_in_order):
    assert check.run() <= 1


def test_copies_that_touch_each_other_are_not_done_at_once():
    copies = [(0, 5), (0, 6), (5, 1), (2, 5), (3, 4), (1, 3)]
    assert list(waves(copies)) == [[(0, 5), (0, 6)], [(5, 1)], [(2, 5), (3, 4)], [(1, 3)]]
