"""How much work the workers are given at once: enough that none of them waits for the gateway, and no more, since what
waits here can still be put in order. A pure function over views."""

from collections.abc import Iterable

from gateway.admission import LIGHT_TOKENS_MAX, Window
from gateway.router import WorkerView

SEATS_AHEAD = 1.25
"""Sequences for each seat: those on top are computed, or sent, while a seat becomes free."""
PROMPTS_AHEAD, PROMPT_TOKENS_AHEAD = 8, 8192
"""For each worker that computes prompts."""


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
        light_tokens=LIGHT_TOKENS_MAX,
    )
