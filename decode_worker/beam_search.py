"""Which runs of tokens a beam search follows, and which it has completed: scores only.

Scored as transformers' `generate` does (5.x, `_beam_search`), so that the answers are the same: the likeliest
continuations of all hypotheses together, biases and penalties applied to their logprobs, complete ones divided by
their length to the power of a penalty, the search over when no better one is likely. Pure; knows no block, no model
and no worker.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from engine.sampling import Sampled
from engine.sequence import EndReason, StopRules
from service.orders import Beam

Alternatives = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One token of a hypothesis. top: what else was likely there."""

    token: int
    logprob: float
    top: Alternatives


@dataclass(frozen=True, slots=True, kw_only=True)
class Hypothesis:
    """A run of tokens behind the prompt. total: sum of their scores. parent: which of the hypotheses before it goes
    on. end: why it is complete."""

    steps: tuple[Step, ...] = ()
    total: float = 0.0
    parent: int = 0
    end: EndReason | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Complete:
    """A hypothesis with its final score."""

    hypothesis: Hypothesis
    score: float


class BeamSearch:
    """rules: when a hypothesis ends. prompt_tokens: in front of each. running: what is followed now, the best first."""

    def __init__(self, beam: Beam, rules: StopRules, prompt_tokens: int) -> None:
        self.running: tuple[Hypothesis, ...] = (Hypothesis(),)
        self._beam = beam
        self._rules = rules
        self._prompt_tokens = prompt_tokens
        self._complete: list[Complete] = []
        self._ranked = max(2, 1 + len(rules.stop_token_ids)) * beam.width

    def candidates(self) -> int:
        """Likeliest tokens that it has to know of each hypothesis."""
        return self._ranked + len(self._rules.stop_token_ids)

    def advance(self, rows: Sequence[Sampled]) -> None:
        """One more token. rows: what is likely after each running hypothesis. Nothing runs any more when it is over."""
        ranked = sorted(self._continuations(rows), key=lambda each: -each.total)[: self._ranked]
        for hypothesis in ranked[: self._beam.width]:
            if hypothesis.end is not None:
                self._complete.append(Complete(hypothesis=hypothesis, score=self._score(hypothesis)))
        self._complete = sorted(self._complete, key=lambda each: -each.score)[: self._beam.width]
        open_ones = (each for each in ranked if each.end is None)
        self.running = tuple(islice(open_ones, self._beam.width))
        if self.running and self._settled(self._score(self.running[0])):
            self.running = ()

    def best(self, count: int) -> list[Hypothesis]:
        """The complete ones, the best first."""
        return [each.hypothesis for each in self._complete[:count]]

    def _continuations(self, rows: Sequence[Sampled]) -> Iterable[Hypothesis]:
        for parent, (before, row) in enumerate(zip(self.running, rows, strict=True)):
            length = self._prompt_tokens + len(before.steps) + 1
            early = length <= self._rules.min_length
            for token, score, logprob in row.candidates:
                if early and token in self._rules.stop_token_ids:
                    continue
                yield Hypothesis(
                    steps=(*before.steps, Step(token=token, logprob=logprob, top=row.top)),
                    total=before.total + score,
                    parent=parent,
                    end=self._rules.end_with(token, length),
                )

    def _score(self, hypothesis: Hypothesis) -> float:
        return hypothesis.total / math.pow(len(hypothesis.steps), self._beam.length_penalty)

    def _settled(self, best_running: float) -> bool:
        """Whether what runs is not likely to become better than what is complete, or nobody waits for that."""
        if len(self._complete) < self._beam.width:
            return False
        return self._beam.early_stopping or best_running <= self._complete[-1].score
