"""GPU kernels compile ahead of time for compute capability 8.0 and 9.0, take of the chip what the docs say, and are
checked on a GPU by whoever has one."""

import os
import re
import subprocess
import sys
import time
from functools import partial
from multiprocessing import active_children
from pathlib import Path

import pytest

from benchmarks.gpu_floors import tables
from benchmarks.gpu_place import Check
from benchmarks.gpu_runs import Limits, run_all

ROOT = Path(__file__).parents[2]
PATIENT = Limits(check_s=300, whole_s=600)


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
    assert list(run_all(every, 1, PATIENT)) == [
        ("good", 0.5),
        ("bad", "ValueError: could not convert string to float: 'no number'"),
        ("deadly", "the process died"),
        ("good too", 1.0),
    ]


def test_a_process_in_which_a_check_went_wrong_runs_no_other():
    """Its GPU would refuse whatever it asks."""
    whose = Check(name="whose", run=os.getpid)
    every = [whose, whose, Check(name="bad", run=partial(float, "no number")), whose]
    first, second, _, third = (outcome for _, outcome in run_all(every, 1, PATIENT))
    assert first == second != third


def test_a_check_that_hangs_is_told_of_and_ended():
    hung = Check(name="hung", run=partial(time.sleep, 1e6))
    ((_, outcome),) = run_all([hung], 1, Limits(check_s=0.5, whole_s=600))
    assert re.fullmatch(r"no answer in \d+ s: its process was killed", outcome)
    for process in active_children():
        process.join(60)
    assert not active_children()


def test_checks_end_when_their_time_is_over_however_many_are_left():
    hung = [Check(name=str(number), run=partial(time.sleep, 1e6)) for number in range(3)]
    outcomes = [outcome for _, outcome in run_all(hung, 1, Limits(check_s=600, whole_s=0.5))]
    assert outcomes[0].startswith("no answer in ")
    assert outcomes[1:] == ["not begun in 0 s"] * 2


@pytest.mark.parametrize("command", ["check", "bench"])
def test_without_a_gpu_there_is_one_clear_line(command):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "benchmarks.gpu", command]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr.startswith("no GPU: ") and result.stderr.count("\n") == 1
