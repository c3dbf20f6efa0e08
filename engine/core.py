"""The step: plan, run, commit.

Owns the sequences of one engine and moves their blocks. Called on the step thread alone. A policy proposes; this
file checks the proposal and is the one place where memory safety is asserted. Never waits, never talks to anybody,
never asks who its caller is.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, replace
from itertools import islice

import torch

from engine.batch import Batch, BatchItem, BlockCopy, ModelRunner
from engine.cache.block_pool import BlockPool, Ledger
from engine.cache.block_table import BlockTable, Owner, OwnerKind
from engine.cache.coming import Coming
from engine.cache.prefix_chain import PrefixChain
from engine.cache.swap_space import SwapSpace
from engine.policy import Plan, Policy, View, Work
from engine.sampling import Sampled, Sampler, SampleRow
from engine.scheduling.headroom import Headroom
from engine.scheduling.pace import Pace
from engine.sequence import Event, Sequence, SequenceId, State
from engine.views import SequenceViews


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A run of tokens was computed. first_position: of the run; the sequence's `computed` is past it."""

    sequence: Sequence
    first_position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """A token was sampled. position: its index among the sequence's tokens. twins: what was drawn for other choices at
    the same position, in the order of the sequence's."""

    sequence: Sequence
    position: int
    sampled: Sampled
    twins: tuple[Sampled, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one step did. Empty when the policy found nothing that can run now. preempted: given up; those that are
    DETACHED are here no more and own nothing, the others come back by themselves."""

    progress: tuple[Progress, ...] = ()
    outputs: tuple[Output, ...] = ()
    preempted: tuple[Sequence, ...] = ()

    def empty(self) -> bool:
        return not self.progress and not self.preempted


class EngineCore:
    """Sequences in, tokens out. block_size: positions per block. caching: whether prefixes that are computed are kept
    for others. swap: host memory for those that are given up; without room in it they are given back to the caller.
    headroom: to begin with."""

    def __init__(
        self,
        *,
        pool: BlockPool,
        block_size: int,
        runner: ModelRunner,
        sampler: Sampler,
        policy: Policy,
        caching: bool = True,
        swap: SwapSpace | None = None,
        headroom: Headroom = Headroom(),  # noqa: B008 (a value)
    ) -> None:
        self.pool = pool
        self._block_size = block_size
        self._runner = runner
        self._sampler = sampler
        self._policy = policy
        self._caching = caching
        self._swap = swap
        self._headroom = headroom
        self._pace = Pace()
        self._waiting: dict[SequenceId, Sequence] = {}
        self._running: dict[SequenceId, Sequence] = {}
        self._swapped: dict[SequenceId, Sequence] = {}
        self._finished: dict[SequenceId, Sequence] = {}
        self._coming = Coming()
        self._views = SequenceViews(pool, block_size, self._coming)

    def chain(self, scope: bytes) -> PrefixChain:
        """For a new sequence. scope: see `PrefixChain`."""
        return PrefixChain(scope if self._caching else b"", self._block_size)

    def submit(self, sequence: Sequence) -> None:
        """Take a sequence of which nothing is computed. It starts when the policy gives it work."""
        assert sequence.state is State.WAITING and sequence.table is None and sequence.computed == 0
        self._assert_new(sequence)
        self._waiting[sequence.id] = sequence

    def adopt(self, sequence: Sequence) -> None:
        """Take a sequence with its table, its credit and the KV of its computed tokens already in place. The table may
        share its blocks with others: the credit then covers one that is written, too."""
        assert sequence.table is not None and sequence.credit is not None
        assert sequence.uncomputed() >= 1, sequence.uncomputed()
        assert len(sequence.table) >= self._views.blocks_for(sequence.computed)
        self._assert_new(sequence)
        sequence.advance(Event.START)
        self._running[sequence.id] = sequence
        self._publish(sequence, 0)

    def detach(self, sequence_id: SequenceId) -> Sequence:
        """Take a sequence out, in whatever state. The caller now answers for its table and its credit."""
        for group in (self._waiting, self._running, self._swapped, self._finished):
            if sequence_id in group:
                if group is self._swapped:
                    self._swap_space().drop(sequence_id)
                sequence = group.pop(sequence_id)
                sequence.advance(Event.DETACH)
                self._coming.drop(sequence_id)
                return sequence
        raise AssertionError(f"sequence {sequence_id} is not here")

    def idle(self) -> bool:
        """Nothing waits, nothing runs and nothing is swapped out."""
        return not self._waiting and not self._running and not self._swapped

    def view(self) -> View:
        return View(
            waiting=tuple(self._views.entering(sequence) for sequence in self._waiting.values()),
            running=self._views.running(self._running.values()),
            available_blocks=self.pool.available,
            swapped=tuple(self._views.entering(sequence) for sequence in self._swapped.values()),
            headroom=self._headroom.share,
            pace=self._pace,
        )

    def ledger(self) -> Ledger:
        """The pool's, with what is in host memory: its owners, and what is wrong there."""
        ledger = self.pool.ledger()
        if self._swap is None:
            return ledger
        owners, violations = self._swap.owners(), self._swap.violations()
        return replace(ledger, owners=(*ledger.owners, *owners), violations=(*ledger.violations, *violations))

    def growing_blocks(self) -> int:
        """Blocks that those that run may still come to need and that nobody promised them."""
        return sum(self._views.growth(sequence) for sequence in self._running.values())

    @property
    def headroom(self) -> float:
        """See `Headroom`."""
        return self._headroom.share

    @property
    def pace(self) -> Pace:
        """See `Pace`."""
        return self._pace

    def measured(self, result: StepResult, seconds: float) -> None:
        """Whoever has a clock says how long a step took."""
        runs = [each.sequence.computed - each.first_position for each in result.progress]
        ones = sum(run == 1 for run in runs)
        self._pace = self._pace.after_step(generating=ones, prompt_tokens=sum(runs) - ones, seconds=seconds)

    def swapping(self) -> bool:
        """Whether somebody waits to come back."""
        return bool(self._swapped)

    def step(self, now: float) -> StepResult:
        """One round. Raises NonFiniteLogits for a model that computed no numbers."""
        view = self.view()
        plan = self._policy.plan(view, now)
        preempted = tuple(self._preempt(self._running[each]) for each in plan.preempt)
        runs = self._prepare(plan, view)
        if runs or preempted:
            self._headroom = self._headroom.after_step(len(preempted))
        if not runs:
            return StepResult(preempted=preempted)
        copies = tuple(copy for sequence, _ in runs for copy in self._unshared(sequence))
        items = tuple(self._item(sequence, count) for sequence, count in runs)
        logits = self._runner.run(Batch(items=items, copies=copies))
        return replace(self._commit(runs, logits), preempted=preempted)

    def _prepare(self, plan: Plan, view: View) -> list[tuple[Sequence, int]]:
        """Check the plan, start what it starts, and bind the blocks that its work will write. What shares a prefix with
        another start of the same plan is left to the next one: nobody knew yet that it is coming."""
        assert len({work.id for work in plan.work}) == len(plan.work), "a plan names a sequence once"
        coming = {one.id: one.coming for one in view.waiting}
        return [
            (self._ready(work), work.count)
            for work in plan.work
            if work.id not in coming or self._views.entering(self._waiting[work.id]).coming <= coming[work.id]
        ]

    def _ready(self, work: Work) -> Sequence:
        sequence = self._running.get(work.id) or self._enter(work.id)
        assert 1 <= work.count <= sequence.uncomputed(), f"{work} of {sequence.uncomputed()}"
        assert sequence.table is not None and sequence.credit is not None
        missing = self._views.blocks_for(sequence.computed + work.count) - len(sequence.table)
        if missing > 0:
            self._extend(sequence, missing)
        return sequence

    def _unshared(self, sequence: Sequence) -> list[BlockCopy]:
        """Copy on write: a block that the next run goes on in becomes the sequence's own. The last one to write it has
        it for itself and copies nothing."""
        table, credit = sequence.table, sequence.credit
        assert table is not None and credit is not None
        first, copies = sequence.computed // self._block_size, []
        if first < len(table) and self.pool.shared(table, first):
            source, target = self.pool.unshare(table, first, credit)
            copies.append(BlockCopy(source=source, target=target))
        elif first < len(table):
            self.pool.unpublish(table, first)
        assert all(self.pool.writable(table, at) for at in range(first, len(table)))
        return copies

    def _extend(self, sequence: Sequence, blocks: int) -> None:
        """Blocks that were promised, then blocks that nobody has."""
        assert sequence.table is not None and sequence.credit is not None
        promised = min(blocks, sequence.credit.blocks)
        self.pool.extend(sequence.table, promised, sequence.credit)
        if promised < blocks:
            credit = self.pool.grant(sequence.table.owner, blocks - promised)
            self.pool.extend(sequence.table, blocks - promised, credit)
            self.pool.waive(credit)

    def _preempt(self, sequence: Sequence) -> Sequence:
        """Give up its blocks. What is published of them stays cached as long as nobody needs the room."""
        assert sequence.table is not None and sequence.credit is not None
        assert sequence.uncomputed() == 1 and not sequence.steadfast(), f"{sequence.id} may not be given up"
        sequence.advance(Event.PREEMPT)
        sequence.preemptions += 1
        del self._running[sequence.id]
        self._coming.drop(sequence.id)
        if self._swap is not None and self._swap.free >= len(sequence.table):
            self._swap.store(sequence.id, sequence.table.ids())
            self._swapped[sequence.id] = sequence
        else:
            sequence.advance(Event.DETACH)
        self.pool.waive(sequence.credit)
        self.pool.release(sequence.table)
        sequence.table = sequence.credit = None
        return sequence

    def _enter(self, sequence_id: SequenceId) -> Sequence:
        if sequence_id in self._swapped:
            return self._resume(self._swapped[sequence_id])
        return self._start(self._waiting[sequence_id])

    def _resume(self, sequence: Sequence) -> Sequence:
        """Take what is still cached of it, and copy the rest back."""
        table = self._share(sequence)
        shared = len(table)
        self._extend(sequence, self._views.blocks_for(sequence.computed) - shared)
        self._swap_space().restore(sequence.id, shared, table.ids()[shared:])
        sequence.advance(Event.RESUME)
        self._running[sequence.id] = self._swapped.pop(sequence.id)
        self._publish(sequence, shared)
        return sequence

    def _share(self, sequence: Sequence) -> BlockTable:
        """A table of what is cached, and a promise of what else it must have to run."""
        owner = Owner(OwnerKind.SEQUENCE, sequence.id[0])
        sequence.table = table = self.pool.share(owner, self._views.usable_links(sequence))
        sequence.credit = self.pool.grant(owner, self._views.blocks_at_start(sequence) - len(table))
        return table

    def _start(self, sequence: Sequence) -> Sequence:
        """Begin with what is cached."""
        shared = len(self._share(sequence))
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
            block_table=sequence.table.ids()[: self._views.blocks_for(end)],
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
        return StepResult(progress=progress, outputs=self._sample(complete, logits))

    def _sample(self, complete: Ordered[Sequence], logits: torch.Tensor) -> tuple[Output, ...]:
        """A token for each of these, from its row of the logits, and one for each of its twins."""
        rows = [_sample_rows(sequence) for sequence in complete]
        if any(sequence.twins for sequence in complete):
            logits = logits.repeat_interleave(torch.tensor([len(each) for each in rows]), dim=0)
        drawn = iter(self._sampler.sample(logits, [row for each in rows for row in each]))
        return tuple(self._append(sequence, next(drawn), drawn) for sequence in complete)

    def _publish(self, sequence: Sequence, first: int) -> None:
        """Full blocks from `first` on can be found by others from now on."""
        assert sequence.table is not None
        links = sequence.chain.links(sequence.tokens, first, sequence.computed // self._block_size)
        if links:
            self.pool.publish(sequence.table, first, links)
            self._coming.settle(sequence.id, links)

    def _append(self, sequence: Sequence, sampled: Sampled, others: Iterator[Sampled]) -> Output:
        twins = tuple(islice(others, len(sequence.twins)))
        sequence.append(sampled.token)
        sequence.twins = ()
        if sequence.end_reason is not None:
            sequence.advance(Event.FINISH)
            self._finished[sequence.id] = self._running.pop(sequence.id)
        return Output(sequence=sequence, position=len(sequence.tokens) - 1, sampled=sampled, twins=twins)

    def _swap_space(self) -> SwapSpace:
        assert self._swap is not None
        return self._swap

    def _assert_new(self, sequence: Sequence) -> None:
        known = (self._waiting, self._running, self._swapped, self._finished)
        assert not any(sequence.id in group for group in known), f"sequence {sequence.id} is here already"


def _sample_rows(sequence: Sequence) -> list[SampleRow]:
    """How its token is drawn, and how its twins' are."""
    rules, position = sequence.stop, len(sequence.tokens)
    banned = rules.stop_token_ids if position < rules.min_length else frozenset()
    return [
        SampleRow(params=params, position=position, banned=banned)
        for params in (sequence.sampling, *sequence.twins)
    ]
