"""Which device a worker computes on."""

import pytest
import torch

from engine.errors import CapacityError
from engine.kernels.select import choose_backend


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_a_gpu_that_is_not_there_is_refused_in_one_line():
    with pytest.raises(CapacityError, match=r"no device cuda: torch .* finds none here") as refusal:
        choose_backend(torch.float32, 1, device="cuda")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("device", ["auto", "cpu"])
@pytest.mark.parametrize("has_gpu", [False, True])
def test_the_processor_serves_unless_a_gpu_is_asked_for(device, has_gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert choose_backend(torch.float32, 1, device=device).backend.device.type == "cpu"


def test_a_gpu_that_is_too_old_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    with pytest.raises(CapacityError, match="Tesla T4 is older"):
        choose_backend(torch.float32, 1, device="cuda")
