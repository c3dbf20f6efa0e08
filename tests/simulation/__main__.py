"""make simulate N=100000 [SEED=0] [JOBS=2]: many histories, a summary, and a non-zero exit when one broke a rule."""

import argparse
import sys
import time
from collections import Counter
from multiprocessing import get_context

from tests.simulation import history

CHUNK = 50
FAILURES_SHOWN = 5
SHOWN_MAX = 25


def main():
    parser = argparse.ArgumentParser(prog="simulate")
    parser.add_argument("histories", type=_positive)
    parser.add_argument("--seed", type=int, default=0, help="of the first history")
    parser.add_argument("--jobs", type=_positive, default=1)
    options = parser.parse_args()
    started = time.perf_counter()
    seeds = range(options.seed, options.seed + options.histories)
    counts, failures = _run(seeds, options.jobs, started)
    _report(counts, failures, len(seeds), time.perf_counter() - started)
    sys.exit(1 if failures else 0)


def _positive(text):
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not at least 1")
    return number


def _run(seeds, jobs, started):
    counts, failures, done = Counter(), [], 0
    chunks = [seeds[first : first + CHUNK] for first in range(0, len(seeds), CHUNK)]
    with get_context("spawn").Pool(jobs) as pool:
        for number, (happened, failed) in enumerate(pool.imap_unordered(history.run_many, chunks), 1):
            counts.update(happened)
            failures += failed
            sys.stderr.writelines(f"\n{each.splitlines()[0]}\n" for each in failed)
            done = min(number * CHUNK, len(seeds))
            rate = done / (time.perf_counter() - started)
            sys.stderr.write(f"\r{done}/{len(seeds)} histories, {rate:.0f}/s, {len(failures)} failed ")
            sys.stderr.flush()
    sys.stderr.write("\n")
    return counts, failures


def _report(counts, failures, histories, seconds):
    def grouped(prefix):
        found = Counter(
            {name.removeprefix(prefix): counts[name] for name in counts if name.startswith(prefix)}
        )
        return ", ".join(f"{name} {count}" for name, count in found.most_common(SHOWN_MAX))

    for failure in failures[:FAILURES_SHOWN]:
        print(failure, end="\n\n")
    print(f"faults: {grouped('fault ')}")
    print(f"transfers met: {grouped('met ')}")
    print(f"attempts lost: {grouped('lost: ')}")
    print(f"requests ended: {grouped('ended ')}")
    names = ("attempts", "attempts on one worker", "commits", "steps", "frames accepted", "blocks shared")
    names += ("blocks not sent", "given back", "swapped out", "blocks copied beside")
    print(", ".join(f"{name} {counts[name]}" for name in names))
    print(
        f"{histories} histories, {len(failures)} failed, {histories / seconds:.1f} histories/s: "
        f"wrong commits {counts['wrong commits']}, leaks {counts['leaks']}, hangs {counts['hangs']}"
    )


if __name__ == "__main__":
    main()
