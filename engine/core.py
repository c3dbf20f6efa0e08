"""The step: plan, run, commit.

Owns the sequences of one engine and moves their blocks. Called on the step thread alone. A policy proposes; this
file checks the proposal and is the one place where memory safety is asserted. Never waits, never talks to anybody,
never asks who its caller is.
"""

from collections.abc import Sequence as Ordered
from dataclasses import dataclass

import torch

from engine.batch import Batch, BatchItem, ModelRunner
from engine.cache.block_pool import BlockPool, Match
from engine.cache.block_table import Owner, OwnerKind
from engine.cache.coming import Coming
from engine.cache.prefix_chain import PrefixChain, PrefixLink
from engine.policy import Plan, Policy, SequenceView, View, Work
from engine.sampling import Sampled, Sampler, SampleRow
from engine.sequence import Event, Sequence, SequenceId, State

NOTHING = Match(blocks=0, owned=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A run of tokens was computed. first_position: of the run; the sequence's `computed` is past it."""

    sequence: Sequence
    first_position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """A token was sampled. position: its index among the sequence's tokens."""

    sequence: Sequence
    position: int
    sampled: Sampled


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one step did. Empty when the policy found nothing that can run now."""

    progress: tuple[Progress, ...] = ()
    outputs: tuple[Output, ...] = ()

    def empty(self) -> bool:
        return not self.progress


class EngineCore:
    """Sequences in, tokens out. block_size: positions per block. caching: whether prefixes that are computed are kept
    for others."""

    def __init__(
        self,
        *,
        pool: BlockPool,
        block_size: int,
        runner: ModelRunner,
        sampler: Sampler,
        policy: Policy,
        caching: bool = True,
    ) -> None:
        self.pool = pool
        self._block_size = block_size
        self._runner = runner
        self._sampler = sampler
        self._policy = policy
        self._caching = caching
        self._waiting: dict[SequenceId, Sequence] = {}
        self._running: dict[SequenceId, Sequence] = {}
        self._finished: dict[SequenceId, Sequence] = {}
        self._coming = Coming()

    def chain(self, scope: bytes) -> PrefixChain:
        """For a new sequence. scope: see `PrefixChain`."""
        return PrefixChain(scope if self._caching else b"", self._block_size)

    def submit(self, sequence: Sequence) -> None:
        """Take a sequence of which nothing is computed. It starts when the policy gives it work."""
        assert sequence.state is State.WAITING and sequence.table is None and sequence.computed == 0
        self._assert_new(sequence)
        self._waiting[sequence.id] = sequence

    def adopt(self, sequence: Sequence) -> None:
        """Take a sequence with its table, its credit and the KV of all tokens but the last already in place."""
        assert sequence.table is not None and sequence.credit is not None
        assert sequence.uncomputed() == 1, sequence.uncomputed()
        assert len(sequence.table) >= self._blocks_for(sequence.computed)
        self._assert_new(sequence)
        sequence.advance(Event.START)
        self._running[sequence.id] = sequence
        self._publish(sequence, 0)

    def detach(self, sequence_id: SequenceId) -> Sequence:
        """Take a sequence out, in whatever state. The caller now answers for its table and its credit."""
        for group in (self._waiting, self._running, self._finished):
            if sequence_id in group:
                sequence = group.pop(sequence_id)
                sequence.advance(Event.DETACH)
                self._coming.drop(sequence_id)
                return sequence
        raise AssertionError(f"sequence {sequence_id} is not here")

    def idle(self) -> bool:
        """Nothing waits and nothing runs."""
        return not self._waiting and not self._running

    def view(self) -> View:
        return View(
            waiting=tuple(self._view_of(sequence) for sequence in self._waiting.values()),
            running=tuple(self._view_of(sequence) for sequence in self._running.values()),
            available_blocks=self.pool.available,
        )

    def step(self, now: float) -> StepResult:
        """One round. Raises NonFiniteLogits for a model that computed no numbers."""
        view = self.view()
        runs = self._prepare(self._policy.plan(view, now), view)
        if not runs:
            return StepResult()
        logits = self._runner.run(Batch(items=tuple(self._item(sequence, count) for sequence, count in runs)))
        return self._commit(runs, logits)

    def _prepare(self, plan: Plan, view: View) -> list[tuple[Sequence, int]]:
        """Check the plan, start what it starts, and bind the blocks that its work will write. What shares a prefix with
        another start of the same plan is left to the next one: nobody knew yet that it is coming."""
        assert len({work.id for work in plan.work}) == len(plan.work), "a plan names a sequence once"
        coming = {one.id: one.coming for one in view.waiting}
        return [
            (self._ready(work), work.count)
            for work in plan.work
            if work.id not in coming or self._view_of(self._waiting[work.id]).coming <= coming[work.id]
        ]

    def _ready(self, work: Work) -> Sequence:
        sequence = self._running.get(work.id) or self._start(self._waiting[work.id])
        assert 1 <= work.count <= sequence.uncomputed(), f"{work} of {sequence.uncomputed()}"
        assert sequence.table is not None and sequence.credit is not None
        missing = self._blocks_for(sequence.computed + work.count) - len(sequence.table)
        if missing > 0:
            self.pool.extend(sequence.table, missing, sequence.credit)
        first = sequence.computed // self._block_size
        assert all(self.pool.writable(sequence.table, at) for at in range(first, len(sequence.table)))
        return sequence

    def _start(self, sequence: Sequence) -> Sequence:
        """Take what is cached, and promise all other blocks that the sequence can ever need: what has started can run
        to its end."""
        owner = Owner(OwnerKind.SEQUENCE, sequence.id[0])
        sequence.table = self.pool.share(owner, self._usable_links(sequence))
        shared = len(sequence.table)
        sequence.credit = self.pool.grant(owner, self._blocks_for(sequence.positions_max()) - shared)
        sequence.computed = sequence.cached = shared * self._block_size
        full = len(sequence.tokens) // self._block_size
        self._coming.announce(sequence.id, sequence.chain.links(sequence.tokens, shared, full))
        sequence.advance(Event.START)
        self._running[sequence.id] = self._waiting.pop(sequence.id)
        return sequence

    def _item(self, sequence: Sequence, count: int) -> BatchItem:
        assert sequence.table is not None
        end = sequence.computed + count
        return BatchItem(
            tokens=tuple(sequence.tokens[sequence.computed : end]),
            first_position=sequence.computed,
            block_table=sequence.table.ids()[: self._blocks_for(end)],
            wants_logits=end == len(sequence.tokens),
        )

    def _commit(self, runs: Ordered[tuple[Sequence, int]], logits: torch.Tensor) -> StepResult:
        progress = tuple(
            Progress(sequence=sequence, first_position=sequence.computed) for sequence, _ in runs
        )
        for sequence, count in runs:
            sequence.computed += count
            self._publish(sequence, (sequence.computed - count) // self._block_size)
        complete = [sequence for sequence, _ in runs if sequence.uncomputed() == 0]
        assert logits.shape[0] == len(complete), f"{logits.shape[0]} rows for {len(complete)} sequences"
        sampled = self._sampler.sample(logits, [_sample_row(sequence) for sequence in complete])
        outputs = tuple(
            self._append(sequence, token) for sequence, token in zip(complete, sampled, strict=True)
        )
        return StepResult(progress=progress, outputs=outputs)

    def _publish(self, sequence: Sequence, first: int) -> None:
        """Full blocks from `first` on can be found by others from now on."""
        assert sequence.table is not None
        links = sequence.chain.links(sequence.tokens, first, sequence.computed // self._block_size)
        if links:
            self.pool.publish(sequence.table, first, links)
            self._coming.settle(sequence.id, links)

    def _usable_links(self, sequence: Sequence) -> list[PrefixLink]:
        """What may come from the cache: not the last token, which is sampled from."""
        return sequence.chain.links(sequence.tokens, 0, (len(sequence.tokens) - 1) // self._block_size)

    def _append(self, sequence: Sequence, sampled: Sampled) -> Output:
        sequence.append(sampled.token)
        if sequence.end_reason is not None:
            sequence.advance(Event.FINISH)
            self._finished[sequence.id] = self._running.pop(sequence.id)
        return Output(sequence=sequence, position=len(sequence.tokens) - 1, sampled=sampled)

    def _view_of(self, sequence: Sequence) -> SequenceView:
        links = self._usable_links(sequence) if sequence.state is State.WAITING else []
        match = self.pool.match(links) if links else NOTHING
        needed = self._blocks_for(sequence.positions_max()) if sequence.state is State.WAITING else 0
        return SequenceView(
            id=sequence.id,
            uncomputed=sequence.uncomputed() - match.blocks * self._block_size,
            length=len(sequence.tokens),
            blocks_to_start=needed - match.owned,
            arrived=sequence.arrived,
            coming=self._coming.count(links[match.blocks :]) * self._block_size,
        )

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._block_size)

    def _assert_new(self, sequence: Sequence) -> None:
        known = (self._waiting, self._running, self._finished)
        assert not any(sequence.id in group for group in known), f"sequence {sequence.id} is here already"


def _sample_row(sequence: Sequence) -> SampleRow:
    rules = sequence.stop
    early = len(sequence.tokens) < rules.min_length
    return SampleRow(
        params=sequence.sampling,
        position=len(sequence.tokens),
        banned=rules.stop_token_ids if early else frozenset(),
    )
