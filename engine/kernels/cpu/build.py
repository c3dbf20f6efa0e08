"""Compiles the kernels for the host, once per source, compiler and processor.

Owns the compiler's command line and the cache of built libraries. Called by `choose_backend` and, so that the
first start does not wait, by `python -m engine.kernels.cpu.build`. Never loads what it builds.
"""

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.errors import NoCompiler

_CANDIDATES = ("g++", "c++", "clang++")
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-shared",
    "-pthread",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-math-errno",
)
_TIMEOUT_S = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiler:
    """A C++ compiler: the command that starts it and what it says its version is."""

    command: tuple[str, ...]
    version: str


def default_cache_folder() -> Path:
    """`$XDG_CACHE_HOME/crossdock`, or `~/.cache/crossdock`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "crossdock"


def default_commands() -> tuple[str, ...]:
    """Compilers in the order they are tried: `$CXX`, which may carry arguments, then the usual names."""
    named = os.environ.get("CXX", "").strip()
    return (named, *_CANDIDATES) if named else _CANDIDATES


def host_flags() -> tuple[str, ...]:
    """Flags that let the compiler use everything this processor has."""
    x86 = platform.machine().lower() in {"x86_64", "amd64"}
    return ("-march=native",) if x86 else ("-mcpu=native",)


def find_compiler(commands: Sequence[str]) -> Compiler:
    """The first command that answers `--version`. Raises NoCompiler when none does."""
    for command in commands:
        words = tuple(shlex.split(command))
        if not words or shutil.which(words[0]) is None:
            continue
        answer = subprocess.run([*words, "--version"], capture_output=True, text=True, check=False)
        if answer.returncode == 0:
            return Compiler(command=words, version=answer.stdout)
    raise NoCompiler(f"no C++ compiler found: tried {', '.join(commands) or 'nothing'}")


def build(cache_folder: Path, compiler: Compiler, target: Sequence[str]) -> Path:
    """Path of the shared library for `target` (architecture flags), compiled unless it is cached.

    Several processes may build at once: each compiles into a file of its own and renames it into place.
    Raises NoCompiler when the compiler fails, OSError when the cache folder cannot be written.
    """
    library = cache_folder / f"kernels-{_key(compiler, target)}.so"
    if library.exists():
        return library
    cache_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="build-", dir=cache_folder) as folder:
        fresh = Path(folder) / library.name
        _compile(compiler, target, fresh)
        fresh.replace(library)
    return library


def main() -> int:
    """Build for this host into the default cache. No compiler is no failure: the reference backend serves."""
    try:
        compiler = find_compiler(default_commands())
        library = build(default_cache_folder(), compiler, host_flags())
    except (NoCompiler, OSError) as error:
        sys.stderr.write(f"CPU kernels not built, the slower plain-torch backend will be used: {error}\n")
        return 0
    sys.stdout.write(f"{library}\n")
    return 0


def _compile(compiler: Compiler, target: Sequence[str], output: Path) -> None:
    units = [str(path) for path in _sources() if path.suffix == ".cpp"]
    command = [*compiler.command, *_FLAGS, *target, *units, "-o", str(output)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise NoCompiler(
            f"{compiler.command[0]} took more than {_TIMEOUT_S} s to build the kernels"
        ) from error
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or [
            f"exit code {done.returncode}"
        ]
        raise NoCompiler(f"{compiler.command[0]} cannot build the kernels: {lines[0]}")


def _key(compiler: Compiler, target: Sequence[str]) -> str:
    """SHA-256 over everything that the library's bytes depend on."""
    digest = hashlib.sha256()
    texts = [*compiler.command, compiler.version, *_FLAGS, *target, _processor()]
    for part in (*(text.encode() for text in texts), *(path.read_bytes() for path in _sources())):
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()


def _sources() -> list[Path]:
    folder = Path(__file__).parent
    return sorted([*folder.glob("*.cpp"), *folder.glob("*.h")])


def _processor() -> str:
    """Model and feature flags of the first core: what `native` means here."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return f"{platform.machine()} {platform.processor()}"
    names = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    first = cpuinfo.read_text().split("\n\n", maxsplit=1)[0]
    return "\n".join(line for line in first.splitlines() if line.startswith(names))


if __name__ == "__main__":
    sys.exit(main())
