"""Many small tuples at once, made of columns: a step has some for each of its sequences, and a call in Python for each
would cost more than what is in them."""

from collections.abc import Iterable
from functools import partial
from typing import Any, TypeVar

Row = TypeVar("Row", bound=tuple[Any, ...])


def rows_of(kind: type[Row], *columns: Iterable[Any]) -> list[Row]:
    """A `kind` for each row of the columns, as many as the shortest of them has; a column for each of its fields.
    kind: a NamedTuple."""
    return list(map(partial(tuple.__new__, kind), zip(*columns, strict=False)))
