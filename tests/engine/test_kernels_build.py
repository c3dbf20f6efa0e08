"""The library's build and cache, the choice of a backend, and the end of its threads."""

import errno
import gc
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from engine.errors import NoCompiler
from engine.kernels.cpu.backend import CpuBackend
from engine.kernels.cpu.build import (
    COMPILERS,
    build,
    built,
    default_cache_folder,
    find_compilers,
    host_flags,
    main,
)
from engine.kernels.cpu.crew import Crew
from engine.kernels.cpu.library import Library
from engine.kernels.cpu.operations import CpuOperations
from engine.kernels.select import choose_backend
from engine.progress import Progress

COMPILE = 'for last; do :; done; echo compiled >> "$0.log"; echo library > "$last"'


@pytest.fixture
def compiler_that(tmp_path):
    """Makes a stand-in compiler that answers --version and otherwise runs a shell script."""

    def make(script: str, version: str = "stand-in 1.0") -> str:
        path = tmp_path / f"compiler {len(list(tmp_path.iterdir()))}"
        text = f'#!/bin/sh\nif [ "$1" = --version ]; then echo "{version}"; exit; fi\n{script}\n'
        path.write_bytes(text.encode(errors="surrogateescape"))
        path.chmod(0o755)
        return f"'{path}'"

    return make


def compilations(command: str) -> int:
    log = Path(f"{command[1:-1]}.log")
    return len(log.read_text().splitlines()) if log.exists() else 0


def test_a_second_build_takes_what_the_first_one_built(tmp_path, compiler_that):
    command = compiler_that(COMPILE)
    compiler = next(find_compilers([command]))
    first = build(tmp_path / "cache", compiler, ("-march=x",))
    assert first.read_text() == "library\n"
    assert build(tmp_path / "cache", compiler, ("-march=x",)) == first
    assert compilations(command) == 1


def test_that_kernels_are_compiled_is_said_and_that_they_are_there_is_not(tmp_path, compiler_that):
    said = []
    compiler, progress = (
        next(find_compilers([compiler_that(COMPILE)])),
        Progress(said.append, clock=lambda: 0.0),
    )
    for _ in range(2):
        build(tmp_path / "cache", compiler, ("-march=x",), progress)
    assert said == ["compiling the kernels for this processor, once"]


def test_another_target_or_compiler_version_is_built_anew(tmp_path, compiler_that):
    old = next(find_compilers([compiler_that(COMPILE)]))
    new = next(find_compilers([compiler_that(COMPILE, version="stand-in 2.0")]))
    cache = tmp_path / "cache"
    made = {
        build(cache, old, ("-march=x",)),
        build(cache, old, ("-march=y",)),
        build(cache, new, ("-march=x",)),
    }
    assert len(made) == 3


def libraries(cache: Path) -> list[Path]:
    return [path for path in cache.iterdir() if path.name != "build.lock"]


def test_of_several_builds_at_once_one_compiles_and_the_others_wait_for_it(tmp_path, compiler_that):
    command = compiler_that(COMPILE)
    compiler = next(find_compilers([command]))
    with ThreadPoolExecutor(4) as crew:
        builds = [crew.submit(build, tmp_path / "cache", compiler, ()) for _ in range(4)]
        (library,) = {done.result() for done in builds}
    assert compilations(command) == 1
    assert library.read_text() == "library\n" and libraries(tmp_path / "cache") == [library]


def test_where_files_cannot_be_locked_two_builds_at_once_both_end_with_the_whole_library(
    tmp_path, compiler_that, monkeypatch
):
    def unable(*_):
        raise OSError(errno.ENOLCK, "no locks here")

    monkeypatch.setattr("fcntl.flock", unable)
    rendezvous = tmp_path / "rendezvous"
    os.mkfifo(rendezvous)
    meet = f'if mkdir "$0.first"; then cat "{rendezvous}" > /dev/null; else echo > "{rendezvous}"; fi'
    command = compiler_that(f"{meet}\n{COMPILE}")
    compiler = next(find_compilers([command]))
    with ThreadPoolExecutor(2) as crew:
        builds = [crew.submit(build, tmp_path / "cache", compiler, ()) for _ in range(2)]
        first, second = (done.result() for done in builds)
    assert compilations(command) == 2
    assert first == second and first.read_text() == "library\n"
    assert libraries(tmp_path / "cache") == [first]


@pytest.mark.parametrize("damage", [b"", b"librar", b"another library, as long as you like\n"])
def test_a_library_that_was_damaged_is_built_again(tmp_path, compiler_that, damage):
    command = compiler_that(COMPILE)
    compiler = next(find_compilers([command]))
    library = build(tmp_path, compiler, ())
    library.write_bytes(damage)
    assert build(tmp_path, compiler, ()).read_text() == "library\n"
    assert compilations(command) == 2


def test_what_was_built_serves_on_when_the_compiler_is_gone(tmp_path, compiler_that):
    command = compiler_that(COMPILE)
    library = built(tmp_path / "cache", [command], ("-march=x",))
    assert built(tmp_path / "cache", ["no-such-compiler"], ("-march=x",)) == library
    with pytest.raises(NoCompiler):
        built(tmp_path / "cache", ["no-such-compiler"], ("-march=y",))
    library.write_text("damaged")
    with pytest.raises(NoCompiler):
        built(tmp_path / "cache", ["no-such-compiler"], ("-march=x",))


def test_what_was_built_serves_on_in_a_folder_that_cannot_be_written(tmp_path, compiler_that, monkeypatch):
    library = built(tmp_path / "cache", [compiler_that(COMPILE)], ())

    def refused(*_, **__):
        raise PermissionError("read-only")

    monkeypatch.setattr(Path, "mkdir", refused)
    assert built(tmp_path / "cache", [compiler_that(COMPILE, version="another")], ()) == library


def test_a_compiler_that_cannot_build_is_passed_over_for_the_next(tmp_path, compiler_that):
    bad, empty, good = compiler_that("exit 1"), compiler_that(": > /dev/null"), compiler_that(COMPILE)
    assert built(tmp_path / "cache", [bad, empty, good], ()).read_text() == "library\n"
    with pytest.raises(NoCompiler, match="exit code 1"):
        built(tmp_path / "other", [bad, empty], ())


def test_a_compiler_that_says_nothing_readable_or_never_answers_is_no_reason_to_fail(
    tmp_path, compiler_that, monkeypatch
):
    odd = compiler_that(COMPILE, version="\udce9")
    assert built(tmp_path / "cache", [odd], ()).read_text() == "library\n"
    mute = tmp_path / "mute"
    mute.write_text("#!/bin/sh\nexec sleep 1000\n")
    mute.chmod(0o755)
    monkeypatch.setattr("engine.kernels.cpu.build._VERSION_TIMEOUT_S", 0.2)
    with pytest.raises(NoCompiler, match="no C\\+\\+ compiler found"):
        built(tmp_path / "other", [str(mute)], ())


def test_a_user_without_a_home_is_told_so(monkeypatch):
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    chosen = choose_backend(None, 1)
    assert chosen.backend.name == "reference" and "set HOME" in (chosen.note or "")


def test_no_compiler_names_what_was_tried(tmp_path):
    with pytest.raises(NoCompiler, match="no-such-compiler, nor-this-one"):
        built(tmp_path, ["no-such-compiler", "nor-this-one -v"], ())


def test_a_missing_compiler_is_passed_over_for_the_next(compiler_that):
    assert next(find_compilers(["no-such-compiler", compiler_that("exit 0")])).version == "stand-in 1.0\n"


def test_a_compiler_that_fails_says_why_and_leaves_nothing_behind(tmp_path, compiler_that):
    compiler = next(find_compilers([compiler_that('echo "kernel.cpp:1: error: no such luck" >&2; exit 1')]))
    with pytest.raises(NoCompiler, match="no such luck"):
        build(tmp_path / "cache", compiler, ())
    assert libraries(tmp_path / "cache") == []


def test_the_command_builds_with_the_named_compiler_and_prints_the_path(tmp_path, compiler_that, capsys):
    command = compiler_that(COMPILE)
    assert main(["--cache-folder", str(tmp_path / "cache"), "--compiler", command]) == 0
    printed = Path(capsys.readouterr().out.strip())
    assert printed.parent == tmp_path / "cache" and printed.read_text() == "library\n"


def test_the_command_without_a_compiler_says_so_and_succeeds(tmp_path, capsys):
    assert main(["--cache-folder", str(tmp_path), "--compiler", "no-such-compiler"]) == 0
    assert "no-such-compiler" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
def test_without_a_compiler_plain_torch_serves_and_the_operator_is_told(tmp_path, dtype):
    chosen = choose_backend(dtype, 1, cache_folder=tmp_path, compilers=("no-such-compiler",))
    assert chosen.backend.name == "reference"
    assert chosen.backend.dtype == (dtype or torch.float32)
    assert chosen.note is not None and "no-such-compiler" in chosen.note and "\n" not in chosen.note


def test_a_cache_folder_that_cannot_be_written_is_not_fatal(tmp_path, compiler_that):
    (tmp_path / "file").write_text("in the way")
    chosen = choose_backend(None, 1, cache_folder=tmp_path / "file", compilers=(compiler_that(COMPILE),))
    assert chosen.backend.name == "reference" and chosen.note is not None


def test_a_library_that_cannot_be_loaded_is_not_fatal(tmp_path, compiler_that):
    chosen = choose_backend(None, 1, cache_folder=tmp_path / "cache", compilers=(compiler_that(COMPILE),))
    assert chosen.backend.name == "reference" and chosen.note is not None


def test_the_dtype_is_the_asked_one_or_the_one_that_the_processor_is_made_for():
    chosen = choose_backend(None, 1)
    if not isinstance(chosen.backend, CpuBackend):
        pytest.skip(str(chosen.note))
    assert choose_backend(torch.float32, 1).backend.dtype == torch.float32
    assert choose_backend(torch.bfloat16, 1).backend.dtype == torch.bfloat16
    flags = Path("/proc/cpuinfo").read_text().split()
    native = torch.bfloat16 if {"avx512_bf16", "bf16"} & set(flags) else torch.float32
    assert chosen.backend.dtype == native


@pytest.fixture
def operations_of():
    """Makes operations on so many threads."""
    try:
        library = Library(built(default_cache_folder(), COMPILERS, host_flags()))
    except NoCompiler as error:
        pytest.skip(str(error))
    return lambda threads: CpuOperations(torch.float32, Crew(library, threads))


def test_threads_end_with_their_backend(operations_of):
    gc.collect()
    before = set(os.listdir("/proc/self/task"))
    backend = operations_of(4)
    backend.linear(torch.randn(8, 64), backend.pack(torch.randn(4000, 64)))
    assert len(set(os.listdir("/proc/self/task")) - before) == 3
    del backend
    gc.collect()
    assert set(os.listdir("/proc/self/task")) <= before


def test_backends_of_one_process_do_not_disturb_each_other(operations_of):
    weight, x = torch.randn(2000, 200), torch.randn(30, 200)
    alone = operations_of(1)
    wanted = alone.linear(x, alone.pack(weight))

    def work(threads: int) -> bool:
        backend = operations_of(threads)
        packed = backend.pack(weight)
        return all(torch.equal(backend.linear(x, packed), wanted) for _ in range(20))

    with ThreadPoolExecutor(4) as crew:
        assert all(crew.map(work, [1, 2, 3, 2]))


def test_the_kernels_compile_without_a_warning(tmp_path):
    compiler = next(find_compilers(COMPILERS), None)
    if compiler is None:
        pytest.skip("no C++ compiler")
    strict = ("-O0", "-Wall", "-Wextra", "-Werror", "-Wno-psabi")
    assert build(tmp_path, compiler, (*host_flags(), *strict)).exists()
