"""The GPU kernels on a GPU: `check` compares each with float64, `bench` measures it against its floor.

Needs torch, triton and numpy alone, and a few minutes. `check --interpret` runs the checks on small shapes without a
GPU, in Triton's interpreter. Exits with 1 when a check fails, with 2 when there is no GPU.
"""

import argparse
import os
import sys
import time


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
    import torch
    import triton

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

    if device == "cpu":
        from benchmarks import gpu_interpreter

        gpu_interpreter.install()
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    faults, started = 0, time.perf_counter()
    for check in checks(Place(device=torch.device(device), large=device == "cuda", dtypes=dtypes)):
        error = check.run()
        faults += not error <= 1
        print(
            f"{'ok   ' if error <= 1 else 'FAULT'} {error:8.3f} of what is allowed  {check.name}", flush=True
        )
    print(f"{faults} faults, {time.perf_counter() - started:.0f} s")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
