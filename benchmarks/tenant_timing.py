"""Whether the time to the first token tells a tenant what another one has cached.

    python -m benchmarks.tenant_timing --target 127.0.0.1:50051 --keys KEY_A KEY_B [--pairs 500] [--prompt-tokens 200]

A asks for a prompt, then B for the same one and for a new one, in random order. Prints the probability of a rank test
(Mann and Whitney, normal approximation) that both times are of one kind; and the same for A itself, who does see the
difference. Run it against an otherwise idle `crossdock serve --api-keys ...`.
"""

import argparse
import math
import random
import time
from collections.abc import Sequence

from crossdock.client import Client, Credentials, Generation

FIRST = Generation(max_tokens=1, temperature=0.0)


def seconds(client: Client, prompt: list[int]) -> float:
    begin = time.perf_counter()
    client.generate(prompt, FIRST)
    return time.perf_counter() - begin


def compare(
    owner: Client, asking: Client, pairs: int, tokens: int, dice: random.Random
) -> tuple[list[float], list[float]]:
    """Times of one who asks for what the owner has cached, and for what nobody has."""
    cached: list[float] = []
    new: list[float] = []
    for _ in range(pairs):
        known, unknown = ([dice.randrange(1000, 40000) for _ in range(tokens)] for _ in range(2))
        seconds(owner, known)
        both = [(known, cached), (unknown, new)]
        dice.shuffle(both)
        for prompt, times in both:
            times.append(seconds(asking, prompt))
    return cached, new


def probability(first: Sequence[float], second: Sequence[float]) -> float:
    """Of ranks that differ so much or more by chance."""
    ordered = sorted([(value, 0) for value in first] + [(value, 1) for value in second])
    ranks = sum(rank for rank, (_, of) in enumerate(ordered, 1) if of == 0)
    n, m = len(first), len(second)
    mean, deviation = n * (n + m + 1) / 2, math.sqrt(n * m * (n + m + 1) / 12)
    return math.erfc(abs(ranks - mean) / deviation / math.sqrt(2))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="127.0.0.1:50051")
    parser.add_argument("--keys", nargs=2, required=True)
    parser.add_argument("--pairs", type=int, default=500)
    parser.add_argument("--prompt-tokens", type=int, default=200)
    flags = parser.parse_args()
    dice = random.Random()
    owner, other = (Client(flags.target, credentials=Credentials(key=key)) for key in flags.keys)
    for name, asking in (("another tenant", other), ("the same tenant", owner)):
        cached, new = compare(owner, asking, flags.pairs, flags.prompt_tokens, dice)
        medians = [1000 * sorted(times)[len(times) // 2] for times in (cached, new)]
        print(
            f"{name}: {medians[0]:.1f} ms for what the first has cached, {medians[1]:.1f} ms for what nobody has, "
            f"p = {probability(cached, new):.3g}",
            flush=True,
        )


if __name__ == "__main__":
    main()
