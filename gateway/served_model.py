"""Which model is served here, learnt from its files and from the first worker that introduces itself.

A worker that differs from it is refused by the names of what differs; the others serve on. So is one that introduces
itself with what cannot be.
"""

from collections.abc import Callable, Iterable
from itertools import takewhile

from crossdock.worker.v1 import worker_pb2 as pb
from gateway.request import ModelCard
from gateway.tokenizer import Tokenizer
from gateway.worker_pool import WorkerRecord, WorkerState, tokens_max
from kvtransfer.ticket import FINGERPRINT_BYTES
from service.worker_rim import PROTOCOL_VERSION

LENGTH_UNKNOWN = 2048
"""Tokens, while neither the files nor a worker have said."""
WORKER_ID_BYTES_MAX = 128
VALUE_CHARS_MAX = 80
ALIKE_CHARS_MAX = 20


class ServedModel:
    """name: what clients call it. workers: all that are attached, of both roles. ticket_key_check: of the key that
    tickets are sealed with here."""

    def __init__(
        self,
        name: str,
        tokenizer: Tokenizer,
        workers: Callable[[], Iterable[WorkerRecord]],
        ticket_key_check: bytes = b"",
    ) -> None:
        self._name = name
        self._tokenizer = tokenizer
        self._workers = workers
        self._ticket_key_check = ticket_key_check
        self._first: pb.Welcome | None = None

    def card(self) -> ModelCard:
        """As it is known now."""
        ready = [each.welcome for each in self._workers() if each.state is WorkerState.READY and each.welcome]
        own = self._tokenizer.max_model_len
        lengths = [welcome.max_model_len for welcome in ready] + ([own] if own is not None else [])
        rooms = [tokens_max(welcome) for welcome in ready]
        return ModelCard(
            name=self._name,
            vocab_size=self._tokenizer.vocab_size,
            max_model_len=min(lengths, default=LENGTH_UNKNOWN),
            eos_token_ids=self._tokenizer.eos_token_ids,
            digest=self._first.model_digest if self._first else "",
            capacity_tokens=min(rooms, default=None),
        )

    def refusal(self, welcome: pb.Welcome) -> str | None:
        """Why this worker cannot serve here, naming what differs; None for one that can."""
        impossible = [field for field, holds in _rules(welcome) if not holds]
        if impossible:
            return f"{', '.join(impossible)}: impossible"
        if welcome.ticket_key_check != self._ticket_key_check:
            return "ticket_key: another one than the gateway's"
        if welcome.vocab_size < self._tokenizer.vocab_size:
            sizes = f"{welcome.vocab_size} tokens, the tokenizer has {self._tokenizer.vocab_size}"
            return f"vocab_size: its model has {sizes}"
        first = self._first or welcome
        self._first = first
        if welcome.layout_fingerprint == first.layout_fingerprint:
            return None
        return "; ".join(_differences(welcome, first)) or "layout_fingerprint: differs"


def _rules(welcome: pb.Welcome) -> Iterable[tuple[str, bool]]:
    """Without these no ticket can be made for a worker, and no sequence fit."""
    return (
        ("protocol_version", welcome.protocol_version == PROTOCOL_VERSION),
        ("worker_id", 1 <= len(welcome.worker_id.encode()) <= WORKER_ID_BYTES_MAX),
        ("layout_fingerprint", len(welcome.layout_fingerprint) == FINGERPRINT_BYTES),
        ("block_size", welcome.block_size >= 1),
        ("total_blocks", welcome.total_blocks >= 1),
        ("max_model_len", welcome.max_model_len >= 1),
        ("max_num_seqs", welcome.max_num_seqs >= 1),
    )


def _differences(welcome: pb.Welcome, first: pb.Welcome) -> list[str]:
    theirs, served = _fields(welcome), _fields(first)
    names = [name for name in theirs | served if theirs.get(name) != served.get(name)]
    return [_difference(name, theirs.get(name, "nothing"), served.get(name, "nothing")) for name in names]


def _fields(welcome: pb.Welcome) -> dict[str, str]:
    return {field.name: field.value for field in welcome.layout_fields}


def _difference(name: str, value: str, served: str) -> str:
    """Long values from shortly before they differ."""
    alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(value, served, strict=False)))
    begin = max(0, alike - ALIKE_CHARS_MAX) if max(len(value), len(served)) > VALUE_CHARS_MAX else 0
    return f"{name}: {_short(value, begin)}, served here is {_short(served, begin)}"


def _short(value: str, begin: int) -> str:
    end = begin + VALUE_CHARS_MAX
    return f"{'...' if begin else ''}{value[begin:end]}{'...' if value[end:] else ''}"
