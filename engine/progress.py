"""What an operator hears while an engine starts: what is known to take long at once, the rest only when it does.

Made by the process, passed to whatever takes its time. Never decides where a line goes.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

PERIOD_S = 1.0

Item = TypeVar("Item")


class Progress:
    """say: takes one line. clock: seconds, monotonic; after the start or the last line there is none for PERIOD_S, but
    for `begin`."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float]) -> None:
        self._say = say
        self._clock = clock
        self._said = clock()

    def begin(self, what: str) -> None:
        """Something that takes long begins."""
        self._said = self._clock()
        self._say(what)

    def over(self, items: Iterable[Item], what: str, total: int) -> Iterator[Item]:
        """The items. what: precedes "n of total" in a line before item n."""
        for number, item in enumerate(items, 1):
            if self._clock() - self._said >= PERIOD_S:
                self.begin(f"{what} {number} of {total}")
            yield item


SILENT = Progress(lambda line: None, lambda: 0.0)
"""For whoever builds an engine with nobody watching."""
