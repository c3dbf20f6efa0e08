"""Every phase with every happening: what follows, or that nothing may."""

import itertools

import pytest

from gateway.lifecycle import LIVE, PHASES, Happening, IllegalHappening, Phase, after

LEGAL = {
    Phase.ROUTED: {"ASKED": "RESERVING", "SUBMITTED": "COMPUTING", "FAILED": "LOST"},
    Phase.RESERVING: {"GRANTED": "RESERVED", "FAILED": "LOST"},
    Phase.RESERVED: {"SUBMITTED": "COMPUTING", "FAILED": "LOST"},
    Phase.COMPUTING: {"FIRST_TOKEN": "HANDING_OVER", "ADOPTED": "ADOPTED", "FAILED": "LOST"},
    Phase.HANDING_OVER: {"ADOPTED": "DECODING", "LAST_TOKEN": "DONE", "FAILED": "LOST"},
    Phase.ADOPTED: {"FIRST_TOKEN": "DECODING", "NEXT_TOKEN": "ADOPTED", "FAILED": "LOST"},
    Phase.DECODING: {"NEXT_TOKEN": "DECODING", "LAST_TOKEN": "DONE", "FAILED": "LOST"},
    Phase.DONE: {},
    Phase.LOST: {},
}


@pytest.mark.parametrize(("phase", "happening"), list(itertools.product(Phase, Happening)))
def test_a_happening_has_one_outcome_or_is_illegal(phase, happening):
    wanted = LEGAL[phase].get(happening.name)
    if wanted is None:
        with pytest.raises(IllegalHappening, match=f"{happening.name} in phase {phase.name}"):
            after(phase, happening)
    else:
        assert after(phase, happening) is Phase[wanted]


def test_an_attempt_can_end_well_or_badly_from_every_phase_that_is_live():
    assert frozenset(phase for phase, _ in PHASES) == LIVE
    reaching = {
        phase: {PHASES[phase, happening] for happening in Happening if (phase, happening) in PHASES}
        for phase in LIVE
    }
    for _ in LIVE:
        for phase in LIVE:
            reaching[phase] |= set().union(*(reaching.get(each, set()) for each in reaching[phase]))
    assert all({Phase.DONE, Phase.LOST} <= ends for ends in reaching.values())
