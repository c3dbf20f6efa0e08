"""What goes on of attempts whose prompts are there: running sequences, or a search. By attempt.

Called by the worker on the step thread. Begins and ends them in the engine; tells nobody anything.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from decode_worker.adoption import begin_search, run_choices
from decode_worker.reservations import Reservation
from decode_worker.search import Search, reports_of
from engine.batch import Int64s
from engine.cache.block_pool import Credit
from engine.cache.block_table import BlockTable
from engine.core import EngineCore
from engine.results import Output, Outputs
from engine.sampling import Sampled
from engine.sequence import EndReason, Sequence, SequenceId
from kvtransfer.events import FirstTokens
from service.orders import AttemptKey, SequenceOrder
from service.reports import TokenEnd, TokenReport, TokenReports

_END = {EndReason.STOP: TokenEnd.STOP, EndReason.LENGTH: TokenEnd.LENGTH}


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """What goes on of an attempt, and the gateway that asked for it. sequences: by choice."""

    gateway: str
    order: SequenceOrder
    sequences: dict[int, Sequence]


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Those of some sequences whose answers are one gateway's. indices: int64 [k], ascending, of the sequences; the
    other columns are theirs. prompt_tokens: int64 [k]."""

    gateway: str
    indices: Int64s
    orders: list[SequenceOrder]
    request_ids: list[str]
    attempts: list[int]
    choices: list[int]
    prompt_tokens: Int64s


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Whose answers some sequences are. others: indices of those that are of prompts and searches."""

    sequences: list[Sequence]
    by_gateway: list[Share]
    others: list[int]


class Answers:
    def __init__(self, core: EngineCore, block_size: int) -> None:
        self._core = core
        self._block_size = block_size
        self._running: dict[AttemptKey, Running] = {}
        self._by_sequence: dict[SequenceId, Running] = {}
        self._searches: dict[AttemptKey, Search] = {}
        self._shares = Shares(sequences=[], by_gateway=[], others=[])

    def __contains__(self, key: AttemptKey) -> bool:
        return key in self._running or key in self._searches

    def __iter__(self) -> Iterator[AttemptKey]:
        yield from self._running
        yield from self._searches

    def shares(self, sequences: list[Sequence]) -> Shares:
        """Whose these are; found out once for as long as they are the same list."""
        if self._shares.sequences is not sequences:
            self._shares = self._shared(sequences)
        return self._shares

    def gateway_of(self, key: AttemptKey) -> str:
        return self._running[key].gateway if key in self._running else self._searches[key].gateway

    def seats(self) -> int:
        """Sequences that run or were swapped out, or may run at any moment."""
        searching = sum(search.order.branches() for search in self._searches.values())
        return searching + len(self._by_sequence)

    def begin(
        self, reservation: Reservation, first_tokens: FirstTokens, table: BlockTable, credit: Credit
    ) -> None:
        """first_tokens: of the choices that go on; none for a search. table, credit: with the whole prompt."""
        order = reservation.order
        if order.beam is not None:
            search = begin_search(self._core, reservation, order.beam, table, credit)
            self._searches[order.key] = search
        else:
            size = self._block_size
            sequences = run_choices(self._core, reservation, first_tokens, table, credit, block_size=size)
            running = Running(gateway=reservation.gateway, order=order, sequences=sequences)
            self._running[order.key] = running
            self._by_sequence.update((each.id, running) for each in sequences.values())

    def _shared(self, sequences: list[Sequence]) -> Shares:
        found: dict[str, list[int]] = {}
        others = []
        for at, sequence in enumerate(sequences):
            if (running := self._by_sequence.get(sequence.id)) is not None:
                found.setdefault(running.gateway, []).append(at)
            else:
                others.append(at)
        orders = {at: self._by_sequence[sequences[at].id].order for some in found.values() for at in some}
        shares = [_share(each, sequences, some, [orders[at] for at in some]) for each, some in found.items()]
        return Shares(sequences=sequences, by_gateway=shares, others=others)

    def hear(self, key: AttemptKey, output: Output) -> list[TokenReport]:
        """A search took a step; when it was the last one, its answers are complete all at once."""
        search = self._searches[key]
        answers = search.hear(output)
        if answers:
            del self._searches[key]
        return reports_of(search.order, answers) if answers else []

    def leave(self, key: AttemptKey, choice: int) -> None:
        """One choice goes on no more, where there is such. Its blocks are given back; those of others stay theirs."""
        sequences = self._running[key].sequences if key in self._running else {}
        if choice not in sequences:
            return
        sequence = self._core.detach(sequences.pop(choice).id)
        del self._by_sequence[sequence.id]
        if sequence.credit is not None:
            self._core.pool.waive(sequence.credit)
        if sequence.table is not None:
            self._core.pool.release(sequence.table)
        if not sequences:
            del self._running[key]

    def forget(self, sequence_id: SequenceId) -> None:
        """It is the only one of its attempt, and not in the engine any more."""
        running = self._by_sequence.pop(sequence_id)
        del self._running[running.order.key]
        assert len(running.sequences) == 1, "of several sequences none is given up"

    def end(self, key: AttemptKey) -> None:
        """All of it goes on no more."""
        if key in self._searches:
            self._searches.pop(key).end()
        for choice in tuple(self._running[key].sequences) if key in self._running else ():
            self.leave(key, choice)


def token_reports(share: Share, outputs: Outputs) -> TokenReports:
    """The next token of each of a share, which was made of the outputs' sequences."""
    more = {}
    if outputs.told_more or outputs.ended:
        special = {*outputs.told_more, *outputs.ended}
        for place, at in enumerate(share.indices.tolist()):
            if at in special:
                sequence, position, sampled, _ = outputs[at]
                order, reason = share.orders[place], sequence.end_reason
                more[place] = report_of(order, share.choices[place], position, sampled, reason)
    tokens = [outputs.tokens[at] for at in share.indices.tolist()]
    places = (outputs.positions[share.indices] - share.prompt_tokens).tolist()
    return TokenReports(share.request_ids, share.attempts, share.choices, places, tokens, more)


def report_of(
    order: SequenceOrder,
    choice: int,
    position: int,
    sampled: Sampled,
    reason: EndReason | None,
    cached_tokens: int = 0,
) -> TokenReport:
    """One choice's next token. reason: why it is its last one."""
    end = _END[reason] if reason else None
    place, token, logprob, top = position - order.prompt_tokens, sampled.token, sampled.logprob, sampled.top
    return TokenReport(order.key, place, token, logprob, top, end, cached_tokens, choice)


def _share(gateway: str, sequences: list[Sequence], indices: list[int], orders: list[SequenceOrder]) -> Share:
    """orders: of those at the indices."""
    return Share(
        gateway=gateway,
        indices=np.array(indices, np.int64),
        orders=orders,
        request_ids=[order.key.request_id for order in orders],
        attempts=[order.key.attempt for order in orders],
        choices=[sequences[at].id[2] for at in indices],
        prompt_tokens=np.array([order.prompt_tokens for order in orders], np.int64),
    )
