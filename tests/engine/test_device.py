"""Which device a worker computes on."""

import pytest
import torch

from engine.collective import Share
from engine.errors import CapacityError
from engine.kernels.select import choose_backend


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_a_gpu_that_is_not_there_is_refused_in_one_line():
    with pytest.raises(CapacityError, match=r"no device cuda: torch .* finds none here") as refusal:
        choose_backend(torch.float32, 1, device="cuda")
    assert "\n" not in str(refusal.value)


def test_ranks_need_a_gpu_each(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    with pytest.raises(CapacityError, match="tensor_parallel_size 4 needs as many GPUs, and there are 3"):
        choose_backend(torch.float32, 1, device="cuda", share=Share(rank=0, size=4))


def test_ranks_need_the_compiled_kernels(tmp_path):
    options = {"cache_folder": tmp_path, "compilers": ("no-such-compiler",)}
    assert choose_backend(torch.float32, 1, **options).backend.name == "reference"
    with pytest.raises(
        CapacityError, match=r"tensor_parallel_size 2 needs the compiled kernels: .*no-such-compiler"
    ):
        choose_backend(torch.float32, 1, share=Share(rank=0, size=2), **options)


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
