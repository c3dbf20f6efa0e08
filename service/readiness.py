"""What a process tells whoever started it: JSON lines on its standard output.

    {"ready": true, "grpc": "127.0.0.1:50051"}      it serves; the fields say where
    {"ready": false, "error": "--model: ..."}       it cannot start, and another try would not help

and before it, while it starts:

    {"loading": "layer 7 of 30"}

Both ends are here. Nothing else is ever said on standard output; logs go to standard error.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TextIO

Field = str | int | float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """fields: what the process said of itself."""

    fields: Mapping[str, Field]


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """error: one line for the operator."""

    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """what: one line for the operator."""

    what: str


def announce(fields: Mapping[str, Field], stream: TextIO | None = None) -> None:
    """Says that this process serves now. stream: standard output."""
    _say({"ready": True, **fields}, stream)


def refuse(error: str, stream: TextIO | None = None) -> None:
    """Says that this process cannot start. stream: standard output."""
    _say({"ready": False, "error": error}, stream)


def loading(what: str, stream: TextIO | None = None) -> None:
    """Says what this process is doing before it serves."""
    _say({"loading": what}, stream)


def parse(line: str) -> Ready | Refused | Loading | None:
    """What a child's line says; None for a line that is something else."""
    try:
        said = json.loads(line)
    except ValueError:
        return None
    if not isinstance(said, dict):
        return None
    if isinstance(what := said.get("loading"), str):
        return Loading(what=what)
    match said.pop("ready", None):
        case True:
            return Ready(
                fields={key: value for key, value in said.items() if isinstance(value, str | int | float)}
            )
        case False:
            return Refused(error=str(said.get("error", "")))
    return None


def _say(message: Mapping[str, Field], stream: TextIO | None) -> None:
    stream = stream or sys.stdout
    stream.write(json.dumps(message) + "\n")
    stream.flush()
