"""The step: plan, run, commit.

Owns the sequences of one engine and moves their blocks. Called on the step thread alone. A policy proposes; this
file checks the proposal and is the one place where memory safety is asserted. Never waits, never talks to anybody,
never asks who its caller is.
"""

from collections.abc import Sequence as Ordered
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import numpy as np
import torch

from engine.batch import Batch, BlockCopy, Int32s, ModelRunner, lay_out
from engine.block_rows import BlockRows
from engine.cache.block_pool import BlockPool, Ledger
from engine.cache.block_table import BlockTable, Owner, OwnerKind
from engine.cache.coming import Coming
from engine.cache.prefix_chain import PrefixChain
from engine.cache.swap_space import SwapSpace
from engine.columns import rows_of
from engine.draws import dead_ends, draw
from engine.policy import Plan, Policy, View
from engine.sampling import Sampled, Sampler
from engine.scheduling.headroom import Headroom
from engine.scheduling.pace import Pace
from engine.scoring import Scored, asked_of, limited, read_scores, with_scored_rows
from engine.sequence import EndReason, Event, Progress, Sequence, SequenceId, State
from engine.views import SequenceViews


class Output(NamedTuple):
    """A token was sampled. position: its index among the sequence's tokens. twins: what was drawn for other choices at
    the same position, in the order of the sequence's."""

    sequence: Sequence
    position: int
    sampled: Sampled
    twins: tuple[Sampled, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one step did. Empty when the policy found nothing that can run now. preempted: given up; those that are
    DETACHED are here no more and own nothing, the others come back by themselves. scored: see `Sequence`. dead_ends:
    finished, and not with a token: their constraints allowed none."""

    progress: tuple[Progress, ...] = ()
    outputs: tuple[Output, ...] = ()
    preempted: tuple[Sequence, ...] = ()
    scored: tuple[Scored, ...] = ()
    dead_ends: tuple[Sequence, ...] = ()

    def empty(self) -> bool:
        return not self.progress and not self.preempted


_Ends: TypeAlias = tuple[tuple[Output, ...], tuple[Sequence, ...]]
"""What was drawn, and the sequences for which nothing could be."""


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
        self._rows = BlockRows()
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
        self._run(sequence)
        self._publish(sequence, 0)

    def detach(self, sequence_id: SequenceId) -> Sequence:
        """Take a sequence out, in whatever state. The caller now answers for its table and its credit."""
        for group in (self._waiting, self._running, self._swapped, self._finished):
            if sequence_id in group:
                if group is self._swapped:
                    self._swap_space().drop(sequence_id)
                sequence = group.pop(sequence_id)
                if group is self._running:
                    self._rest(sequence)
                sequence.advance(Event.DETACH)
                self._coming.drop(sequence_id)
                return sequence
        raise AssertionError(f"sequence {sequence_id} is not here")

    def idle(self) -> bool:
        """Nothing waits, nothing runs and nothing is swapped out."""
        return not self._waiting and not self._running and not self._swapped

    def view(self) -> View:
        return View(
            waiting=tuple([self._views.entering(sequence) for sequence in self._waiting.values()]),
            running=self._views.running(self._running),
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
        runs = [tokens for _, tokens in result.progress]
        ones = runs.count(1)
        self._pace = self._pace.after_step(generating=ones, prompt_tokens=sum(runs) - ones, seconds=seconds)

    def swapping(self) -> bool:
        """Whether somebody waits to come back."""
        return bool(self._swapped)

    def step(self, now: float) -> StepResult:
        """One round. Raises NonFiniteLogits for a model that computed no numbers."""
        view = self.view()
        plan = self._policy.plan(view, now)
        preempted = tuple(self._preempt(self._running[each]) for each in plan.preempt)
        runs = limited(self._prepare(plan, view))
        if runs or preempted:
            self._headroom = self._headroom.after_step(len(preempted))
        if not runs:
            return StepResult(preempted=preempted)
        scored, logits = self._compute(runs)
        outputs, stuck = self._commit(runs, logits)
        return StepResult(
            progress=tuple(runs), outputs=outputs, preempted=preempted, scored=scored, dead_ends=stuck
        )

    def _compute(self, runs: Ordered[Progress]) -> tuple[tuple[Scored, ...], torch.Tensor]:
        """How likely the tokens are where somebody asked, and the logits to sample from."""
        batch = self._batch(runs)
        if not asked_of(runs):
            return (), self._runner.run(batch)
        return read_scores(self._sampler, runs, self._runner.run(with_scored_rows(batch, runs)))

    def _prepare(self, plan: Plan, view: View) -> list[Progress]:
        """Check the plan and start what it starts. What shares a prefix with another start of the same plan is left to
        the next one: nobody knew yet that it is coming."""
        coming = {one.id: one.coming for one in view.waiting}
        work = plan.work
        for name in dict.fromkeys([name for name, _ in work if name not in self._running]):
            if name in coming and self._views.entering(self._waiting[name]).coming > coming[name]:
                work = tuple([each for each in work if each.id != name])
            else:
                self._enter(name)
        return rows_of(Progress, [self._running[name] for name, _ in work], [count for _, count in work])

    def _batch(self, runs: Ordered[Progress]) -> Batch:
        """Bind the blocks that the work will write, and lay it out. The place where memory safety is asserted."""
        assert len({sequence.row for sequence, _ in runs}) == len(runs), "a plan names a sequence once"
        rows = np.array([sequence.row for sequence, _ in runs], np.int32)
        firsts = np.array([sequence.computed for sequence, _ in runs], np.int32)
        known = np.array([len(sequence.tokens) for sequence, _ in runs], np.int32)
        counts = np.array([count for _, count in runs], np.int32)
        ends, size = firsts + counts, np.int32(self._block_size)
        assert np.minimum(counts - 1, known - ends).min() >= 0, f"{counts} of {known - firsts}"
        needed = -(-ends // size)
        missing = needed - self._rows.lengths(rows)
        for at in np.flatnonzero(missing > 0).tolist():
            self._extend(runs[at].sequence, int(missing[at]))
        copies = self._unshared(runs, self._rows.at(rows, firsts // size))
        batch = lay_out(
            token_ids=_tokens(runs),
            firsts=firsts,
            counts=counts,
            wanted=ends == known,
            block_tables=self._rows.tables(rows, int(needed.max())),
            block_size=self._block_size,
            copies=copies,
        )
        assert not self.pool.unwritable(batch.slots // size), "a block that is not the writer's alone"
        return batch

    def _unshared(self, runs: Ordered[Progress], blocks: Int32s) -> tuple[BlockCopy, ...]:
        """Copy on write: a block that the next run goes on in becomes the sequence's own. blocks: the first that each
        run writes. The last one to write a shared block has it for itself and copies nothing."""
        copies = []
        for at in self.pool.unwritable(blocks):
            sequence = runs[at].sequence
            table, credit, row = sequence.table, sequence.credit, sequence.row
            assert table is not None and credit is not None and row is not None
            first = sequence.computed // self._block_size
            if self.pool.shared(table, first):
                source, target = self.pool.unshare(table, first, credit)
                self._rows.replace(row, first, target)
                self._views.change(sequence)
                copies.append(BlockCopy(source=source, target=target))
            else:
                self.pool.unpublish(table, first)
        return tuple(copies)

    def _extend(self, sequence: Sequence, blocks: int) -> None:
        """Blocks that were promised, then blocks that nobody has."""
        table = sequence.table
        assert table is not None and sequence.credit is not None
        before, promised = len(table), min(blocks, sequence.credit.blocks)
        if promised:
            self.pool.extend(table, promised, sequence.credit)
        if promised < blocks:
            credit = self.pool.grant(table.owner, blocks - promised)
            self.pool.extend(table, blocks - promised, credit)
            self.pool.waive(credit)
        if sequence.row is not None:
            self._rows.extend(sequence.row, table.ids(before))
            self._views.change(sequence)

    def _preempt(self, sequence: Sequence) -> Sequence:
        """Give up its blocks. What is published of them stays cached as long as nobody needs the room."""
        assert sequence.table is not None and sequence.credit is not None
        assert sequence.uncomputed() == 1 and not sequence.steadfast(), f"{sequence.id} may not be given up"
        sequence.advance(Event.PREEMPT)
        sequence.preemptions += 1
        self._rest(self._running.pop(sequence.id))
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
        self._run(self._swapped.pop(sequence.id))
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
        self._run(self._waiting.pop(sequence.id))
        return sequence

    def _run(self, sequence: Sequence) -> None:
        assert sequence.table is not None
        self._running[sequence.id] = sequence
        sequence.row = self._rows.open(sequence.table.ids())
        self._views.enter(sequence)

    def _rest(self, sequence: Sequence) -> None:
        """It was taken out of those that run."""
        assert sequence.row is not None
        self._rows.close(sequence.row)
        sequence.row = None
        self._views.leave(sequence)

    def _commit(self, runs: Ordered[Progress], logits: torch.Tensor) -> _Ends:
        complete, size = [], self._block_size
        for sequence, count in runs:
            sequence.computed = computed = sequence.computed + count
            reading = computed < len(sequence.tokens)
            if not reading:
                complete.append(sequence)
            if reading or count > 1 or computed % size == 0:
                self._views.change(sequence)
                self._publish(sequence, (computed - count) // size)
        return self._sample(complete, logits)

    def _sample(self, complete: list[Sequence], logits: torch.Tensor) -> _Ends:
        """A token for each of these, from its row of the logits, and one for each of its twins; and the dead ends,
        which have none."""
        assert logits.shape[0] == len(complete), f"{logits.shape[0]} rows for {len(complete)} sequences"
        stuck: tuple[Sequence, ...] = ()
        if indices := dead_ends(complete):
            stuck = tuple([complete[index] for index in indices])
            for sequence in stuck:
                self._finish(sequence, EndReason.DEAD_END)
            kept = [index for index in range(len(complete)) if index not in indices]
            complete, logits = [complete[index] for index in kept], logits[kept]
        own, twins = zip(*draw(self._sampler, complete, logits), strict=True) if complete else ((), ())
        outputs = rows_of(Output, complete, [one.computed for one in complete], own, twins)
        for sequence, sampled in zip(complete, own, strict=True):
            sequence.append(sampled.token)
            sequence.twins = ()
            if sequence.end_reason is not None:
                self._finish(sequence, sequence.end_reason)
        return tuple(outputs), stuck

    def _publish(self, sequence: Sequence, first: int) -> None:
        """Full blocks from `first` on can be found by others from now on."""
        assert sequence.table is not None
        links = sequence.chain.links(sequence.tokens, first, sequence.computed // self._block_size)
        if links:
            self.pool.publish(sequence.table, first, links)
            self._coming.settle(sequence.id, links)

    def _finish(self, sequence: Sequence, reason: EndReason) -> None:
        sequence.end_reason = reason
        sequence.advance(Event.FINISH)
        self._finished[sequence.id] = self._running.pop(sequence.id)
        self._rest(sequence)

    def _swap_space(self) -> SwapSpace:
        assert self._swap is not None
        return self._swap

    def _assert_new(self, sequence: Sequence) -> None:
        known = (self._waiting, self._running, self._swapped, self._finished)
        assert not any(sequence.id in group for group in known), f"sequence {sequence.id} is here already"


def _tokens(runs: Ordered[Progress]) -> list[int]:
    """What the runs compute, one after the other."""
    if all(count == 1 for _, count in runs):
        return [sequence.tokens[sequence.computed] for sequence, _ in runs]
    return [token for one, count in runs for token in one.tokens[one.computed : one.computed + count]]
