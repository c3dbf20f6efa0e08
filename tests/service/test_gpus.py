"""Which GPUs the workers of `serve` have, and how much of each."""

import pytest

from commands.gpus import deal_gpus, visible_gpus
from commands.serve import plan
from service import config
from service.config import DecodeWorkerOptions, ServeOptions, WorkerOptions
from service.flags import ConfigError

MODELS = {"prefill-worker": WorkerOptions, "decode-worker": DecodeWorkerOptions}


def workers_of(specs):
    """The options that planned workers will have."""
    workers = [spec for spec in specs if spec.argv[3] in MODELS]
    return [config.load(MODELS[spec.argv[3]], spec.argv[4:], spec.environ) for spec in workers]


@pytest.mark.parametrize(
    ("workers", "gpus", "seats"),
    [
        ([("cuda", 1), ("cuda", 1)], 1, [("cuda:0", 2), ("cuda:0", 2)]),
        ([("cuda", 1), ("cuda", 1)], 2, [("cuda:0", 1), ("cuda:1", 1)]),
        ([("cuda", 1), ("cuda", 1), ("cuda", 1)], 2, [("cuda:0", 2), ("cuda:1", 1), ("cuda:0", 2)]),
        ([("cuda", 2), ("cuda", 4)], 8, [("cuda:0", 1), ("cuda:2", 1)]),
        ([("cuda", 2), ("cuda", 4)], 4, [("cuda:0", 2), ("cuda:0", 2)]),
        ([("cuda", 1), ("cuda", 2)], 2, [("cuda:0", 2), ("cuda:0", 2)]),
        ([("cuda:3", 1), ("cuda", 1)], 4, [("cuda:3", 1), ("cuda:0", 1)]),
        ([("cuda:0", 1), ("cuda", 1)], 8, [("cuda:0", 1), ("cuda:1", 1)]),
        ([("cuda", 1), ("cuda:0", 1)], 2, [("cuda:1", 1), ("cuda:0", 1)]),
        ([("cuda", 2), ("cuda", 2)], 3, [("cuda:0", 2), ("cuda:1", 2)]),
        ([("cuda:1", 1), ("cuda:1", 1)], 4, [("cuda:1", 2), ("cuda:1", 2)]),
        ([("cuda", 4)], 2, [("cuda:0", 1)]),
        ([("auto", 1), ("cpu", 1)], 8, [("auto", 2), ("cpu", 2)]),
    ],
)
def test_workers_have_gpus_of_their_own_as_long_as_there_are_any(workers, gpus, seats):
    named = [(str(at), device, ranks) for at, (device, ranks) in enumerate(workers)]
    assert list(deal_gpus(named, gpus).values()) == seats


def test_gpus_are_counted_as_a_worker_will_see_them(tmp_path):
    assert visible_gpus({}, tmp_path / "none") == 1
    for number in range(3):
        (tmp_path / f"0000:0{number}:00.0").mkdir()
    assert visible_gpus({}, tmp_path) == 3
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "2,5"}, tmp_path) == 2
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == 1


@pytest.mark.parametrize(
    ("visible", "argv", "shares"),
    [
        ("0", ["--device", "cuda"], [("cuda:0", 0.45), ("cuda:0", 0.45)]),
        ("0,1", ["--device", "cuda"], [("cuda:0", 0.9), ("cuda:1", 0.9)]),
        ("0,1", ["--device", "cuda:1"], [("cuda:1", 0.45), ("cuda:1", 0.45)]),
        (
            "0,1",
            ["--device", "cuda", "--gpu-memory-utilization", "0.5"],
            [("cuda:0", 0.5), ("cuda:1", 0.5)],
        ),
        ("0,1", ["--gpu-memory-utilization", "0.5"], [("auto", 0.25), ("auto", 0.25)]),
        ("0,1", [], [("auto", None), ("auto", None)]),
    ],
)
def test_memory_is_shared_by_those_who_are_on_the_same_gpu(tmp_path, visible, argv, shares):
    options = config.load(ServeOptions, argv, {})
    specs = plan(options, tmp_path, {"CUDA_VISIBLE_DEVICES": visible}, "00" * 32)
    found = [(worker.device, worker.gpu_memory_utilization) for worker in workers_of(specs)]
    assert found == shares


@pytest.mark.parametrize(
    ("argv", "shares"),
    [
        (["--device", "cuda"], [0.5, 0.5]),
        (["--device", "cuda", "--prefill", "3"], [0.25] * 4),
        (["--prefill-device", "cuda"], [0.5, 1.0]),
        ([], [1.0, 1.0]),
    ],
)
def test_host_memory_is_promised_once_however_many_gpus_there_are(tmp_path, argv, shares):
    specs = plan(
        config.load(ServeOptions, argv, {}), tmp_path, {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, "00" * 32
    )
    assert [worker.host_memory_share for worker in workers_of(specs)] == shares


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "cuda:1234", "", "CPU"])
def test_what_is_no_device_is_refused_in_words(device):
    with pytest.raises(ConfigError) as refusal:
        config.load(ServeOptions, [f"--device={device}"], {})
    assert refusal.value.lines == ("--device: a device is auto, cpu, cuda or cuda:N",)
