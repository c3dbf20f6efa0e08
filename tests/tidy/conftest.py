"""The project's own source files, parsed once."""

import ast
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    "crossdock",
    "service",
    "engine",
    "kvtransfer",
    "tensor_parallel",
    "prefill_worker",
    "decode_worker",
    "gateway",
    "commands",
)


@dataclass(frozen=True)
class Source:
    path: str
    text: str
    tree: ast.Module

    @property
    def package(self) -> str:
        return self.path.split("/", 1)[0]

    def at(self, node: ast.AST) -> str:
        return f"{self.path}:{getattr(node, 'lineno', 1)}"


def _read(folders: tuple[str, ...]) -> tuple[Source, ...]:
    files = sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py"))
    texts = {file: file.read_text(encoding="utf-8") for file in files if "_pb2" not in file.name}
    return tuple(
        Source(file.relative_to(ROOT).as_posix(), text, ast.parse(text)) for file, text in texts.items()
    )


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def sources() -> tuple[Source, ...]:
    """What is shipped, generated stubs aside."""
    found = _read(PACKAGES)
    assert {source.package for source in found} == set(PACKAGES)
    return found


@pytest.fixture(scope="session")
def all_sources(sources) -> tuple[Source, ...]:
    """What is shipped, and the tests and benchmarks around it."""
    return sources + _read(("tests", "benchmarks"))
