"""Where the time goes between `crossdock serve` and its ready line.

    python -m benchmarks.startup [--runs 3]

Each part is timed in a process of its own with warm file caches, as the processes of `serve` run it at the same time.
"""

import argparse
import statistics
import subprocess
import sys
import time

PARTS: dict[str, str | tuple[str, str]] = {
    "interpreter": "",
    "gateway: imports": "import gateway.gateway",
    "gateway: tokenizer": (
        "from gateway.tokenizer import load_tokenizer as f; from service.model_source import resolve_model as r",
        "f(r('smollm2-135m-instruct'))",
    ),
    "worker: import torch": "import torch",
    "worker: all imports": "import commands.worker, decode_worker.role",
    "worker: model, float32": ("import torch, commands.worker as w", "LOAD(torch.float32)"),
    "worker: model, bfloat16": ("import torch, commands.worker as w", "LOAD(torch.bfloat16)"),
}
LOAD = """
def LOAD(dtype):
    from decode_worker.policy import DecodePolicy
    wishes = w.EngineWishes(model=w.resolve_model("smollm2-135m-instruct"), dtype=dtype, num_blocks=64)
    w.assemble(wishes, DecodePolicy(budget_tokens=1, seats=1), memory_bytes=4 << 30)
"""


def seconds(part: str | tuple[str, str]) -> float:
    """Of the whole process for a statement, of the second statement for a pair."""
    if isinstance(part, str):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", part], check=True)
        return time.perf_counter() - began
    first, second = part
    code = f"{first}\n{LOAD}\nimport time\nbegan = time.perf_counter()\n{second}\nprint(time.perf_counter() - began)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return float(done.stdout)


def serve() -> float:
    argv = [sys.executable, "-m", "commands.main", "serve", "--grpc-port", "0", "--http-port", "0"]
    began = time.perf_counter()
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        took = time.perf_counter() - began
        process.terminate()
        assert line.startswith("ready "), line
    return took


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=3)
    runs = parser.parse_args().runs
    for name, part in PARTS.items():
        print(f"{name:26} {statistics.median(seconds(part) for _ in range(runs)):6.2f} s")
    print(f"{'serve: ready':26} {statistics.median(serve() for _ in range(runs)):6.2f} s")


if __name__ == "__main__":
    main()
