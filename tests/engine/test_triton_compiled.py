"""GPU kernels compile ahead of time for compute capability 8.0 and 9.0, take of the chip what the docs say, and are
checked on a GPU by whoever has one."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from benchmarks.gpu import run_all
from benchmarks.gpu_floors import tables
from benchmarks.gpu_place import Check

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(900)
def test_kernels_compile_without_spilling_and_as_the_tables_say():
    """Those that stand for all; of the others the table must have every shape. In a process of its own: in this one
    kernels are interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.gpu_table", "--check", "docs/gpu-kernels.md"]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_the_floors_in_the_docs_are_those_that_are_computed():
    assert f"\n{tables()}\n" in (ROOT / "docs/gpu.md").read_text()


def test_a_check_that_ends_its_process_spoils_no_other():
    ways = {
        "good": partial(float, "0.5"),
        "bad": partial(float, "no number"),
        "deadly": partial(os._exit, 3),
        "good too": partial(float, "1"),
    }
    every = [Check(name=name, run=run) for name, run in ways.items()]
    assert list(run_all(every, processes=1)) == [
        ("good", 0.5),
        ("bad", "ValueError: could not convert string to float: 'no number'"),
        ("deadly", "the process died"),
        ("good too", 1.0),
    ]


@pytest.mark.parametrize("command", ["check", "bench"])
def test_without_a_gpu_there_is_one_clear_line(command):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "benchmarks.gpu", command]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr.startswith("no GPU: ") and result.stderr.count("\n") == 1
