"""Whether files are still what they were, told by their size, times and inode. Reads none of them."""

import asyncio
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

INTERVAL_S = 1.0

Signature = tuple[int, int, int, int] | None


class WatchedFiles:
    """paths: any of which may be replaced, also by a link that leads elsewhere."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = tuple(paths)
        self._seen = self._look()
        self._unread = ""

    def changed(self) -> bool:
        """Whether any of them differs from what it was at the last call, or could not be read since."""
        now = self._look()
        changed, self._seen = now != self._seen, now
        if changed:
            self._unread = ""
        return changed or bool(self._unread)

    def unread(self, why: str) -> bool:
        """One could not be read, which may be no fault of its own: `changed` says so until it changes or is `read`.
        Whether the reason is a new one."""
        new, self._unread = why != self._unread, why
        return new

    def read(self) -> None:
        """All of them were, and what is in them is known."""
        self._unread = ""

    def _look(self) -> tuple[Signature, ...]:
        return tuple(map(_signature, self._paths))


async def keep_fresh(refreshes: Sequence[Callable[[], None]], interval_s: float = INTERVAL_S) -> None:
    """Calls each of them now and then, and on SIGHUP at once. Runs until cancelled."""
    hurry, loop = asyncio.Event(), asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, hurry.set)
    try:
        while True:
            await asyncio.wait({waiting := asyncio.ensure_future(hurry.wait())}, timeout=interval_s)
            waiting.cancel()
            hurry.clear()
            for refresh in refreshes:
                refresh()
    finally:
        loop.remove_signal_handler(signal.SIGHUP)


def _signature(path: Path) -> Signature:
    try:
        state = path.stat()
    except OSError:
        return None
    return state.st_mtime_ns, state.st_ctime_ns, state.st_size, state.st_ino
