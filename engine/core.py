"""The step: plan, run, commit.

Owns the sequences of one engine and moves their blocks. Called on the step thread alone. A policy proposes; this
file and `engine.binding`, which asserts memory safety, check the proposal. Never waits for anything but the device,
never talks to anybody, never asks who its caller is.
"""

from collections.abc import Sequence as Ordered
from dataclasses import replace
from typing import TypeAlias

import torch

from engine.batch import Int64s, ModelRunner
from engine.binding import Binder
from engine.block_rows import BlockRows
from engine.cache.block_pool import BlockPool, Ledger
from engine.cache.block_table import BlockTable, Owner, OwnerKind
from engine.cache.coming import Coming
from engine.cache.prefix_chain import PrefixChain
from engine.cache.swap_space import SwapSpace
from engine.draws import NO_TWINS, Twins, begin, dead_ends, draw, foreseen, take
from engine.flight import Flight, timed
from engine.policy import Plan, Policy, View
from engine.results import NO_OUTPUTS, Outputs, StepResult
from engine.runs import Draws, Runs
from engine.sampling import Sampled, Sampler
from engine.scheduling.headroom import Headroom
from engine.scheduling.pace import Load, Pace
from engine.scoring import Scored, limited, read_scores, with_scored_rows
from engine.sequence import EndReason, Event, Progress, Sequence, SequenceId, State
from engine.views import SequenceViews

_Ends: TypeAlias = tuple[Outputs, tuple[Sequence, ...]]
"""What was drawn, and the sequences for which nothing could be."""
_NOTHING: _Ends = (NO_OUTPUTS, ())


class EngineCore:
    """Sequences in, tokens out. block_size: positions per block. caching: whether prefixes that are computed are kept
    for others. swap: host memory for those that are given up; without room in it they are given back to the caller.
    headroom: to begin with. ahead: whether a step is begun before anybody has read what the one before it drew, where
    that is possible; a step then tells what the one before has drawn."""

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
        ahead: bool = False,
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
        self._ending: dict[SequenceId, Sequence] = {}
        self._finished: dict[SequenceId, Sequence] = {}
        self._ahead = ahead
        self._flight: Flight | None = None
        self._rows = BlockRows()
        self._coming = Coming()
        self._views = SequenceViews(pool, block_size, self._coming)
        self._last: Runs | None = None
        self._binder = Binder(pool, block_size, self._rows, self._views)

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
        for group in (self._waiting, self._running, self._swapped, self._ending, self._finished):
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
        """Nothing waits, nothing runs, nothing is swapped out and nothing is left to be read."""
        return not (self._waiting or self._running or self._swapped or self._flight)

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

    def measured(self, load: Load, seconds: float) -> None:
        """Whoever has a clock says how long a step's load took."""
        self._pace = self._pace.after_step(load, seconds)

    def swapping(self) -> bool:
        """Whether somebody waits to come back."""
        return bool(self._swapped)

    def step(self, now: float) -> StepResult:
        """One round. Raises NonFiniteLogits for a model that computed no numbers."""
        earlier, self._flight = self._flight, None
        view = self.view()
        plan = self._policy.plan(view, now)
        if earlier is not None and not self._foreseen(plan):
            return self._told(earlier)
        preempted = tuple(self._preempt(self._running[each]) for each in plan.preempt)
        runs = self._prepare(plan, view)
        if runs or preempted:
            self._headroom = self._headroom.after_step(len(preempted))
        if not runs:
            return self._told(earlier, preempted=preempted)
        ahead = self._ahead and all(foreseen(sequence) for sequence, _ in runs.progress)
        scored, flight = self._begin(runs, earlier, ahead)
        self._flight = flight if ahead else None
        return self._told(earlier if ahead else flight, runs, preempted=preempted, scored=scored)

    def _foreseen(self, plan: Plan) -> bool:
        """Whether this can be done by somebody who does not know what was drawn last."""
        groups = (self._running, self._waiting, self._swapped)
        work = (next(group[name] for group in groups if name in group) for name, _ in plan.work)
        return not plan.preempt and all(foreseen(sequence) for sequence in work)

    def _told(
        self,
        flight: Flight | None,
        runs: Runs | None = None,
        *,
        preempted: tuple[Sequence, ...] = (),
        scored: tuple[Scored, ...] = (),
    ) -> StepResult:
        """What was begun, and what that flight has drawn."""
        outputs, stuck = _NOTHING if flight is None else self._land(flight)
        clocked = timed(self._flight, flight)
        return StepResult(
            progress=() if runs is None else runs.progress,
            tokens=0 if runs is None else runs.tokens,
            outputs=outputs,
            preempted=preempted,
            scored=scored,
            dead_ends=stuck,
            landed=flight is not None,
            unread=self._flight is not None,
            load=None if clocked is None else clocked.load,
            overlapped=clocked is not None and clocked.overlapped,
        )

    def _begin(self, runs: Runs, earlier: Flight | None, ahead: bool) -> tuple[tuple[Scored, ...], Flight]:
        """Compute the runs: how likely the tokens are where somebody asked, and what is to be drawn. Ahead, or where it
        is nothing, that has begun."""
        batch = self._binder.batch(runs, earlier)
        scored: tuple[Scored, ...] = ()
        if runs.scored:
            told = self._runner.run(with_scored_rows(batch, runs.progress))
            scored, logits = read_scores(self._sampler, runs.progress, told)
        else:
            logits = self._runner.run(batch)
        self._advance(runs)
        draws, positions = runs.draws, runs.draws.positions
        self._last = runs if runs.steady else None
        drawing = begin(self._sampler, draws, logits) if ahead or not draws.sequences else None
        if ahead:
            self._await(draws.sequences)
        runs.go_on()
        return scored, Flight(
            draws=draws, positions=positions, logits=logits, drawing=drawing, load=runs.load, ahead=ahead
        )

    def _prepare(self, plan: Plan, view: View) -> Runs:
        """Check the plan and start what it starts. What shares a prefix with another start of the same plan is left to
        the next one: nobody knew yet that it is coming."""
        if self._last is not None and self._last.work == plan.work:
            return self._last
        coming = {one.id: one.coming for one in view.waiting}
        work = plan.work
        for name in dict.fromkeys([name for name, _ in work if name not in self._running]):
            if name in coming and self._views.entering(self._waiting[name]).coming > coming[name]:
                work = tuple([each for each in work if each.id != name])
            else:
                self._enter(name)
        return Runs(plan.work, limited([Progress(self._running[name], count) for name, count in work]))

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
        self._binder.extend(sequence, self._views.blocks_for(sequence.computed) - shared)
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
        self._last = None
        self._running[sequence.id] = sequence
        sequence.row = self._rows.open(sequence.table.ids())
        self._views.enter(sequence)

    def _rest(self, sequence: Sequence) -> None:
        """It was taken out of those that run."""
        assert sequence.row is not None
        self._last = None
        self._rows.close(sequence.row)
        sequence.row = None
        self._views.leave(sequence)

    def _advance(self, runs: Runs) -> None:
        """What the device was told to compute counts as computed."""
        size = self._block_size
        for sequence, count in runs.progress:
            sequence.computed += count
        for at in (runs.long | (runs.ends % size == 0)).nonzero()[0].tolist():
            sequence, count = runs.progress[at]
            self._views.change(sequence)
            self._publish(sequence, (sequence.computed - count) // size)

    def _await(self, complete: Ordered[Sequence]) -> None:
        """A token of each is being drawn; whatever it is, one that has come to its limit ends with it."""
        for sequence in complete:
            sequence.pending += 1
            if sequence.known() >= sequence.stop.length_limit:
                self._ending[sequence.id] = self._leave(sequence)

    def _land(self, flight: Flight) -> _Ends:
        """Read a token for each of a flight that is still wanted, and one for each of its twins; and the dead ends,
        which have none."""
        draws, positions = flight.draws, flight.positions
        if flight.drawing is None:
            return self._sample(draws, positions, flight.logits)
        wanted = [at for at, one in enumerate(draws.sequences) if one.state is State.RUNNING]
        sampled = flight.drawing.read(wanted)
        if len(wanted) < len(draws.sequences):
            draws, positions = Draws([draws.sequences[at] for at in wanted]), positions[wanted]
        for sequence in draws.sequences:
            sequence.pending -= 1
        outputs = self._take(draws, positions, sampled)
        for at in ((positions + 1) % self._block_size == 0).nonzero()[0].tolist():
            sequence = draws.sequences[at]
            if sequence.end_reason is None and sequence.computed > positions[at]:
                self._publish(sequence, int(positions[at]) // self._block_size)
        return outputs, ()

    def _sample(self, draws: Draws, positions: Int64s, logits: torch.Tensor) -> _Ends:
        """As they are drawn now."""
        sequences = draws.sequences
        if indices := dead_ends(draws):
            for at in indices:
                self._finish(sequences[at], EndReason.DEAD_END)
            kept = [at for at in range(len(sequences)) if at not in indices]
            left = Draws([sequences[at] for at in kept])
            self._sampler.settle(logits)
            outputs, _ = self._sample(left, positions[kept], logits[kept])
            return outputs, tuple([sequences[at] for at in indices])
        sampled, twins = draw(self._sampler, draws, positions, logits) if sequences else ([], {})
        return self._take(draws, positions, sampled, twins), ()

    def _take(
        self,
        draws: Draws,
        positions: Int64s,
        sampled: list[Sampled],
        twins: Twins = NO_TWINS,
    ) -> Outputs:
        outputs = take(draws, positions, sampled, twins)
        for at in outputs.ended:
            self._finish(outputs.sequences[at], outputs.sequences[at].end_reason)
        return outputs

    def _publish(self, sequence: Sequence, first: int) -> None:
        """Full blocks from `first` on can be found by others from now on; those with a pending token cannot yet."""
        assert sequence.table is not None
        full = min(sequence.computed, len(sequence.tokens)) // self._block_size
        links = sequence.chain.links(sequence.tokens, first, full)
        if links:
            self.pool.publish(sequence.table, first, links)
            self._coming.settle(sequence.id, links)

    def _finish(self, sequence: Sequence, reason: EndReason | None) -> None:
        assert reason is not None
        sequence.end_reason = reason
        sequence.advance(Event.FINISH)
        if self._ending.pop(sequence.id, None) is None:
            self._leave(sequence)
        self._finished[sequence.id] = sequence

    def _leave(self, sequence: Sequence) -> Sequence:
        self._rest(self._running.pop(sequence.id))
        return sequence

    def _swap_space(self) -> SwapSpace:
        assert self._swap is not None
        return self._swap

    def _assert_new(self, sequence: Sequence) -> None:
        known = (self._waiting, self._running, self._swapped, self._ending, self._finished)
        assert not any(sequence.id in group for group in known), f"sequence {sequence.id} is here already"
