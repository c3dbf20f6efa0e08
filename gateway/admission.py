"""How many requests may be live at once. Refuses at the door; never makes anybody wait."""

from collections.abc import Iterator
from contextlib import contextmanager

from service.errors import Exhausted

RETRY_AFTER_MS = 1000


class Admission:
    """requests_max: live requests, queued ones included."""

    def __init__(self, requests_max: int) -> None:
        self._requests_max = requests_max
        self._live = 0

    @property
    def live(self) -> int:
        """Requests accepted and not yet ended."""
        return self._live

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Be live for the length of a `with`. Raises Exhausted when there are too many."""
        if self._live >= self._requests_max:
            message = f"requests: at most {self._requests_max} may be live"
            raise Exhausted(message, retry_after_ms=RETRY_AFTER_MS)
        self._live += 1
        try:
            yield
        finally:
            self._live -= 1
