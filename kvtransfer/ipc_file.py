"""The files of ipc endpoints: whether one may be had, and its removal by whoever has it.

ZeroMQ replaces whatever lies at the path, and leaves its own file there. Binds nothing.
"""

import os
import socket
import stat
from dataclasses import dataclass
from typing import Self

from kvtransfer.errors import BindRefused

_SCHEME = "ipc://"


@dataclass(frozen=True, slots=True)
class IpcFile:
    """The file of an endpoint that is bound here, known by its inode."""

    path: str
    device: int
    inode: int

    @classmethod
    def of(cls, address: str) -> Self | None:
        """Of an address that has just been bound; None for one that leaves no file."""
        path = _path(address)
        if path is None:
            return None
        found = os.lstat(path)
        return cls(path, found.st_dev, found.st_ino)

    def remove(self) -> None:
        """To be called before the socket is closed: until then nobody else takes the path."""
        try:
            found = os.lstat(self.path)
            if (found.st_dev, found.st_ino) == (self.device, self.inode):
                os.unlink(self.path)
        except FileNotFoundError:
            return


def require_free(address: str) -> None:
    """Raises BindRefused where somebody listens, or where there is a file that is no socket. What a dead process has
    left there is free. Two that ask within the same millisecond may both be told so."""
    path = _path(address)
    if path is None or not os.path.lexists(path):
        return
    if not stat.S_ISSOCK(os.stat(path, follow_symlinks=False).st_mode):
        raise BindRefused(f"{address}: there is a file that is no socket")
    if _listened_at(path):
        raise BindRefused(f"{address}: somebody listens there")


def _path(address: str) -> str | None:
    """None where ZeroMQ makes no file, or looks after it by itself."""
    path = address.removeprefix(_SCHEME)
    return None if path in {address, "*"} or path.startswith("@") else path


def _listened_at(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as caller:
        caller.setblocking(False)  # one that is frozen answers nobody, and is there all the same
        try:
            caller.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True
    return True
