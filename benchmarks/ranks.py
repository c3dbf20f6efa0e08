"""What ranks of one worker cost on processors: a step of generation on the built-in model, on one rank and on several.

One line for each number of ranks: the fastest and the middle step of some that generate one token for each sequence,
and how often and with how many bytes each rank takes part in a gathering per step. Ranks are processes over gloo, as
`crossdock serve --tensor-parallel-size` starts them, with one thread each.
"""

import argparse
import statistics
import time
from pathlib import Path

from commands.ranks import following
from decode_worker.policy import DecodePolicy
from engine.assembly import Engine, assemble
from engine.model.architecture import ModelConfig
from engine.sequence import SamplingParams, Sequence, StopRules
from engine.wishes import EngineWishes
from service.config import WorkerOptions
from service.model_source import resolve_model
from service.worker_process import crash

PROMPT_TOKENS = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--sequences", type=int, default=1)
    parser.add_argument("--steps", type=int, default=40)
    arguments = parser.parse_args()
    for ranks in arguments.ranks:
        options = WorkerOptions.model_validate(
            {
                "tensor_parallel_size": ranks,
                "threads": ranks,
                "num_gpu_blocks_override": 64 * arguments.sequences,
                "listen": "unix:/nowhere",
                "worker_id": "bench",
                "ticket_key": "00" * 32,
            }
        )
        print(f"{ranks} ranks: {measured(options, arguments.sequences, arguments.steps)}", flush=True)


def measured(options: WorkerOptions, sequences: int, steps: int) -> str:
    model = resolve_model(options.model)
    with following(options, Path(model), 0, crash) as followers:
        wishes = EngineWishes.of(options, model)
        policy = DecodePolicy(budget_tokens=256, seats=64)
        engine = assemble(wishes, policy, memory_bytes=4 << 30, followers=followers)
        took = sorted(_steps_of(engine, sequences, steps))
    calls, floats = gathered(engine.config, options.tensor_parallel_size)
    volume = f"{calls} gatherings, {4 * floats * sequences / 1024:.0f} KiB of parts from each rank"
    return f"fastest {1e3 * took[0]:.1f} ms, middle {1e3 * statistics.median(took):.1f} ms; {volume}"


def gathered(config: ModelConfig, ranks: int) -> tuple[int, int]:
    """(How often the ranks put parts together in a step, how many floats of each row each of them brings)."""
    if ranks == 1:
        return 0, 0
    of_layer = config.heads * config.head_dim + 2 * config.hidden_size + config.intermediate_size
    return 4 * config.layers + 1, (config.layers * of_layer + config.vocab_size) // ranks


def _steps_of(engine: Engine, sequences: int, steps: int) -> list[float]:
    for number in range(sequences):
        tokens = [1000 + 37 * number + i for i in range(PROMPT_TOKENS)]
        stop = StopRules(length_limit=PROMPT_TOKENS + steps + 1)
        engine.core.submit(
            Sequence(id=(str(number), 1, 0), tokens=tokens, sampling=SamplingParams(), stop=stop, arrived=0.0)
        )
    engine.core.step(0.0)
    took = []
    while not engine.core.idle():
        started = time.perf_counter()
        engine.core.step(0.0)
        took.append(time.perf_counter() - started)
    return took


if __name__ == "__main__":
    main()
