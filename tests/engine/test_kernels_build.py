"""The library's build and cache, the choice of a backend, and the end of its threads."""

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
    default_cache_folder,
    find_compiler,
    host_flags,
    main,
)
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
        path.write_text(f'#!/bin/sh\nif [ "$1" = --version ]; then echo "{version}"; exit; fi\n{script}\n')
        path.chmod(0o755)
        return f"'{path}'"

    return make


def compilations(command: str) -> int:
    log = Path(f"{command[1:-1]}.log")
    return len(log.read_text().splitlines()) if log.exists() else 0


def test_a_second_build_takes_what_the_first_one_built(tmp_path, compiler_that):
    command = compiler_that(COMPILE)
    compiler = find_compiler([command])
    first = build(tmp_path / "cache", compiler, ("-march=x",))
    assert first.read_text() == "library\n"
    assert build(tmp_path / "cache", compiler, ("-march=x",)) == first
    assert compilations(command) == 1


def test_that_kernels_are_compiled_is_said_and_that_they_are_there_is_not(tmp_path, compiler_that):
    said = []
    compiler, progress = find_compiler([compiler_that(COMPILE)]), Progress(said.append, clock=lambda: 0.0)
    for _ in range(2):
        build(tmp_path / "cache", compiler, ("-march=x",), progress)
    assert said == ["compiling the kernels for this processor, once"]


def test_another_target_or_compiler_version_is_built_anew(tmp_path, compiler_that):
    old = find_compiler([compiler_that(COMPILE)])
    new = find_compiler([compiler_that(COMPILE, version="stand-in 2.0")])
    cache = tmp_path / "cache"
    built = {
        build(cache, old, ("-march=x",)),
        build(cache, old, ("-march=y",)),
        build(cache, new, ("-march=x",)),
    }
    assert len(built) == 3


def test_two_builds_at_once_both_end_with_the_whole_library(tmp_path, compiler_that):
    rendezvous = tmp_path / "rendezvous"
    os.mkfifo(rendezvous)
    meet = f'if mkdir "$0.first"; then cat "{rendezvous}" > /dev/null; else echo > "{rendezvous}"; fi'
    command = compiler_that(f"{meet}\n{COMPILE}")
    compiler = find_compiler([command])
    with ThreadPoolExecutor(2) as crew:
        builds = [crew.submit(build, tmp_path / "cache", compiler, ()) for _ in range(2)]
        first, second = (done.result() for done in builds)
    assert compilations(command) == 2
    assert first == second and first.read_text() == "library\n"
    assert list((tmp_path / "cache").iterdir()) == [first]


def test_no_compiler_names_what_was_tried():
    with pytest.raises(NoCompiler, match="no-such-compiler, nor-this-one"):
        find_compiler(["no-such-compiler", "nor-this-one -v"])


def test_a_missing_compiler_is_passed_over_for_the_next(compiler_that):
    assert find_compiler(["no-such-compiler", compiler_that("exit 0")]).version == "stand-in 1.0\n"


def test_a_compiler_that_fails_says_why_and_leaves_nothing_behind(tmp_path, compiler_that):
    compiler = find_compiler([compiler_that('echo "kernel.cpp:1: error: no such luck" >&2; exit 1')])
    with pytest.raises(NoCompiler, match="no such luck"):
        build(tmp_path / "cache", compiler, ())
    assert list((tmp_path / "cache").iterdir()) == []


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
        library = Library(build(default_cache_folder(), find_compiler(COMPILERS), host_flags()))
    except NoCompiler as error:
        pytest.skip(str(error))
    return lambda threads: CpuOperations(torch.float32, threads, library)


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
    try:
        compiler = find_compiler(COMPILERS)
    except NoCompiler as error:
        pytest.skip(str(error))
    strict = ("-O0", "-Wall", "-Wextra", "-Werror", "-Wno-psabi")
    assert build(tmp_path, compiler, (*host_flags(), *strict)).exists()
