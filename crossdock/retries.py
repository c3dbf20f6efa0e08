"""When a client makes a call again: only where the server could not take it up and nothing of its answer has come.

The rules are those of gRPC's own retries (gRFC A6): a backoff that doubles, the server's pushback before it, and a
throttle, so that a service in need is not asked thrice by everybody. They are kept here because gRPC's Python library
can wait for ever, past a deadline even, where the server of a call that may be repeated dies. Makes no call itself.
"""

import random
import time
from collections.abc import Callable, Iterable
from typing import cast

import grpc

from crossdock.wire import request_error

TRIES_MAX = 3
BACKOFF_S = 0.05
BACKOFF_S_MAX = 1.0
JITTER = 0.2
PUSHBACK_KEY = "grpc-retry-pushback-ms"

_TOKENS_MAX = 100.0
_TOKEN_RATIO = 0.5


class Retries:
    """Of one client. clock: seconds, monotonic. chance: in [0, 1)."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, chance: Callable[[], float] = random.random
    ) -> None:
        self._clock = clock
        self._chance = chance
        self._tokens = _TOKENS_MAX

    def begin(self, timeout_s: float | None) -> "Tries":
        """A new call. timeout_s: for all tries together, None for no limit."""
        return Tries(self, None if timeout_s is None else self._clock() + timeout_s)

    def now(self) -> float:
        return self._clock()

    def backoff_s(self, tries: int) -> float:
        """Before the next one, after so many."""
        longest = min(BACKOFF_S * 2.0 ** (tries - 1), BACKOFF_S_MAX)
        return longest * (1 - JITTER + 2 * JITTER * self._chance())

    def succeeded(self) -> None:
        self._tokens = min(self._tokens + _TOKEN_RATIO, _TOKENS_MAX)

    def failed(self) -> bool:
        """Whether so much has gone well lately that a call may be repeated."""
        self._tokens = max(self._tokens - 1, 0.0)
        return self._tokens > _TOKENS_MAX / 2


class Tries:
    """Of one call. deadline: on the clock of `retries`."""

    def __init__(self, retries: Retries, deadline: float | None) -> None:
        self._retries = retries
        self._deadline = deadline
        self._tries = 0
        self._begun = False

    def left_s(self) -> float | None:
        """Time limit of the try that begins now."""
        self._tries += 1
        return None if self._deadline is None else max(self._deadline - self._retries.now(), 0.0)

    def begun(self) -> None:
        """Something of the answer is here."""
        self._begun = True

    def succeeded(self) -> None:
        self._retries.succeeded()

    def pause_s(self, error: grpc.RpcError) -> float:
        """How long to wait before the next try. Raises RequestError where there is none."""
        pause = self._pause_s(error)
        if pause is None or (self._deadline is not None and self._retries.now() + pause >= self._deadline):
            raise request_error(error) from None
        return pause

    def _pause_s(self, error: grpc.RpcError) -> float | None:
        if error.code() is not grpc.StatusCode.UNAVAILABLE:
            return None
        may_repeat, pushback = self._retries.failed(), _pushback_s(error)
        if not may_repeat or self._begun or self._tries >= TRIES_MAX or (pushback or 0.0) < 0:
            return None
        return self._retries.backoff_s(self._tries) if pushback is None else pushback


def _pushback_s(error: grpc.RpcError) -> float | None:
    """What the server asks for; negative: not to come back. None where it says nothing."""
    metadata = dict(cast(Iterable[tuple[str, str]], error.trailing_metadata() or ()))
    if PUSHBACK_KEY not in metadata:
        return None
    try:
        return int(metadata[PUSHBACK_KEY]) / 1000
    except ValueError:
        return -1.0
