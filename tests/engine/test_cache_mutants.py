"""Each guard of the prefix cache is needed: without it, the state machines find a difference to the model."""

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.engine.test_block_pool import PoolMachine
from tests.engine.test_prefix_cache import IndexMachine
from tests.simulation.cache_mutants import INDEX_MUTANTS, LEDGER_MUTANTS, POOL_MUTANTS

SEARCH = settings(
    max_examples=600,
    stateful_step_count=50,
    deadline=None,
    phases=(Phase.generate,),
    derandomize=True,
    report_multiple_bugs=False,
)


def notices(machine, mutant):
    with mutant.at_large():
        try:
            run_state_machine_as_test(machine, settings=SEARCH)
        except (Exception, pytest.fail.Exception):
            return True
    return False


@pytest.mark.parametrize("mutant", (*POOL_MUTANTS, *LEDGER_MUTANTS), ids=lambda mutant: mutant.name)
def test_the_pools_machine_notices_when(mutant):
    assert notices(PoolMachine, mutant)


@pytest.mark.parametrize("mutant", INDEX_MUTANTS, ids=lambda mutant: mutant.name)
def test_the_indexs_machine_notices_when(mutant):
    assert notices(IndexMachine, mutant)
