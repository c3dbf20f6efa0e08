"""How much work the workers are given at once: enough that none of them waits for the gateway, and no more, since what
waits here can still be put in order. A pure function over views."""

from collections.abc import Iterable
from dataclasses import dataclass

from gateway.cost import Cost
from gateway.router import WorkerView

SEATS_AHEAD = 1.25
"""Sequences for each seat: those on top are computed, or sent, while a seat becomes free."""
PROMPTS_AHEAD, PROMPT_TOKENS_AHEAD = 8, 8192
"""For each worker that computes prompts."""
LIGHT_TOKENS = 64
"""A prompt of so many hardly delays anybody, whoever computes it, and waits for a seat alone."""
LIGHT_SHARE = 0.5
"""Of the seats, up to which light prompts pass those that wait to be computed: these want seats afterwards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """How much the workers take at once: sequences; and requests and tokens in prompts that are not computed yet,
    whichever is more. What is larger than any of it goes alone."""

    branches: int
    prompts: int
    prompt_tokens: int

    def lets_pass(self, light: Cost, first: Cost, taken: int) -> bool:
        """Whether a request with a light prompt goes before the one whose turn it is: where that one waits for its own
        to be computed, and not for seats. taken: sequences that run."""
        if taken + first.branches > self.branches:
            return False
        return taken + light.branches <= LIGHT_SHARE * self.branches


def window_of(prefills: Iterable[WorkerView], decodes: Iterable[WorkerView]) -> Window | None:
    """None while nobody generates. Those who do compute the prompts as well where nobody else is there for it."""
    serving = [view for view in decodes if view.ready]
    sources = sum(view.ready for view in prefills) or len(serving)
    seats = sum(view.seats for view in serving)
    if not seats:
        return None
    return Window(
        branches=int(seats * SEATS_AHEAD) + 1,
        prompts=PROMPTS_AHEAD * sources,
        prompt_tokens=PROMPT_TOKENS_AHEAD * sources,
    )
