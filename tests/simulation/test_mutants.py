"""Each guard of hand-off and cache is needed: without it, the simulation breaks a rule within a few histories."""

import pytest

from tests.simulation import history
from tests.simulation.cache_mutants import SIMULATED
from tests.simulation.mutants import MUTANTS
from tests.simulation.scenario import draw

HISTORIES_MAX = 1500


@pytest.mark.parametrize("mutant", (*MUTANTS, *SIMULATED), ids=lambda mutant: mutant.name)
def test_the_simulation_notices_when(mutant):
    with mutant.at_large():
        for seed in (mutant.shown_by, *range(HISTORIES_MAX)):
            violation, _ = history.attempt(draw(seed, mutant.kinds))
            if violation is not None:
                return
    pytest.fail(f"{HISTORIES_MAX} histories show nothing")
