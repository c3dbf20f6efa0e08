"""Which device a worker computes on."""

from subprocess import CalledProcessError

import pytest
import torch

from engine.collective import Share
from engine.devices import first_gpu
from engine.errors import CapacityError
from engine.kernels.select import choose_backend, require_launch


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
    with pytest.raises(
        CapacityError, match="tensor_parallel_size 4 from cuda:0 on needs 4 GPUs, and there are 3"
    ):
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


@pytest.fixture
def two_gpus(monkeypatch):
    """The second is too old."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda gpu: ((9, 0), (7, 5))[gpu])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda gpu: ("H100", "Tesla T4")[gpu])


def test_a_gpu_that_is_not_there_or_too_old_is_refused_by_name(two_gpus):
    with pytest.raises(CapacityError, match="cuda:2 needs 3 GPUs, and there are 2"):
        choose_backend(None, 1, device="cuda:2")
    for device, share in (("cuda:1", Share(rank=0, size=1)), ("cuda", Share(rank=0, size=2))):
        with pytest.raises(CapacityError, match=r"Tesla T4 is older than compute capability 8\.0"):
            choose_backend(None, 1, device=device, share=share)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            RuntimeError("Failed to find C compiler.\nPlease specify one"),
            "nothing here: Failed to find C compiler.$",
        ),
        (CalledProcessError(1, ["gcc"]), "returned non-zero exit status 1"),
        (OSError(), "nothing here: OSError$"),
    ],
)
def test_what_triton_lacks_to_launch_is_missed_before_anything_is_loaded(error, said):
    def launch():
        raise error

    with pytest.raises(
        CapacityError, match=f"no device cuda: triton launches {said}" if "nothing" in said else said
    ):
        require_launch(launch)


@pytest.mark.parametrize(
    ("device", "gpu"), [("auto", None), ("cpu", None), ("cuda", 0), ("cuda:0", 0), ("cuda:11", 11)]
)
def test_a_gpu_is_meant_by_its_index_or_the_first_one(device, gpu):
    assert first_gpu(device) == gpu
