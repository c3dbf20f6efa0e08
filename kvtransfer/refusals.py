"""Endpoints whose handshake is refused, and who hears of it: the operator, once for each change.

Each attempt at a hand-off meets the same refusal again, and one line for each would tell nothing new. I/O thread only.
"""

from collections.abc import Callable

ENDPOINTS_MAX = 256


def unheard(line: str) -> None:
    """For whoever has no operator."""


class Refusals:
    """warn: takes one line. At most ENDPOINTS_MAX are known; the one that was refused first is forgotten first."""

    def __init__(self, warn: Callable[[str], None] = unheard) -> None:
        self._warn = warn
        self._refused: dict[str, None] = {}

    def refused(self, endpoint: str, why: str) -> None:
        if endpoint in self._refused:
            return
        if len(self._refused) >= ENDPOINTS_MAX:
            del self._refused[next(iter(self._refused))]
        self._refused[endpoint] = None
        self._warn(f"{endpoint}: {why}")

    def succeeded(self, endpoint: str) -> None:
        if endpoint in self._refused:
            del self._refused[endpoint]
            self._warn(f"{endpoint}: the handshake succeeds again")
