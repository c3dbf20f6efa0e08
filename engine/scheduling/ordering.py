"""In which order sequences get work. Pure functions over views; what it is for, a policy knows."""

from collections.abc import Iterable

from engine.policy import SequenceView
from engine.sequence import SequenceId


def by_aged_length(
    views: tuple[SequenceView, ...], now: float, ageing_tokens_per_s: float
) -> list[SequenceView]:
    """Shortest remaining work first; each second since arrival counts as `ageing_tokens_per_s` tokens less.

    Ties go by arrival, then by id. A sequence with n tokens left can be overtaken only by those that arrive
    within n / ageing_tokens_per_s seconds of it: with ageing above 0 none starves; the higher the rate, the
    closer to first come, first served. now: in seconds, on the clock of `SequenceView.arrived`.
    """
    assert ageing_tokens_per_s >= 0.0, ageing_tokens_per_s

    def key(view: SequenceView) -> tuple[float, float, SequenceId]:
        return (view.uncomputed - ageing_tokens_per_s * (now - view.arrived), view.arrived, view.id)

    return sorted(views, key=key)


def oldest(views: Iterable[SequenceView]) -> SequenceView:
    """The one that arrived first, by id among equals. There must be one."""
    return min(views, key=lambda view: (view.arrived, view.id))
