"""`crossdock proto export`: the contracts as .proto files, for stubs in other languages. Needs nothing installed."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

_PUBLIC = ("crossdock/v1", "crossdock/mesh")


def main(argv: Sequence[str]) -> int:
    """Returns 0, or 1 with one line on standard error when a file cannot be written."""
    flags = _parser().parse_args(argv)
    try:
        for name, text in _contracts():
            target = Path(flags.folder, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
            print(target)
    except OSError as error:
        print(f"crossdock proto export: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="crossdock proto", allow_abbrev=False)
    verbs = parser.add_subparsers(required=True, metavar="export")
    export = verbs.add_parser("export", description="Writes the public .proto files, and says where.")
    export.add_argument("folder", help="becomes the import path (protoc -I); made if it is not there")
    return parser


def _contracts() -> Iterator[tuple[str, str]]:
    """Each public file's name below the import path, and its text."""
    root = _root()
    for package in _PUBLIC:
        for name, file in sorted(_below(root.joinpath(package), package)):
            yield name, file.read_text(encoding="utf-8")


def _root() -> Traversable:
    """In the wheel they are in the package, in a checkout beside it."""
    packaged = files("crossdock") / "protos"
    return packaged if packaged.is_dir() else files("crossdock").joinpath("..", "protos")


def _below(folder: Traversable, name: str) -> Iterator[tuple[str, Traversable]]:
    for entry in folder.iterdir():
        inside = f"{name}/{entry.name}"
        if entry.is_dir():
            yield from _below(entry, inside)
        elif entry.name.endswith(".proto"):
            yield inside, entry
