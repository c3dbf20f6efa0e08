"""Five hundred histories of requests, faults and restarts: no rule of the design is ever broken."""

import re
from dataclasses import replace

import pytest

from tests.simulation import history
from tests.simulation.__main__ import main
from tests.simulation.faults import Fault, Kind
from tests.simulation.mutants import MUTANTS
from tests.simulation.scenario import draw
from tests.simulation.world import World

CHUNK = 50


@pytest.mark.parametrize("first", range(0, 500, CHUNK))
def test_histories_with_faults_break_no_rule(first):
    counts, failures = history.run_many(range(first, first + CHUNK))
    assert failures == [], failures[0]
    assert counts["commits"] > CHUNK


def test_every_kind_of_fault_happens():
    counts, _ = history.run_many(range(1000, 1080))
    assert {kind.value for kind in Kind if not counts[f"fault {kind.value}"]} == set()


@pytest.mark.parametrize("seed", [3, 8, 31])
def test_a_seed_is_one_history(seed):
    worlds = [World(draw(seed)), World(draw(seed))]
    first, second = [(world.run(), world.agenda.now, world.agenda.steps) for world in worlds]
    assert first == second


def test_a_failure_says_its_seed_and_the_few_faults_that_it_takes():
    mutant = next(each for each in MUTANTS if each.name == "blocks are not verified")
    with mutant.at_large(), pytest.raises(history.Failed) as failed:
        for seed in range(100):
            history.run(seed)
    text = str(failed.value)
    assert f"SEED={seed}" in text
    assert "flip payload" in text
    before, after = map(int, re.search(r"shortened from (\d+) faults to (\d+)", text).groups())
    assert after <= min(before, 10)


def test_a_history_is_shortened_to_what_it_takes():
    kept = Fault(Kind.KILL, 0.6, ("d0",), 0.5)
    scenario = replace(draw(5), faults=(*draw(5).faults, kept))
    least = history.shorten(scenario, lambda candidate: kept in candidate.faults)
    assert least.faults == (kept,)
    assert len(least.absent) == len(scenario.wishes)


@pytest.mark.parametrize("flags", [["-5"], ["0"], ["5", "--jobs=0"]])
def test_a_simulation_of_nothing_is_refused(flags, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["simulate", *flags])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "is not at least 1" in capsys.readouterr().err
