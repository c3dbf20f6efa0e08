"""What the rank that plans makes of ranks that refuse, die, keep silent or talk nonsense."""

import mmap
import queue
import subprocess
from datetime import timedelta
from types import SimpleNamespace

import msgpack
import pytest
import torch
import zmq

from engine.cache.copying import nothing
from engine.cache.layout import KVLayout
from engine.cache.staged_cache import StagedKVCache
from engine.collective import Share
from engine.errors import CapacityError, RankLost
from engine.ranks import Follower, LedRunner, LedStagedCache
from tensor_parallel.channel import Channel
from tensor_parallel.followers import EXIT_REFUSED, ProcessFollowers
from tensor_parallel.group import TorchCollective
from tensor_parallel.wire import MESSAGE_BYTES_MAX, Loaded, Ready, Refused, Stop, ToHost, encode
from tests.fakes.lagging_lane import LaggingLane

STALL_S = 0.4
LAYOUT = KVLayout(model_digest="", layers=2, kv_heads=4, head_dim=6, block_size=2, dtype=torch.float32)


class Other:
    """A process that only sleeps, and what is said for it."""

    def __init__(self, folder, command=("sleep", "60"), **more):
        self.command = command
        self.socket = None
        self.lost = queue.Queue()
        self.followers = ProcessFollowers(
            2, folder, self._spawn, self.lost.put, **{"stall_s": STALL_S} | more
        )

    def _spawn(self, share, meeting):
        assert share == Share(rank=1, size=2)
        self.process = subprocess.Popen(self.command)
        self.socket = zmq.Context.instance().socket(zmq.PAIR)
        self.socket.connect(meeting.endpoint)
        return self.process

    def say(self, message):
        self.socket.send(encode(message))


@pytest.fixture
def other(tmp_path):
    it = Other(tmp_path)
    yield it
    it.followers.kill()
    it.socket.close(linger=0)
    assert it.process.returncode is not None


@pytest.mark.parametrize(("own", "others", "least"), [(None, None, None), (7, 5, 5), (5, 7, 5)])
def test_the_least_memory_of_all_ranks_counts(other, own, others, least):
    other.say(Loaded(free_bytes=others))
    assert other.followers.loaded(own) == least


def test_what_a_rank_is_refused_for_is_said_in_its_words(other):
    other.say(Refused(text="3 GiB are more than there is"))
    with pytest.raises(CapacityError, match=r"^3 GiB are more than there is$"):
        other.followers.loaded(None)


def test_a_rank_that_has_said_what_it_is_refused_for_and_is_gone_is_refused_and_not_lost(tmp_path):
    other = Other(tmp_path, ("sh", "-c", f"exit {EXIT_REFUSED}"))
    other.say(Refused(text="no room"))
    other.process.wait()
    with pytest.raises(CapacityError, match=r"^no room$"):
        other.followers.tell(ToHost(blocks=(1,)))
    other.followers.kill()
    other.socket.close()
    assert other.lost.empty()


def test_a_rank_that_dies_while_it_loads_ends_the_wait_and_is_told_of_at_once(other):
    other.process.kill()
    assert str(other.lost.get(timeout=10)) == "rank 1 was killed by signal 9"
    with pytest.raises(RankLost, match="rank 1 was killed by signal 9"):
        other.followers.loaded(None)


def test_a_rank_that_is_gone_is_told_nothing_more(other):
    other.process.kill()
    other.process.wait()
    with pytest.raises(RankLost, match="rank 1 was killed by signal 9"):
        other.followers.tell(ToHost(blocks=(1,)))


def test_a_rank_that_does_not_say_it_is_done_is_lost(other):
    with pytest.raises(RankLost, match=r"says nothing for 0\.4 s"):
        other.followers.await_done()


def test_on_gpus_ranks_have_six_times_as_long(tmp_path):
    other = Other(tmp_path, device="cuda", stall_s=0.1)
    with pytest.raises(RankLost, match=r"says nothing for 0\.6 s"):
        other.followers.await_done()
    other.followers.kill()
    other.socket.close()


def test_a_rank_that_talks_nonsense_is_lost(other):
    other.socket.send(msgpack.packb(["Done", 1]))
    with pytest.raises(RankLost, match="says what none should: Done of 1 fields"):
        other.followers.await_done()


def test_a_rank_that_joins_no_group_is_lost(other):
    with pytest.raises(RankLost, match="do not find each other"):
        other.followers.open(3, LAYOUT)


def test_a_rank_that_is_gone_before_the_others_found_it_is_named(other):
    other.process.kill()
    other.process.wait()
    with pytest.raises(RankLost, match="rank 1 was killed by signal 9"):
        other.followers.open(3, LAYOUT)


def test_a_rank_that_does_not_stop_is_killed_and_nobody_is_told_of_a_loss(tmp_path, monkeypatch):
    monkeypatch.setattr("tensor_parallel.followers.END_S", 0.1)
    other = Other(tmp_path)
    other.say(Loaded(free_bytes=None))
    other.followers.loaded(None)  # whoever has not said anything may not be there yet, and is told nothing
    other.followers.stop()
    assert other.process.returncode == -9 and other.lost.empty()
    assert other.socket.poll(10_000) and other.socket.recv() == encode(Stop())
    other.socket.close()


def test_a_rank_that_cannot_be_told_to_stop_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr("tensor_parallel.followers.END_S", 0.1)
    other = Other(tmp_path)
    other.socket.close(linger=0)
    other.followers.stop()
    assert other.process.returncode == -9


def test_a_rank_that_cannot_be_started_takes_those_before_it_along(tmp_path):
    started, lost = [], queue.Queue()

    def spawn(share, meeting):
        if share.rank == 3:
            raise OSError("no memory")
        started.append(subprocess.Popen(["sleep", "60"]))
        return started[-1]

    with pytest.raises(OSError, match="no memory"):
        ProcessFollowers(4, tmp_path, spawn, lost.put)
    assert [process.returncode for process in started] == [-9, -9] and lost.empty()


def test_a_channel_that_nobody_reads_is_given_up(tmp_path):
    context = zmq.Context()
    channel = Channel.listen(context, f"ipc://{tmp_path / 'one'}", 0.1)
    with pytest.raises(RankLost, match=r"takes no message for 0\.1 s"):
        channel.say(Ready(threads=()))
    channel.close()
    context.term()


def test_a_message_that_the_other_side_would_drop_is_a_mistake_of_ours(tmp_path):
    context = zmq.Context()
    channel = Channel.listen(context, f"ipc://{tmp_path / 'one'}", 0.1)
    with pytest.raises(AssertionError, match="a ToHost of 6710"):
        channel.say(ToHost(blocks=range(MESSAGE_BYTES_MAX // 8)))
    channel.close()
    context.term()


def test_on_gpus_only_the_group_has_a_limit_and_no_thread_is_held_for_it(tmp_path, monkeypatch):
    limits = []

    class Group:
        def __init__(self, store, share, patience, device):
            limits.append(patience)

        def _allgather_base(self, parts, own):
            parts[:], limits[1:] = torch.cat([own, own]), []
            return SimpleNamespace(wait=lambda *limit: limits.append(limit))

    monkeypatch.setattr("tensor_parallel.group._make_nccl", Group)
    collective = TorchCollective(Share(rank=0, size=2), 20.0)
    collective.join(str(tmp_path / "group"), torch.device("cuda", 0))
    assert collective.all_gather(torch.tensor([[3.0]])).tolist() == [[3.0, 3.0]]
    assert limits == [timedelta(minutes=2), ()]


class Told:
    """Followers that do what they were told as late as they may: when somebody waits for them. do: returns whether they
    say that it is done."""

    collective = SimpleNamespace(share=Share(rank=0, size=2))

    def __init__(self, do):
        self._do, self.waiting = do, []

    def tell(self, work):
        self.waiting.append(work)

    def await_done(self):
        (work,) = self.waiting
        assert self._do(work)
        self.waiting.clear()


def test_on_devices_every_rank_copies_its_heads_and_all_wait():
    memory = mmap.mmap(-1, 4 * LAYOUT.block_bytes())
    second = StagedKVCache(LAYOUT, 4, LaggingLane(), memory, Share(rank=1, size=2))
    others = Told(Follower(None, second).do)
    first = LedStagedCache(LAYOUT, 4, LaggingLane(), memory, others)
    content = torch.randn(LAYOUT.block_shape())
    first.tensor[3], second.tensor[3] = content[..., :2, :], content[..., 2:, :]
    first.to_host([3], nothing, nothing)
    assert bytes(first.block_view(3)) == content.numpy().tobytes()
    first.block_view(0)[:] = first.block_view(3)
    first.from_host([0], nothing)
    for cache in (first, second):
        assert torch.equal(cache.tensor[0], cache.tensor[3])
    assert not others.waiting


def test_others_are_told_of_a_step_before_it_is_run():
    order = []
    own = SimpleNamespace(run=lambda batch: order.append(f"run {batch}"))
    followers = SimpleNamespace(tell=lambda work: order.append(f"told {work}"))
    LedRunner(own, followers).run("a step")
    assert order == ["told a step", "run a step"]
