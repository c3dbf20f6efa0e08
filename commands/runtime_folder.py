"""The folder of one `serve`, or of a worker of several ranks, for the sockets of its processes, and the removal of
those that killed ones have left.

A folder belongs to whoever holds the lock on the file in it; a killed process holds none. Of other folders nothing is
removed but sockets, that file and the operator's, of this user, and no link is followed.
"""

import fcntl
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

OPERATOR_FILE = "operator-token"
_PREFIX = "crossdock-"
_LOCK = "serve.lock"
_NAME = re.compile(rf"{_PREFIX}\w{{8}}")
_PATH_MAX = 90  # of the 107 bytes that a Unix socket's path may have


@contextmanager
def runtime_folder(places: Sequence[str] | None = None) -> Iterator[Path]:
    """A folder that only this user can enter, until the block ends. places: the first that leaves room for a socket's
    path is used, else the last; default: the system's for temporary files, then /tmp. All are swept."""
    places = places or _places()
    for place in dict.fromkeys(places):
        sweep(place)
    place = next((each for each in places if len(each) + len(_PREFIX) + 9 <= _PATH_MAX), places[-1])
    folder, lock = _make(place)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def sweep(place: str) -> None:
    """Removes what killed processes have left there. Whatever cannot be removed stays."""
    for folder in folders([place]):
        with suppress(OSError):
            _sweep_folder(str(folder))


def folders(places: Sequence[str] | None = None) -> Iterator[Path]:
    """All there are, anybody's. places: as for `runtime_folder`."""
    for place in dict.fromkeys(places or _places()):
        with suppress(OSError):
            yield from (Path(place, name) for name in os.listdir(place) if _NAME.fullmatch(name))


def _places() -> tuple[str, ...]:
    return (tempfile.gettempdir(), "/tmp")


def _make(place: str) -> tuple[Path, int]:
    """A new folder and its lock, held. One that is swept before its lock is held is made again."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place))
        with suppress(FileNotFoundError):
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            if _locked(lock) and (folder / _LOCK).exists():
                return folder, lock
            os.close(lock)


def _sweep_folder(path: str) -> None:
    """Raises OSError for a folder that is not ours, or not what it looks like."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(folder).st_uid != os.geteuid():
            return
        lock = os.open(_LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        try:
            if _locked(lock):
                _empty(folder)
                os.rmdir(path)
        finally:
            os.close(lock)
    finally:
        os.close(folder)


def _empty(folder: int) -> None:
    """folder: its descriptor. The lock goes last: until then whoever comes next goes on with it."""
    for name in os.listdir(folder):
        mode = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
        if stat.S_ISSOCK(mode) or name == OPERATOR_FILE:
            os.unlink(name, dir_fd=folder)
    if os.listdir(folder) == [_LOCK]:
        os.unlink(_LOCK, dir_fd=folder)


def _locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
