"""GPU kernels in Triton's interpreter: close to float64, and the same bits wherever a row stands.

`make gpu-check` runs the same checks on a GPU, on the shapes of models.
"""

import pytest
import torch

from benchmarks.gpu_checks import Place, checks

PLACE = Place(device=torch.device("cpu"), large=False, dtypes=(torch.float32, torch.float16, torch.bfloat16))


@pytest.mark.parametrize("check", list(checks(PLACE)), ids=lambda check: check.name)
def test_kernel_keeps_within_its_bound(check, dots_in_order):
    assert check.run() <= 1
