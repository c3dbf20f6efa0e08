"""How fast an engine is, as its own steps have shown. A value; whoever has it asks for the next one after each step."""

import math
from dataclasses import dataclass
from typing import NamedTuple

KEPT = 0.9
"""What is left of the weight of a measurement when the next one comes."""
OUTLIER = 4.0
"""How many times what was known a measurement counts at most: a process that stood still is not slow, and one that is
passed for slow would get nothing to show that it is not."""
STEP_SHARE = 0.25
"""By how much of a step prompts may make it longer for those that generate in it."""


@dataclass(frozen=True, slots=True)
class Rate:
    """Seconds for each of something. Large measurements weigh more than small ones, and late ones more than early."""

    seconds: float = 0.0
    count: float = 0.0

    def after(self, seconds: float, count: float) -> "Rate":
        if self.seconds:
            seconds = min(seconds, OUTLIER * self.each_s() * count)
        return Rate(self.seconds * KEPT + seconds, self.count * KEPT + count)

    def each_s(self) -> float:
        """Seconds; 0 while nothing was measured."""
        return self.seconds / self.count if self.count else 0.0


class Load(NamedTuple):
    """What a step computes, as far as its time goes. generating: sequences that have one token computed. prompt_tokens:
    of the others."""

    generating: int
    prompt_tokens: int


class Pace(NamedTuple):
    """steps: in which sequences generate and nothing else is computed. tokens: of prompts."""

    steps: Rate = Rate()
    tokens: Rate = Rate()

    def after_step(self, load: Load, seconds: float) -> "Pace":
        if load.prompt_tokens:
            alone_s = self.steps.each_s() if load.generating else 0.0
            tokens = self.tokens.after(max(0.0, seconds - alone_s), load.prompt_tokens)
            return Pace(steps=self.steps, tokens=tokens)
        return Pace(steps=self.steps.after(seconds, 1), tokens=self.tokens) if load.generating else self

    def tokens_per_step(self) -> float:
        """Prompt tokens that take as long as a step that generates; infinite while either is unknown."""
        step_s, token_s = self.steps.each_s(), self.tokens.each_s()
        return step_s / token_s if step_s and token_s else math.inf
