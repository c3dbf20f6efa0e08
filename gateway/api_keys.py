"""API keys: who may ask for answers, and as which tenant. Owns the file of keys; sees none of the calls.

One key a line, as `TENANT ID SHA256`; a tenant may have any number of them at a time, so that a new one is in use
before the old one goes. The file holds hashes: a key is shown once, by whoever makes it, and is stored nowhere. A file
without any line is one that is being written: that there is to be no key a comment, `# none`, says.
"""

import hmac
import os
import re
import secrets
import stat
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import structlog

from service.startup import StartupError
from service.watched_files import WatchedFiles

TENANT = re.compile(r"[A-Za-z0-9._-]{1,64}")
FILE_BYTES_MAX = 16 << 20

_KEY = re.compile(r"cdk_([0-9a-f]{16})_[A-Za-z0-9_-]{43}")
_LINE = re.compile(rf"({TENANT.pattern})\s+([0-9a-f]{{16}})\s+([0-9a-f]{{64}})")
_SECRET_BYTES = 32


class KeysUnusable(StartupError):
    """One line for the operator."""


@dataclass(frozen=True, slots=True)
class _Row:
    tenant: str
    digest: bytes


_NOBODY = _Row("", bytes(sha256().digest_size))


class ApiKeys:
    """The keys in a file. Raises KeysUnusable when it cannot be read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._watched = WatchedFiles([path])
        self._rows = _read(path)

    def tenant_of(self, key: str) -> str | None:
        """Whose key it is, None for nobody's. Takes as long for a key that is nearly right as for any other: what is
        compared are hashes, in constant time, and what finds the one to compare is no secret."""
        shape = _KEY.fullmatch(key)
        row = self._rows.get(shape[1], _NOBODY) if shape else _NOBODY
        right = hmac.compare_digest(sha256(key.encode()).digest(), row.digest)
        return row.tenant if right else None

    def tenants(self) -> frozenset[str]:
        return frozenset(row.tenant for row in self._rows.values())

    def refresh(self) -> None:
        """Take the file as it is now, if it changed. One that cannot be used is left until it changes, one that cannot
        be read until it can, and what was there goes on being used."""
        if not self._watched.changed():
            return
        try:
            self._rows = _read(self._path)
        except KeysUnusable as error:
            again = isinstance(error.__cause__, OSError)
            if not again or self._watched.unread(str(error)):
                structlog.get_logger().error("API keys not taken", why=str(error))
            return
        self._watched.read()
        structlog.get_logger().info("API keys taken", keys=len(self._rows))


def make(path: Path, tenant: str) -> str:
    """A new key of the tenant, whose hash is now in the file. Raises KeysUnusable."""
    if TENANT.fullmatch(tenant) is None:
        raise KeysUnusable(f"{tenant!r}: a tenant is 1 to 64 letters, digits, dots, hyphens and underscores")
    key_id = secrets.token_hex(8)
    key = f"cdk_{key_id}_{secrets.token_urlsafe(_SECRET_BYTES)}"
    line = f"{tenant} {key_id} {sha256(key.encode()).hexdigest()}\n"
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as file:
            file.write(line.encode())
    except OSError as error:
        raise KeysUnusable(f"{path}: {error.strerror}") from error
    return key


def _read(path: Path) -> dict[str, _Row]:
    try:
        state = path.stat()
        if state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise KeysUnusable(f"{path}: others may write it; chmod 600 it")
        if state.st_size > FILE_BYTES_MAX:
            raise KeysUnusable(f"{path}: at most {FILE_BYTES_MAX} bytes")
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError as error:
        raise KeysUnusable(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise KeysUnusable(f"{path}: not text in ASCII") from None
    if not any(map(str.strip, lines)):
        raise KeysUnusable(f"{path}: empty; a line with # says that there are to be no keys")
    return dict(
        _row(path, number, line)
        for number, line in enumerate(lines, 1)
        if line.strip() and not line.startswith("#")
    )


def _row(path: Path, number: int, line: str) -> tuple[str, _Row]:
    match = _LINE.fullmatch(line.strip())
    if match is None:
        raise KeysUnusable(f"{path}: line {number} is not `TENANT ID SHA256`")
    tenant, key_id, digest = match.groups()
    return key_id, _Row(tenant, bytes.fromhex(digest))
