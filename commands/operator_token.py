"""What makes the user who runs `serve` an operator of it: a token, dealt anew at each start and left in the folder of
its sockets, in a file that nobody else may read. The commands of that user there find it by the gateway's address.

Whoever reaches the gateway is no operator by that: behind a proxy on the same machine everybody would be one.
"""

import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from commands.runtime_folder import OPERATOR_FILE, folders

_THIS_MACHINE = frozenset(("localhost", "127.0.0.1", "[::1]", "0.0.0.0", "[::]"))
_BYTES_MAX = 4096


def leave(folder: Path, address: str, token: str) -> None:
    """For the commands of this user. address: of the gateway, host:port."""
    file = os.open(folder / OPERATOR_FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(file, "w", encoding="ascii") as writer:
        writer.write(f"{address} {token}\n")


def find(target: str, places: Sequence[str] | None = None) -> str:
    """The token of the gateway at host:port, "" where this user has started none there. places: as for
    `runtime_folder`."""
    for folder in folders(places):
        with suppress(OSError, ValueError):
            address, token = _read(folder / OPERATOR_FILE).split()
            if _same(address, target):
                return token
    return ""


def _read(path: Path) -> str:
    """Raises OSError or ValueError for what this user has not left there."""
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(file, encoding="ascii") as reader:
        state = os.fstat(file)
        if state.st_uid != os.geteuid() or not stat.S_ISREG(state.st_mode):
            raise ValueError("somebody else's")
        return reader.read(_BYTES_MAX)


def _same(address: str, target: str) -> bool:
    (host, _, port), (wanted, _, wanted_port) = address.rpartition(":"), target.rpartition(":")
    return port == wanted_port and (host == wanted or {host, wanted} <= _THIS_MACHINE)
