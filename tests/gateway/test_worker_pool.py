"""The gateway's record of its workers: states, loads, and who hears what."""

import asyncio

import pytest

from crossdock.worker.v1 import worker_pb2 as pb
from engine.cache.prefix_chain import PrefixChain
from gateway.attach import DECODE, PREFILL
from gateway.mailbox import Mailbox, Turnstile, WorkerLost
from gateway.request_prefix import RequestPrefix
from gateway.worker_pool import SILENT_LOOKS_MAX, WorkerState
from service.orders import AttemptKey
from service.reports import BadReport, EndCause, TokenReport, encode
from tests.fakes.scripted_workers import BLOCK_SIZE, Say, ScriptedWorker, make_pool

KEY = AttemptKey(request_id="r", attempt=1)


class Scene:
    """A pool of decode workers, and the changes it has told of."""

    def __init__(self, *addresses, refusal=lambda welcome: None):
        self.changes = 0
        self.pool = make_pool(DECODE, addresses or ("a", "b"), refusal=refusal, on_change=self._changed)
        self.workers = [ScriptedWorker(record, DECODE) for record in self.pool]

    def _changed(self):
        self.changes += 1


def states(pool):
    return [worker.state.name for worker in pool]


async def read(mailbox):
    return [(each.sender, each.letter) for each in await mailbox.take()]


def test_a_worker_is_ready_once_it_has_introduced_itself_and_gone_when_its_stream_breaks():
    scene = Scene()
    first, second = scene.workers
    assert states(scene.pool) == ["CONNECTING", "CONNECTING"]
    first.join("one", epoch=1)
    assert (scene.pool.serves(), scene.pool.all_ready()) == (True, False)
    second.join("two")
    assert scene.pool.all_ready()
    first.leave()
    assert states(scene.pool) == ["CONNECTING", "READY"]
    assert first.record.reason == "UNAVAILABLE"
    assert first.record.view().free_blocks == 0
    first.join("one", epoch=2)
    assert first.record.welcome.epoch == 2 and scene.pool.all_ready()
    assert scene.changes == 4


def test_a_worker_that_is_refused_says_why_and_is_connecting_again_once_it_left():
    scene = Scene("a", refusal=lambda welcome: "too blue" if welcome.epoch == 7 else None)
    (worker,) = scene.workers
    worker.join()
    assert (worker.record.state, worker.record.reason) == (WorkerState.REFUSED, "too blue")
    assert not worker.record.view().ready
    worker.leave()
    assert worker.record.state is WorkerState.CONNECTING
    worker.join(epoch=8)
    assert (worker.record.state, worker.record.reason) == (WorkerState.READY, "")


def test_a_worker_that_says_nothing_for_long_is_frozen_until_it_speaks():
    scene = Scene()
    first, second = scene.workers
    first.join()
    for _ in range(2 * SILENT_LOOKS_MAX):
        first.load(free_blocks=1)
        look(scene)
    assert scene.pool.serves() and not first.record.view().frozen
    for _ in range(SILENT_LOOKS_MAX):
        look(scene)
    assert first.record.view().frozen and first.record.state is WorkerState.READY
    assert not scene.pool.serves()
    second.join()
    assert scene.pool.serves()
    first.load(free_blocks=1)
    assert not first.record.view().frozen


def test_a_worker_that_says_that_its_engine_stands_still_is_frozen_at_once():
    scene = Scene("a")
    (worker,) = scene.workers
    worker.join()
    changes = scene.changes
    worker.load(frozen=True)
    assert not scene.pool.serves() and scene.changes == changes + 1
    worker.load(frozen=True)
    assert scene.changes == changes + 1
    worker.leave()
    assert not worker.record.view().frozen


def test_a_worker_that_never_came_is_not_called_frozen():
    scene = Scene("a")
    for _ in range(2 * SILENT_LOOKS_MAX):
        look(scene)
    assert not scene.workers[0].record.view().frozen and scene.changes == 0


def look(scene):
    for worker in scene.pool:
        worker.look()


def test_an_address_given_twice_is_one_worker():
    assert [worker.address for worker in Scene("a", "b", "a").pool] == ["a", "b"]


async def test_reports_reach_the_mailbox_of_their_attempt_alone():
    (first, second) = Scene().workers
    mine, other = Mailbox(Turnstile()), Mailbox(Turnstile())
    first.join()
    first.record.book(KEY, mine, tokens=0)
    second.record.book(KEY, other, tokens=0)
    say = Say(KEY)
    first.say(say.reserved, say.token(0, 4), say.of(2).adopted, say.adopted)
    assert await read(mine) == [("a", say.reserved), ("a", say.token(0, 4)), ("a", say.adopted)]
    first.record.release(KEY)
    first.say(say.adopted)
    second.record.on_broken("gone")
    assert await read(other) == [("b", WorkerLost())]


async def test_a_broken_stream_is_told_to_every_attempt_once_and_books_nothing():
    (worker, _) = Scene().workers
    worker.join()
    mailboxes = [Mailbox(Turnstile()) for _ in range(3)]
    for number, mailbox in enumerate(mailboxes):
        worker.record.book(AttemptKey(request_id="r", attempt=number), mailbox, tokens=5)
    worker.leave()
    assert worker.is_free()
    worker.leave()
    assert [await read(mailbox) for mailbox in mailboxes] == [[("a", WorkerLost())]] * 3


def test_the_view_counts_what_is_booked_until_the_worker_says_more():
    (worker, _) = Scene().workers
    worker.join(max_model_len=300, total_blocks=50, block_size=4, max_num_seqs=3)
    worker.record.book(KEY, Mailbox(Turnstile()), tokens=70)
    view = worker.record.view()
    assert (view.address, view.ready, view.seats, view.total_blocks) == ("a", True, 3, 50)
    assert (view.queued_tokens, view.sequences, view.tokens_max) == (70, 1, 200)
    worker.load(waiting_tokens=900, running_sequences=2, waiting_sequences=3, free_blocks=7)
    view = worker.record.view()
    assert (view.queued_tokens, view.sequences, view.free_blocks) == (900, 5, 7)
    worker.load()
    worker.record.computed(KEY)
    assert worker.record.view().queued_tokens == 0
    worker.record.release(KEY)
    worker.record.release(KEY)
    worker.record.computed(KEY)
    assert worker.is_free()


def test_the_longest_sequence_is_bounded_by_the_model_and_by_the_pool():
    (worker, other) = Scene().workers
    worker.join(max_model_len=10, total_blocks=50, block_size=4)
    other.join(max_model_len=1000, total_blocks=2, block_size=4)
    assert [each.record.view().tokens_max for each in (worker, other)] == [10, 8]


def test_a_pick_is_remembered():
    scene = Scene()
    taken = [scene.pool.take(address).picked for address in ("a", "b", "a")]
    assert taken == sorted(set(taken))
    assert [view.picked for view in scene.pool.views()] == [taken[2], taken[1]]


@pytest.mark.parametrize("way", ["asked", "said in its load", "said in a refusal"])
def test_a_draining_worker_gets_nothing_new_from_the_first_sign_on(way):
    scene = Scene()
    worker, _ = scene.workers
    worker.join()
    before = scene.changes
    if way == "asked":
        worker.record.drain()
        assert worker.kinds() == ["drain"]
    elif way == "said in its load":
        worker.load(draining=True)
    else:
        worker.say(Say(KEY).ended(EndCause.DRAINING))
    assert worker.record.state is WorkerState.DRAINING
    assert not worker.record.view().ready
    worker.load(draining=True)
    assert scene.changes == before + 1


async def test_an_audit_is_the_answer_to_its_own_question():
    (worker, _) = Scene().workers
    worker.join()
    first, second = (asyncio.create_task(worker.record.audit(60)) for _ in range(2))
    ids = [(await worker.hear("audit")).query_id for _ in range(2)]
    for query_id in (99, ids[1], ids[1], ids[0]):
        report = pb.AuditReport(query_id=query_id, free_blocks=query_id)
        worker.record.on_message(pb.DecodeServiceAttachResponse(audit=report))
    assert [(await each).free_blocks for each in (first, second)] == ids


async def test_an_audit_of_a_worker_that_is_gone_or_silent_has_no_answer():
    (worker, _) = Scene().workers
    assert await worker.record.audit(60) is None
    worker.join()
    assert await worker.record.audit(0) is None
    asked = asyncio.create_task(worker.record.audit(60))
    await worker.hear("audit")
    await worker.hear("audit")
    worker.leave()
    assert await asked is None


@pytest.mark.parametrize(
    "output",
    [
        {"end_reason": 77},
        {"top_token_ids": [1, 2], "top_logprobs": [-0.5]},
        {"top_logprobs": [-0.5]},
    ],
)
async def test_nonsense_is_said_to_be_nonsense_and_tells_nobody_anything(output):
    (worker, _) = Scene().workers
    worker.join()
    mailbox = Mailbox(Turnstile())
    worker.record.book(KEY, mailbox, tokens=0)
    tokens = [TokenReport(KEY, position, 7, None, (), None) for position in range(2)]
    (message,) = encode(tokens, 1, pb.DecodeServiceAttachResponse)
    message.outputs.details.add(index=1, **output)
    with pytest.raises(BadReport):
        worker.record.on_message(message)
    worker.leave()
    assert await read(mailbox) == [("a", WorkerLost())]


def test_what_a_worker_has_cached_of_a_request_is_known_as_long_as_its_stream_lasts():
    (worker, other) = Scene().workers
    tokens = tuple(range(11))
    links = PrefixChain(b"scope", BLOCK_SIZE).links(tokens, 0, 2)
    prefix = RequestPrefix(b"scope")
    prefix.grow(tokens)
    assert worker.record.view(prefix).cached_tokens == 0
    worker.join()
    other.join()
    worker.tell_cached([link.hash for link in links])
    assert [each.record.view(prefix).cached_tokens for each in (worker, other)] == [2 * BLOCK_SIZE, 0]
    assert worker.record.view().cached_tokens == 0
    worker.leave()
    assert worker.record.view(prefix).cached_tokens == 0
    worker.join(epoch=8)
    assert worker.record.view(prefix).cached_tokens == 0
    worker.tell_cached([links[0].hash])
    assert worker.record.view(prefix).cached_tokens == BLOCK_SIZE


def test_a_worker_is_believed_no_more_prefixes_than_it_has_blocks():
    (worker, _) = Scene().workers
    worker.join(total_blocks=3)
    worker.tell_cached([bytes([number]) * 16 for number in range(9)])
    assert len(worker.record.prefixes) == 3


def test_hashes_that_are_none_are_nonsense():
    (worker, _) = Scene().workers
    worker.join()
    with pytest.raises(BadReport):
        worker.tell_cached([b"short"])


@pytest.mark.parametrize(
    "message",
    [
        pb.DecodeServiceAttachResponse(),
        pb.DecodeServiceAttachResponse(ended=pb.Ended(request_id="r", attempt=1, cause=99)),
        pb.DecodeServiceAttachResponse(ended=pb.Ended(request_id="r" * 10_000)),
        pb.DecodeServiceAttachResponse(adopted=pb.Adopted()),
        pb.DecodeServiceAttachResponse(audit=pb.AuditReport(query_id=2**64 - 1)),
        pb.DecodeServiceAttachResponse(load=pb.LoadReport(free_blocks=2**32 - 1)),
        pb.DecodeServiceAttachResponse(welcome=pb.Welcome()),
        pb.DecodeServiceAttachResponse(cache=pb.CacheEvents()),
        pb.DecodeServiceAttachResponse(cache=pb.CacheEvents(snapshot=True, added=bytes(160))),
        pb.DecodeServiceAttachResponse(cache=pb.CacheEvents(sequence=2**64 - 1, removed=bytes(16))),
    ],
)
def test_odd_messages_before_and_after_the_introduction_do_no_harm(message):
    (worker, _) = Scene().workers
    worker.record.on_message(message)
    worker.join()
    worker.record.on_message(message)
    assert worker.record.view().address == "a"


def test_both_roles_are_told_in_their_own_words():
    (record,) = make_pool(PREFILL, ("p",))
    worker = ScriptedWorker(record, PREFILL)
    record.drain()
    assert isinstance(worker.told[0], pb.PrefillServiceAttachRequest)
