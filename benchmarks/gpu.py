"""The GPU kernels on a GPU: `check` compares each with float64, `bench` measures it against its floor.

Needs torch, triton and numpy alone, and a few minutes. `check --interpret` runs the checks on small shapes without a
GPU, in Triton's interpreter. Exits with 1 when a check fails, with 2 when there is no GPU, torch or triton.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # which imports triton, that must not be before it is said where it runs
    from benchmarks.gpu_place import Check

PROCESSES_MAX = 8
"""Each has a context on the GPU, and compiles what its checks launch: nearly all of their time."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("check")
    check.add_argument("--interpret", action="store_true", help="in Triton's interpreter, without a GPU")
    commands.add_parser("bench")
    arguments = parser.parse_args()
    interpret = arguments.command == "check" and arguments.interpret
    if interpret:
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is first imported
    try:
        import torch
        import triton
    except ModuleNotFoundError as error:
        print(f"{error.name} is not installed for {sys.executable}, and nothing was run", file=sys.stderr)
        return 2

    if not interpret and not torch.cuda.is_available():
        print(
            f"no GPU: torch {torch.__version__} finds no CUDA device here, and nothing was run. "
            "`python -m benchmarks.gpu check --interpret` runs the checks without one.",
            file=sys.stderr,
        )
        return 2
    name = "Triton's interpreter" if interpret else torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}, triton {triton.__version__}")
    if arguments.command == "check":
        return _check("cpu" if interpret else "cuda")
    from benchmarks.gpu_bench import measure

    measure(torch.device("cuda"))
    return 0


def _check(device: str) -> int:
    import torch

    from benchmarks.gpu_checks import Place, checks

    # float16 is not served: it is how the interpreter, which has no bfloat16, computes with 16 bits.
    dtypes = (torch.float32, torch.bfloat16, *([torch.float16] if device == "cpu" else []))
    place = Place(device=torch.device(device), large=device == "cuda", dtypes=dtypes)
    faults, started = 0, time.perf_counter()
    for name, error in run_all(list(checks(place)), min(PROCESSES_MAX, _cores())):
        good = not isinstance(error, str) and error <= 1
        faults += not good
        told = error if isinstance(error, str) else f"{error:8.3f} of what is allowed"
        print(f"{'ok   ' if good else 'FAULT'} {told}  {name}", flush=True)
    print(f"{faults} faults, {time.perf_counter() - started:.0f} s")
    return 1 if faults else 0


def run_all(every: "list[Check]", processes: int) -> "Iterator[tuple[str, float | str]]":
    """(name, error as a share of what is allowed, or what went wrong) of each, in order. A GPU that was asked for what
    is not there is lost to the process that asked, so what goes wrong counts if it does in a new one too."""
    with _processes(processes) as pool:
        for check, future in [(check, pool.submit(_run, check.run)) for check in every]:
            error = _outcome(future)
            if isinstance(error, str):
                with _processes(1) as alone:
                    error = _outcome(alone.submit(_run, check.run))
            yield check.name, error


def _processes(count: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(count, get_context("spawn"), _begin, (max(1, _cores() // count),))


def _begin(threads: int) -> None:
    """In each process, which has this one's environment, and has imported nothing yet."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    if os.environ.get("TRITON_INTERPRET") == "1":
        from benchmarks import gpu_interpreter

        gpu_interpreter.install()


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _outcome(future: "Future[float | str]") -> float | str:
    try:
        return future.result()
    except BrokenProcessPool:
        return "the process died"


def _run(check: Callable[[], float]) -> float | str:
    try:
        return check()
    except Exception as error:  # whatever a kernel that cannot be compiled or launched raises
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


if __name__ == "__main__":
    sys.exit(main())
