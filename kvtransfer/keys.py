"""The key folder: a worker's own secret key, and the public keys of all whom it trusts.

Owns the files and what may be in them; `crossdock keys` makes them, workers read them once at the start. A
key is 40 characters of Z85 text (ZeroMQ RFC 32), as `zmq.curve_keypair` gives it. Never sends a key
anywhere and never shows a secret one.

NAME.secret must be readable by its owner alone and is needed where NAME runs; NAME.public is needed
everywhere. A key serves the worker of its name, and all whose ids begin with its name and a hyphen.
"""

import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from kvtransfer.errors import KeysRefused

KEY_BYTES = 40
NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")

_SECRET, _PUBLIC = ".secret", ".public"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRing:
    """secret, public: our own pair. trusted: name -> public key of everybody else and of ourselves."""

    secret: bytes = field(repr=False)
    public: bytes
    trusted: Mapping[str, bytes]

    def key_of(self, worker_id: str) -> bytes | None:
        """The public key that this worker must prove to own; None where we know of none."""
        name = _best_name(self.trusted, worker_id)
        return None if name is None else self.trusted[name]


def serves(name: str, worker_id: str) -> bool:
    """Whether the key of that name may speak for the worker."""
    return name == worker_id or worker_id.startswith(f"{name}-")


def load(folder: Path, worker_id: str) -> KeyRing:
    """What is in the folder, for that worker. Raises KeysRefused with one line for the operator."""
    if not folder.is_dir():
        raise KeysRefused(f"{folder}: no such folder")
    _forbid(folder, stat.S_IWGRP | stat.S_IWOTH, "others may write here; chmod 700 it")
    secrets = {path.stem: path for path in folder.glob(f"*{_SECRET}")}
    name = _best_name(secrets, worker_id)
    if name is None:
        raise KeysRefused(f"{folder}: no secret key for {worker_id}; make one with: crossdock keys")
    _forbid(secrets[name], stat.S_IRWXG | stat.S_IRWXO, "others may use this secret key; chmod 600 it")
    secret = _read(secrets[name])
    public = zmq.curve_public(secret)
    trusted = {path.stem: _read(path) for path in sorted(folder.glob(f"*{_PUBLIC}"))}
    if trusted.get(name, public) != public:
        raise KeysRefused(f"{folder}: {name}{_PUBLIC} and {name}{_SECRET} are not of one pair")
    if not trusted.keys() - {name}:
        raise KeysRefused(f"{folder}: no public key of anybody else")
    return KeyRing(secret=secret, public=public, trusted={**trusted, name: public})


def make(folder: Path, name: str) -> None:
    """A new pair: NAME.secret and NAME.public. Makes the folder if it is not there.

    Raises KeysRefused for a bad name, a name that has a key already, and a folder that cannot be written.
    """
    if NAME.fullmatch(name) is None:
        raise KeysRefused(f"{name!r}: a name is 1 to 64 letters, digits, dots, hyphens and underscores")
    public, secret = zmq.curve_keypair()
    files = {folder / f"{name}{_SECRET}": (secret, 0o600), folder / f"{name}{_PUBLIC}": (public, 0o644)}
    for path in files:
        if path.exists():
            raise KeysRefused(f"{path}: is there already")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path, (key, mode) in files.items():
            _write_new(path, key, mode)
    except OSError as error:
        raise KeysRefused(f"{error.filename}: {error.strerror}") from error


def _best_name(names: Mapping[str, object], worker_id: str) -> str | None:
    return max((name for name in names if serves(name, worker_id)), key=len, default=None)


def _forbid(path: Path, bits: int, complaint: str) -> None:
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise KeysRefused(f"{path}: {error.strerror}") from error
    if mode & bits:
        raise KeysRefused(f"{path}: {complaint}")


def _read(path: Path) -> bytes:
    try:
        key = path.read_bytes().strip()
        zmq.curve_public(key)
    except (OSError, ValueError, zmq.ZMQError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"not a key of {KEY_BYTES} characters"
        raise KeysRefused(f"{path}: {reason}") from error
    return key


def _write_new(path: Path, key: bytes, mode: int) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(key + b"\n")
