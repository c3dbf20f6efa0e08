"""Compiles the kernels for the host, once per source, compiler and processor.

Owns the compiler's command line and the cache of built libraries. Called by `choose_backend` and, so that the
first start does not wait, by `python -m engine.kernels.cpu.build`. Never loads what it builds.
"""

import argparse
import hashlib
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
from engine.progress import SILENT, Progress

COMPILERS = ("g++", "c++", "clang++")
"""Commands that are tried when nobody names one."""

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
    """`~/.cache/crossdock`. Whoever wants another one says so: nothing here reads the environment."""
    return Path.home() / ".cache" / "crossdock"


def host_flags() -> tuple[str, ...]:
    """Flags that let the compiler use everything this processor has."""
    x86 = platform.machine().lower() in {"x86_64", "amd64"}
    return ("-march=native",) if x86 else ("-mcpu=native",)


def find_compiler(commands: Sequence[str]) -> Compiler:
    """The first command, with arguments if it has any, that answers `--version`.

    Raises NoCompiler when none does.
    """
    for command in commands:
        words = tuple(shlex.split(command))
        if not words or shutil.which(words[0]) is None:
            continue
        answer = subprocess.run([*words, "--version"], capture_output=True, text=True, check=False)
        if answer.returncode == 0:
            return Compiler(command=words, version=answer.stdout)
    raise NoCompiler(f"no C++ compiler found: tried {', '.join(commands) or 'nothing'}")


def build(cache_folder: Path, compiler: Compiler, target: Sequence[str], progress: Progress = SILENT) -> Path:
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
        progress.begin("compiling the kernels for this processor, once")
        _compile(compiler, target, fresh)
        fresh.replace(library)
    return library


def main(argv: Sequence[str] | None = None) -> int:
    """Build for this host. Having no compiler is no failure: the reference backend serves."""
    parser = argparse.ArgumentParser(description="Compile the CPU kernels for this machine.")
    parser.add_argument("--cache-folder", type=Path, default=default_cache_folder())
    parser.add_argument("--compiler", action="append", help=f"command, tried in turn; {', '.join(COMPILERS)}")
    arguments = parser.parse_args(argv)
    try:
        compiler = find_compiler(arguments.compiler or COMPILERS)
        library = build(arguments.cache_folder, compiler, host_flags())
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
