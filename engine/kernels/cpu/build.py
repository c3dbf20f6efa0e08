"""Compiles the kernels for the host, once per source, compiler and processor; a built library serves on without one.

Owns the compiler's command line and the cache of built libraries. Called by `choose_backend` and, so that the
first start does not wait, by `python -m engine.kernels.cpu.build`. Never loads what it builds.
"""

import argparse
import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
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
_VERSION_TIMEOUT_S = 10
_DIGEST_CHARACTERS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiler:
    """A C++ compiler: the command that starts it and what it says its version is."""

    command: tuple[str, ...]
    version: str


def default_cache_folder() -> Path:
    """`~/.cache/crossdock`. Whoever wants another one says so: nothing here reads the environment. Raises NoCompiler
    for a user without a home."""
    try:
        return Path.home() / ".cache" / "crossdock"
    except RuntimeError:
        raise NoCompiler("this user has no home folder to keep built kernels in: set HOME") from None


def host_flags() -> tuple[str, ...]:
    """Flags that let the compiler use everything this processor has."""
    x86 = platform.machine().lower() in {"x86_64", "amd64"}
    return ("-march=native",) if x86 else ("-mcpu=native",)


def find_compilers(commands: Sequence[str]) -> Iterator[Compiler]:
    """The commands, with arguments if they have any, that answer `--version`."""
    for command in commands:
        words = tuple(shlex.split(command))
        if not words or shutil.which(words[0]) is None:
            continue
        with suppress(subprocess.TimeoutExpired, OSError):
            answer = subprocess.run(
                [*words, "--version"],
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
                timeout=_VERSION_TIMEOUT_S,
            )
            if answer.returncode == 0:
                yield Compiler(command=words, version=answer.stdout)


def built(
    cache_folder: Path, commands: Sequence[str], target: Sequence[str], progress: Progress = SILENT
) -> Path:
    """The library of the first compiler that can build it; without any, one that was built here when there was one.

    Raises NoCompiler when there is none, else NoCompiler or OSError as `build`, for the first compiler."""
    trouble: NoCompiler | OSError | None = None
    for compiler in find_compilers(commands):
        try:
            return build(cache_folder, compiler, target, progress)
        except (NoCompiler, OSError) as error:
            trouble = trouble or error
    earlier = _intact(cache_folder, f"kernels-{_key(target)}-*.so")
    if earlier is not None:
        return earlier
    raise trouble or NoCompiler(f"no C++ compiler found: tried {', '.join(commands) or 'nothing'}")


def build(cache_folder: Path, compiler: Compiler, target: Sequence[str], progress: Progress = SILENT) -> Path:
    """Path of the shared library for `target` (architecture flags), compiled unless it is cached.

    Its name says of what it was built, by what, and its bytes: one that was damaged is removed. Of several processes
    one compiles, and the others wait for it. Raises NoCompiler when the compiler fails, OSError when the cache folder
    cannot be written.
    """
    name = f"kernels-{_key(target)}-{_digest(*compiler.command, compiler.version)}"
    library = _intact(cache_folder, f"{name}-*.so")
    if library is not None:
        return library
    cache_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _alone(cache_folder), tempfile.TemporaryDirectory(prefix="build-", dir=cache_folder) as folder:
        library = _intact(cache_folder, f"{name}-*.so")
        if library is not None:
            return library
        fresh = Path(folder) / "kernels.so"
        progress.begin("compiling the kernels for this processor, once")
        _compile(compiler, target, fresh)
        return _kept(fresh, cache_folder, name)


def _kept(fresh: Path, cache_folder: Path, name: str) -> Path:
    """The file under its own name, once the disk has it."""
    if not fresh.exists() or fresh.stat().st_size == 0:
        raise NoCompiler("the compiler made no library")
    with fresh.open("rb") as file:
        os.fsync(file.fileno())
    return fresh.replace(cache_folder / f"{name}-{_file_digest(fresh)}.so")


def _intact(cache_folder: Path, pattern: str) -> Path | None:
    """A library of such a name whose bytes are those of its name. Others are removed where that is allowed."""
    for library in sorted(cache_folder.glob(pattern)):
        with suppress(FileNotFoundError):  # somebody else has removed it
            if library.stem.rpartition("-")[2] == _file_digest(library):
                return library
            with suppress(PermissionError):
                library.unlink()
    return None


@contextmanager
def _alone(cache_folder: Path) -> Iterator[None]:
    """No other process builds meanwhile, where the file system knows locks."""
    with (cache_folder / "build.lock").open("w") as lock:
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main(argv: Sequence[str] | None = None) -> int:
    """Build for this host. Having no compiler is no failure: the reference backend serves."""
    parser = argparse.ArgumentParser(description="Compile the CPU kernels for this machine.")
    parser.add_argument("--cache-folder", type=Path, help="(default: ~/.cache/crossdock)")
    parser.add_argument("--compiler", action="append", help=f"command, tried in turn; {', '.join(COMPILERS)}")
    arguments = parser.parse_args(argv)
    try:
        folder = arguments.cache_folder or default_cache_folder()
        library = built(folder, arguments.compiler or COMPILERS, host_flags())
    except (NoCompiler, OSError) as error:
        sys.stderr.write(f"CPU kernels not built, the slower plain-torch backend will be used: {error}\n")
        return 0
    sys.stdout.write(f"{library}\n")
    return 0


def _compile(compiler: Compiler, target: Sequence[str], output: Path) -> None:
    units = [str(path) for path in _sources() if path.suffix == ".cpp"]
    command = [*compiler.command, *_FLAGS, *target, *units, "-o", str(output)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False, timeout=_TIMEOUT_S
        )
    except subprocess.TimeoutExpired as error:
        raise NoCompiler(
            f"{compiler.command[0]} took more than {_TIMEOUT_S} s to build the kernels"
        ) from error
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or [
            f"exit code {done.returncode}"
        ]
        raise NoCompiler(f"{compiler.command[0]} cannot build the kernels: {lines[0]}")


def _key(target: Sequence[str]) -> str:
    """Of everything but the compiler that the library's bytes depend on."""
    return _digest(*_FLAGS, *target, _processor(), *(path.read_bytes() for path in _sources()))


def _digest(*parts: str | bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()[:_DIGEST_CHARACTERS]


def _file_digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:_DIGEST_CHARACTERS]


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
