"""The GPU kernels on a GPU: `check` compares each with float64, `bench` measures it against its floor.

Needs torch, triton and numpy alone, and a few minutes. `check --interpret` runs the checks on small shapes without a
GPU, in Triton's interpreter. Exits with 1 when a check fails, with 2 when there is no GPU, torch or triton.
"""

import argparse
import os
import sys
import time

from benchmarks.gpu_runs import Limits, run_all

PROCESSES_MAX = 8
"""Each has a context on the GPU, and compiles what its checks launch: nearly all of their time."""

ON_A_GPU = Limits(check_s=90.0, whole_s=270.0)
"""All of it in less than five minutes, whatever goes wrong; most checks take seconds, and several are under way."""

INTERPRETED = Limits(check_s=900.0, whole_s=3600.0)
"""On two cores the whole takes some minutes."""


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
    limits = ON_A_GPU if place.large else INTERPRETED
    for name, error in run_all(list(checks(place)), min(PROCESSES_MAX, _cores()), limits):
        good = not isinstance(error, str) and error <= 1
        faults += not good
        told = error if isinstance(error, str) else f"{error:8.3f} of what is allowed"
        print(f"{'ok   ' if good else 'FAULT'} {told}  {name}", flush=True)
    print(f"{faults} faults, {time.perf_counter() - started:.0f} s")
    return 1 if faults else 0


def _cores() -> int:
    return len(os.sched_getaffinity(0))


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a process that its driver does not let go of is not waited for
