"""One history from a seed: run, and if it fails, shortened to the few faults and requests that it takes."""

from collections import Counter
from dataclasses import replace
from itertools import count

from structlog.testing import capture_logs

from tests.simulation.scenario import draw
from tests.simulation.world import Violation, World

TRIES_MAX = 300


class Failed(AssertionError):
    """A history broke a rule. Says how to run it again, and the least that makes it fail."""

    def __init__(self, scenario, least, violation, counts):
        self.counts = counts
        faults = "\n".join(f"  {fault}" for fault in least.faults) or "  none"
        asked = "\n".join(f"  {n}: {each}" for n, each in enumerate(least.wishes) if n not in least.absent)
        super().__init__(
            f"seed {scenario.seed}: {violation}\n"
            f"make simulate N=1 SEED={scenario.seed}\n"
            f"shortened from {len(scenario.faults)} faults to {len(least.faults)}:\n{faults}\n"
            f"requests that it takes:\n{asked}"
        )


def run(seed):
    """The counts of what happened. Raises Failed."""
    scenario = draw(seed)
    violation, counts = attempt(scenario)
    if violation is None:
        return counts
    least = shorten(scenario, lambda candidate: _breaks(candidate, _rule_of(violation)))
    again, _ = attempt(least)
    raise Failed(scenario, least, again or violation, counts) from violation


def run_many(seeds):
    """(counts of all, what the failed ones say)."""
    counts, failures = Counter(), []
    for seed in seeds:
        try:
            counts.update(run(seed))
        except Failed as failed:
            counts.update(failed.counts)
            failures.append(str(failed))
    return counts, failures


def attempt(scenario):
    """(what went wrong or None, counts)."""
    world = World(scenario)
    try:
        with capture_logs():
            world.run()
    except Exception as violation:
        return violation, world.counts
    return None, world.counts


def _breaks(scenario, rule):
    violation, _ = attempt(scenario)
    return violation is not None and _rule_of(violation) == rule


def _rule_of(violation):
    return violation.rule if isinstance(violation, Violation) else type(violation).__name__


def shorten(scenario, fails):
    """Drop faults, then requests, in ever smaller groups, as long as it still fails."""
    tries = count()

    def reduced(items, make):
        kept = list(items)
        for group in _halves(len(kept)):
            start = 0
            while start < len(kept):
                fewer = kept[:start] + kept[start + group :]
                if next(tries) < TRIES_MAX and fails(make(fewer)):
                    kept = fewer
                else:
                    start += group
        return make(kept)

    everybody = set(range(len(scenario.wishes)))
    fewest = reduced(scenario.faults, lambda kept: replace(scenario, faults=tuple(kept)))
    return reduced(sorted(everybody), lambda kept: replace(fewest, absent=frozenset(everybody - set(kept))))


def _halves(number):
    while number > 1:
        number = -(-number // 2)
        yield number
    yield 1
