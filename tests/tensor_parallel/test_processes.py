"""Ranks as processes of their own, over gloo: the tokens of one rank, and an end when one of them is lost."""

import os
import queue
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import transformers as hf

from commands.ranks import cores_of, following, threads_of
from decode_worker.policy import DecodePolicy
from engine.assembly import assemble
from engine.collective import Share
from engine.errors import CapacityError, ModelError, RankLost
from engine.sequence import SamplingParams, Sequence, StopRules
from engine.wishes import EngineWishes
from service.config import WorkerOptions
from service.startup import StartupError
from service.worker_process import EXIT_CRASHED

CONFIG = hf.LlamaConfig(
    vocab_size=70,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=64,
    initializer_range=0.3,
)
PROMPTS = {"greedy": list(range(3, 24)), "seeded": [9, 60, 27, 1, 44]}
SAMPLING = {
    "greedy": SamplingParams(logprobs=2),
    "seeded": SamplingParams(temperature=0.9, seed=7, logprobs=2),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(3)
    path = tmp_path_factory.mktemp("model")
    hf.AutoModelForCausalLM.from_config(CONFIG).save_pretrained(path)
    return path


def options_of(folder, ranks, **changes):
    return WorkerOptions(
        model=str(folder),
        dtype="bfloat16",
        max_model_len=64,
        num_gpu_blocks_override=20,
        block_size=4,
        tensor_parallel_size=ranks,
        listen="unix:/nowhere",
        worker_id="w",
        ticket_key="00" * 32,
        **changes,
    )


@contextmanager
def engine_of(folder, ranks, stall_s=20.0, on_lost=print):
    """(the engine, the other ranks)."""
    options = options_of(folder, ranks)
    with following(options, folder, 0, on_lost, stall_s) as followers:
        wishes = EngineWishes.of(options, folder)
        policy = DecodePolicy(budget_tokens=16, seats=4)
        yield assemble(wishes, policy, memory_bytes=1 << 30, followers=followers), followers


def submit(core, name, attempt=1):
    tokens = list(PROMPTS[name])
    stop = StopRules(length_limit=len(tokens) + 4)
    core.submit(
        Sequence(id=(name, attempt, 0), tokens=tokens, sampling=SAMPLING[name], stop=stop, arrived=0.0)
    )


def answers(engine):
    """What is sampled for both prompts at once, by name."""
    for name in PROMPTS:
        submit(engine.core, name)
    sampled = {name: [] for name in PROMPTS}
    while not engine.core.idle():
        for output in engine.core.step(0.0).outputs:
            sampled[output.sequence.id[0]].append(output.sampled)
    return sampled


def seen(engine):
    """What one rank and several must have alike: the answers, and what workers compare before they hand over."""
    return answers(engine), engine.cache.layout.fields(), engine.capacity


@pytest.fixture(scope="module")
def wanted(folder):
    with engine_of(folder, 1) as (engine, followers):
        assert followers is None
        return seen(engine)


def test_two_ranks_say_what_one_says_until_one_of_them_stalls(folder, wanted):
    with engine_of(folder, 2, stall_s=3.0) as (engine, followers):
        assert seen(engine) == wanted
        assert followers.threads, "nobody knows whether the other rank is short of a processor"
        submit(engine.core, "greedy", 2)
        os.kill(followers.threads[0], signal.SIGSTOP)
        with pytest.raises(RankLost, match="does not answer"):
            engine.core.step(0.0)


def test_four_ranks_say_what_one_says_until_one_of_them_is_killed(folder, wanted):
    lost = queue.Queue()
    with engine_of(folder, 4, on_lost=lost.put) as (engine, _):
        assert seen(engine) == wanted
        ids = [line for line in children() if "--rank=2" in line]
        os.kill(int(ids[0].split()[0]), signal.SIGKILL)
        assert str(lost.get(timeout=10)) == "rank 2 was killed by signal 9"
        submit(engine.core, "greedy", 2)
        with pytest.raises(RankLost):
            engine.core.step(0.0)
    assert not [line for line in children() if "commands.follower" in line]


def children(parent="self"):
    """Process id and command line of each of ours, or of another process."""
    found = []
    for task in Path(f"/proc/{parent}/task").iterdir():
        for pid in (task / "children").read_text().split():
            words = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
            found.append(f"{pid} {words}")
    return found


def test_ranks_that_cannot_share_the_model_are_refused_before_one_is_started(folder):
    said = r"tensor_parallel_size 3 does not divide the model's heads 8, kv_heads 4, hidden_size 64$"
    with pytest.raises(ModelError, match=said), following(options_of(folder, 3), folder, 0, print):
        pytest.fail("a rank was started")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"async_scheduling": True}, r"^async_scheduling needs tensor_parallel_size 1, not 2$"),
        (
            {"max_num_seqs": 1 << 22},
            r"max_num_seqs 4194304, .* may take \d+ bytes to tell, more than 67108864$",
        ),
        ({"device": "cuda"}, "has no NCCL, by which GPUs find each other$"),
    ],
)
def test_what_several_ranks_cannot_do_is_refused_before_one_is_started(folder, monkeypatch, changes, said):
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    refused = pytest.raises((StartupError, CapacityError), match=said)
    with refused, following(options_of(folder, 2, **changes), folder, 0, print):
        pytest.fail("a rank was started")


def test_a_rank_that_cannot_be_started_is_refused_in_one_line(folder, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere")
    said = "^a rank of 2 cannot be started: No such file or directory$"
    with pytest.raises(StartupError, match=said), following(options_of(folder, 2), folder, 0, print):
        pytest.fail("a rank was started")


def flags_of(folder):
    paths = (f"--listen=unix:{folder / 'w'}", f"--kv-listen=ipc://{folder / 'kv'}")
    return ["--worker-id=w", *paths, f"--ticket-key={'00' * 32}"]


def test_a_rank_that_is_killed_while_it_loads_ends_the_worker_as_a_crash(folder, tmp_path):
    flags = [*flags_of(tmp_path), "--tensor-parallel-size=2", f"--model={folder}"]
    argv = [sys.executable, "-m", "commands.main", "decode-worker", *flags]
    worker = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    while not (ids := [line for line in children(worker.pid) if "commands.follower" in line]):
        with pytest.raises(subprocess.TimeoutExpired):  # it has not ended
            worker.wait(0.01)
    os.kill(int(ids[0].split()[0]), signal.SIGKILL)
    said, _ = worker.communicate(timeout=60)
    assert worker.returncode == EXIT_CRASHED and "rank 1 was killed by signal 9" in said


def test_a_start_that_waits_for_a_rank_in_vain_is_a_crash_and_no_refusal(tmp_path):
    program = (
        "import sys, commands.worker\n"
        "from commands.process import decode_worker_main\n"
        "from engine.errors import RankLost\n"
        "def run(options, role):\n"
        "    raise RankLost('a rank says nothing for 600 s')\n"
        "commands.worker.run = run\n"
        "sys.exit(decode_worker_main(sys.argv[1:]))\n"
    )
    argv = [sys.executable, "-c", program, *flags_of(tmp_path)]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == EXIT_CRASHED and "a rank says nothing for 600 s" in ended.stderr


@pytest.mark.parametrize(
    ("cores", "size", "dealt"),
    [
        ((), 2, [(), ()]),
        ((4, 5, 6, 7), 2, [(4, 5), (6, 7)]),
        ((4, 5, 6), 2, [(4,), (5,)]),
        ((4, 5), 4, [(4,), (5,), (4,), (5,)]),
    ],
)
def test_ranks_have_as_many_cores_each_and_share_where_there_are_too_few(cores, size, dealt):
    assert [cores_of(cores, Share(rank=rank, size=size)) for rank in range(size)] == dealt


@pytest.mark.parametrize(
    ("threads", "cores", "of_each"), [(None, (), 1), (None, (1, 2, 3, 4), 2), (4, (), 2), (1, (1, 2), 1)]
)
def test_threads_of_a_worker_are_dealt_among_its_ranks(threads, cores, of_each):
    assert threads_of(threads, cores, Share(rank=1, size=2)) == of_each
