"""Workers without a process: what a gateway tells them is noted, what they answer is up to the test."""

import asyncio

from crossdock.worker.v1 import worker_pb2 as pb
from gateway.attach import DECODE, PREFILL, make_hello
from gateway.request import Request, Sampling, Stop
from gateway.worker_pool import WorkerPool
from service.orders import AttemptKey
from service.reports import (
    AdoptedReport,
    EndedReport,
    HandedOverReport,
    PromptReport,
    ReservedReport,
    TokenEnd,
    TokenReport,
    encode,
)
from service.scores import Scores
from service.worker_rim import PROTOCOL_VERSION

TICKET_KEY = bytes(range(32))
FINGERPRINT = bytes(32)
BLOCK_SIZE = 4
_RESPONSES = {PREFILL: pb.PrefillServiceAttachResponse, DECODE: pb.DecodeServiceAttachResponse}


def make_welcome(worker_id="w", **changes):
    fields = {
        "protocol_version": PROTOCOL_VERSION,
        "worker_id": worker_id,
        "epoch": 7,
        "layout_fingerprint": FINGERPRINT,
        "kv_endpoints": [f"mem://{worker_id}"],
        "model_digest": "digest",
        "max_model_len": 400,
        "vocab_size": 100,
        "block_size": BLOCK_SIZE,
        "total_blocks": 100,
        "max_num_seqs": 8,
    }
    return pb.Welcome(**{**fields, **changes})


def make_request(
    prompt=(5, 6, 7),
    max_tokens=3,
    *,
    stop=(),
    deadline=None,
    priority=0,
    n=1,
    best_of=1,
    beam=None,
    guide=None,
    prompt_logprobs=None,
    **sampling,
):
    values = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": 1, "logprobs": None}
    return Request(
        id="named by the client",
        model="m",
        prompt_token_ids=tuple(prompt),
        sampling=Sampling(**{**values, **sampling}),
        stop=Stop(
            max_tokens=max_tokens, min_tokens=0, token_ids=frozenset(stop), strings=(), include_string=False
        ),
        include_special_tokens=False,
        deadline=deadline,
        priority=priority,
        n=n,
        best_of=best_of,
        beam=beam,
        guide=guide,
        prompt_logprobs=prompt_logprobs,
    )


def make_pool(dialect, addresses, *, refusal=lambda welcome: None, on_change=lambda: None):
    return WorkerPool(addresses, dialect, make_hello("gateway", 1), refusal=refusal, on_change=on_change)


class ScriptedWorker:
    """Stands at the other end of a WorkerRecord's stream."""

    def __init__(self, record, dialect):
        self.record = record
        self.told = []
        self._response = _RESPONSES[dialect]
        self._unread = asyncio.Queue()
        record.attachment = self

    def send(self, message):
        """For the record: the gateway's end of the stream."""
        self.told.append(message)
        self._unread.put_nowait(message)

    def kinds(self):
        """What the gateway has sent so far, by the names of the messages."""
        return [message.WhichOneof("message") for message in self.told]

    async def hear(self, kind):
        """The next message that was not heard yet, which must be of this kind."""
        message = await self._unread.get()
        assert message.WhichOneof("message") == kind, message
        return getattr(message, kind)

    def join(self, worker_id=None, **welcome):
        """Introduce itself, empty."""
        hello = make_welcome(worker_id or self.record.address, **welcome)
        self.record.on_message(self._response(welcome=hello))
        self.load(free_blocks=hello.total_blocks)

    def load(self, **fields):
        self.record.on_message(self._response(load=pb.LoadReport(total_blocks=100, **fields)))

    def tell_cached(self, hashes, sequence=1):
        """All that it has cached."""
        events = pb.CacheEvents(sequence=sequence, snapshot=True, added=b"".join(hashes))
        self.record.on_message(self._response(cache=events))

    def answer(self, report):
        """To an audit."""
        self.record.on_message(self._response(audit=report))

    def leave(self):
        self.record.on_broken("UNAVAILABLE")

    def say(self, *reports):
        for message in encode(reports, 1, self._response):
            self.record.on_message(message)

    def is_free(self):
        """Whether the gateway counts on it for nothing."""
        view = self.record.view()
        return view.sequences == 0 and view.queued_tokens == 0


class Say:
    """Reports about one attempt."""

    def __init__(self, key: AttemptKey) -> None:
        self.reserved = ReservedReport(key=key, blocks_held=0)
        self.adopted = AdoptedReport(key=key)
        self.handed_over = HandedOverReport(key=key)
        self.key = key

    def token(self, position, token_id, end: TokenEnd | None = None, choice=0):
        return TokenReport(
            key=self.key,
            choice=choice,
            position=position,
            token_id=token_id,
            logprob=None,
            top=(),
            end=end,
        )

    def scores(self, first_position, *logprobs, width=1):
        """Of consecutive tokens of the prompt, each with so many alternatives."""
        tops = [tuple((90 + n, logprob - n) for n in range(width)) for logprob in logprobs]
        each = [(logprob, 1, top) for logprob, top in zip(logprobs, tops, strict=True)]
        return PromptReport(key=self.key, first_position=first_position, scores=Scores.of(each))

    def ended(self, cause, detail=""):
        return EndedReport(key=self.key, cause=cause, detail=detail)

    def of(self, attempt):
        return Say(self.key._replace(attempt=attempt))
