"""One attempt at answers by beam search: a running sequence for each hypothesis, over block tables that fork.

Called by the worker on the step thread. It computes the last token of the prompt again, so that the whole search is in
one place. One credit covers all hypotheses: what those that are given up had, the others may write. Decides no scores.
"""

from dataclasses import dataclass, field, replace

from decode_worker.beam_search import BeamSearch, Hypothesis
from engine.adjustments import Adjustments
from engine.cache.block_pool import Credit
from engine.cache.block_table import BlockTable
from engine.cache.prefix_chain import PrefixChain
from engine.core import EngineCore
from engine.results import Output
from engine.sampling import Sampled
from engine.sequence import PREEMPTIONS_MAX, SamplingParams, Sequence, StopRules
from service.orders import SequenceOrder
from service.reports import TokenEnd, TokenReport


@dataclass(slots=True, kw_only=True)
class Branch:
    """The sequence of one hypothesis. adjustments: after its tokens, without the one that the engine draws. sampled:
    what is likely after it, once it is known; then it runs no more."""

    sequence: Sequence
    adjustments: Adjustments | None
    sampled: Sampled | None = None


@dataclass(slots=True, kw_only=True)
class Search:
    """gateway: who asked for it. scores: which hypotheses there are."""

    core: EngineCore
    gateway: str
    order: SequenceOrder
    scores: BeamSearch
    credit: Credit
    _branches: list[Branch] = field(default_factory=list, init=False)

    def begin(self, table: BlockTable, chain: PrefixChain, arrived: float) -> None:
        """From blocks with the KV of all tokens of the order. Its sequences are never given up: all that they can
        need was promised."""
        tokens = list(self.order.token_ids)
        self._adopt([self._sequence(0, tokens, len(tokens) - 1, table, chain, arrived)])

    def hear(self, output: Output) -> list[Hypothesis]:
        """What is likely after one hypothesis. Returns the answers, best first, once the search is over; it then has
        nothing here any more."""
        index = output.sequence.id[2]
        self.core.detach(output.sequence.id)
        self._branches[index].sampled = output.sampled
        rows = [branch.sampled for branch in self._branches if branch.sampled is not None]
        if len(rows) < len(self._branches):
            return []
        self.scores.advance(rows)
        if self.scores.running:
            self._branch()
            return []
        self.end()
        return self.scores.best(len(self.order.choices))

    def end(self) -> None:
        """Give back all that it has."""
        for branch in self._branches:
            if branch.sampled is None:
                self.core.detach(branch.sequence.id)
            assert branch.sequence.table is not None
            self.core.pool.release(branch.sequence.table)
        self._branches = []
        self.core.pool.waive(self.credit)

    def _branch(self) -> None:
        """Put the hypotheses that go on in place of those before them. Blocks that nobody needs any more are promised
        again."""
        pool, before = self.core.pool, self.core.pool.available
        parents = [branch.sequence for branch in self._branches]
        children = []
        for index, hypothesis in enumerate(self.scores.running):
            parent, adjusted = parents[hypothesis.parent], self._branches[hypothesis.parent].adjustments
            assert parent.table is not None
            tokens = [*parent.tokens[: parent.computed], hypothesis.steps[-1].token]
            table, chain = pool.fork(parent.table, parent.table.owner), parent.chain.fork()
            adjusted = None if adjusted is None else adjusted.after(tokens[-1])
            children.append(
                self._sequence(index, tokens, parent.computed, table, chain, parent.arrived, adjusted)
            )
        for parent in parents:
            assert parent.table is not None
            pool.release(parent.table)
        promised = self.credit.blocks + pool.available - before
        pool.waive(self.credit)
        self.credit = pool.grant(self.credit.owner, promised)
        self._adopt(children)

    def _adopt(self, sequences: list[Sequence]) -> None:
        self._branches = [Branch(sequence=each, adjustments=each.adjustments) for each in sequences]
        for sequence in sequences:
            sequence.credit = self.credit
            self.core.adopt(sequence)

    def _sequence(
        self,
        index: int,
        tokens: list[int],
        computed: int,
        table: BlockTable,
        chain: PrefixChain,
        arrived: float,
        adjustments: Adjustments | None = None,
    ) -> Sequence:
        """The token that the engine draws for it is of no interest, only what is likely there."""
        drawn = self.order.sampling(self.order.choices[0], SamplingParams)
        return Sequence(
            id=(self.order.key.request_id, self.order.key.attempt, index),
            tokens=tokens,
            sampling=replace(drawn, temperature=0.0, candidates=self.scores.candidates()),
            prompt_tokens=self.order.prompt_tokens,
            adjustments=adjustments,
            stop=StopRules(length_limit=self.order.length_limit() + 1),
            arrived=arrived,
            preemptions=PREEMPTIONS_MAX,
            chain=chain,
            computed=computed,
            table=table,
        )


def reports_of(order: SequenceOrder, answers: list[Hypothesis]) -> list[TokenReport]:
    """Every token of the answers, each as one of the order's choices."""
    return [
        TokenReport(
            key=order.key,
            choice=choice.index,
            position=position,
            token_id=step.token,
            logprob=None if order.logprobs is None else step.logprob,
            top=step.top,
            end=TokenEnd[answer.end.name] if answer.end and position == len(answer.steps) - 1 else None,
        )
        for choice, answer in zip(order.choices, answers, strict=True)
        for position, step in enumerate(answer.steps)
    ]
