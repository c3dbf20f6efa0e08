"""Prompts that are computed here, for orders that came without a ticket: the sequence of each, up to its first token.

Called by the worker on the step thread. Books what became of every token of them; knows nothing of what goes on
afterwards.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from decode_worker.adoption import prompt_sequence
from decode_worker.reservations import Reservation
from engine.cache.block_pool import Credit
from engine.cache.block_table import BlockTable
from engine.core import EngineCore
from engine.scoring import Scored
from engine.sequence import Progress, Sequence
from service.orders import AttemptKey
from service.reports import PromptReport
from service.scores import Scores
from service.token_books import TokenBooks, Waste


@dataclass(slots=True, kw_only=True)
class Prompt:
    """computed: tokens that were computed for it here."""

    reservation: Reservation
    sequence: Sequence
    computed: int = 0


class Prompts:
    """By attempt."""

    def __init__(self, core: EngineCore, books: TokenBooks, block_size: int) -> None:
        self._core = core
        self._books = books
        self._block_size = block_size
        self._prompts: dict[AttemptKey, Prompt] = {}

    def __contains__(self, key: AttemptKey) -> bool:
        return key in self._prompts

    def begin(self, reservation: Reservation, table: BlockTable, credit: Credit) -> None:
        """table: of what is cached of it."""
        sequence = prompt_sequence(reservation, len(table) * self._block_size)
        sequence.table, sequence.credit = table, credit
        self._prompts[reservation.order.key] = Prompt(reservation=reservation, sequence=sequence)
        self._core.adopt(sequence)

    def advance(self, progress: Iterable[Progress]) -> int:
        """What a step computed. Returns the tokens that were of prompts, which are booked here when they end. What is
        computed of an answer before its first token was read is not among them."""
        total = 0
        for sequence, tokens in progress if self._prompts else ():
            prompt = self._prompts.get(_key(sequence))
            if prompt is not None and sequence.computed <= len(prompt.reservation.order.token_ids):
                prompt.computed += tokens
                total += tokens
        return total

    def among(self, sequences: Iterable[Sequence]) -> int:
        """How many of these are of prompts."""
        return sum(_key(sequence) in self._prompts for sequence in sequences) if self._prompts else 0

    def scores(self, found: Iterable[Scored]) -> Iterator[tuple[str, PromptReport]]:
        """What a step has said of their tokens, for the gateways that asked."""
        for sequence, first, scores in found:
            prompt = self._prompts[_key(sequence)]
            key = prompt.reservation.order.key
            report = PromptReport(key=key, first_position=first, scores=Scores.of(scores))
            yield prompt.reservation.gateway, report

    def finish(self, key: AttemptKey) -> Sequence:
        """It has its first token. The caller now answers for its table and its credit."""
        prompt = self._prompts.pop(key)
        self._books.deliver(prompt.computed)
        return self._core.detach(prompt.sequence.id)

    def end(self, key: AttemptKey, waste: Waste) -> None:
        """It was of no use."""
        prompt = self._prompts[key]
        self._core.detach(prompt.sequence.id)
        self.forget(key, waste)
        if prompt.sequence.credit is not None:
            self._core.pool.waive(prompt.sequence.credit)
        if prompt.sequence.table is not None:
            self._core.pool.release(prompt.sequence.table)

    def forget(self, key: AttemptKey, waste: Waste) -> None:
        """It is not in the engine any more."""
        self._books.waste(waste, self._prompts.pop(key).computed)

    def uncomputed(self) -> int:
        """Tokens."""
        return sum(each.sequence.uncomputed() for each in self._prompts.values())

    def computed(self) -> int:
        """Tokens, of those that have not ended."""
        return sum(each.computed for each in self._prompts.values())


def _key(sequence: Sequence) -> AttemptKey:
    return AttemptKey(*sequence.id[:2])
