"""Looking up a step in a table of legal transitions. Tables live beside the machines they rule."""

from collections.abc import Mapping
from enum import Enum
from typing import TypeVar

from kvtransfer.errors import IllegalTransition

S = TypeVar("S", bound=Enum)
E = TypeVar("E", bound=Enum)


def next_state(table: Mapping[tuple[S, E], S], state: S, event: E) -> S:
    """The state after `event`. Raises IllegalTransition where the table has no entry."""
    target = table.get((state, event))
    if target is None:
        raise IllegalTransition(f"{event.name} in state {state.name}")
    return target
