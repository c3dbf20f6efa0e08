"""The life of one attempt as the gateway knows it: tables only.

Who owns the sequence follows from the phase: the prefill worker up to HANDING_OVER, the decode worker from ADOPTED
on. In DECODING the prefill worker has said its last word: what happens to it is of no interest any more. Where the
decode worker computes the prompt as well, it says what both would say, and owns the sequence from the beginning.
"""

from collections.abc import Mapping
from enum import Enum, auto


class Phase(Enum):
    ROUTED = auto()
    """The workers are chosen; nobody has been asked for anything."""
    RESERVING = auto()
    RESERVED = auto()
    """The decode worker has promised blocks; the prompt may be computed."""
    COMPUTING = auto()
    HANDING_OVER = auto()
    """The first token is out; the decode worker has not said that it owns the sequence."""
    ADOPTED = auto()
    """The decode worker owns the sequence, and the first token is still on its way from the prefill worker."""
    DECODING = auto()
    DONE = auto()
    LOST = auto()
    """This attempt will not end by itself. Another one can go on where it stopped."""


class Happening(Enum):
    ASKED = auto()
    GRANTED = auto()
    SUBMITTED = auto()
    FIRST_TOKEN = auto()
    """Of this attempt, from whoever computed the prompt."""
    ADOPTED = auto()
    NEXT_TOKEN = auto()
    """From the decode worker."""
    LAST_TOKEN = auto()
    FAILED = auto()


PHASES: Mapping[tuple[Phase, Happening], Phase] = {
    (Phase.ROUTED, Happening.ASKED): Phase.RESERVING,
    (Phase.ROUTED, Happening.SUBMITTED): Phase.COMPUTING,
    (Phase.ROUTED, Happening.FAILED): Phase.LOST,
    (Phase.RESERVING, Happening.GRANTED): Phase.RESERVED,
    (Phase.RESERVING, Happening.FAILED): Phase.LOST,
    (Phase.RESERVED, Happening.SUBMITTED): Phase.COMPUTING,
    (Phase.RESERVED, Happening.FAILED): Phase.LOST,
    (Phase.COMPUTING, Happening.FIRST_TOKEN): Phase.HANDING_OVER,
    (Phase.COMPUTING, Happening.ADOPTED): Phase.ADOPTED,
    (Phase.COMPUTING, Happening.FAILED): Phase.LOST,
    (Phase.HANDING_OVER, Happening.ADOPTED): Phase.DECODING,
    (Phase.HANDING_OVER, Happening.LAST_TOKEN): Phase.DONE,
    (Phase.HANDING_OVER, Happening.FAILED): Phase.LOST,
    (Phase.ADOPTED, Happening.FIRST_TOKEN): Phase.DECODING,
    (Phase.ADOPTED, Happening.NEXT_TOKEN): Phase.ADOPTED,
    (Phase.ADOPTED, Happening.FAILED): Phase.LOST,
    (Phase.DECODING, Happening.NEXT_TOKEN): Phase.DECODING,
    (Phase.DECODING, Happening.LAST_TOKEN): Phase.DONE,
    (Phase.DECODING, Happening.FAILED): Phase.LOST,
}
"""What may happen in which phase. The two workers' streams are not ordered between each other, so the decode
worker's words can arrive before the prefill worker's first token."""

OWNED_BY_TARGET = frozenset({Phase.ADOPTED, Phase.DECODING})
"""Where the decode worker may give the sequence up."""

LIVE = frozenset(Phase) - {Phase.DONE, Phase.LOST}


class IllegalHappening(Exception):
    """Something that cannot happen in this phase; nothing has changed."""


def after(phase: Phase, happening: Happening) -> Phase:
    """The phase that follows. Raises IllegalHappening."""
    following = PHASES.get((phase, happening))
    if following is None:
        raise IllegalHappening(f"{happening.name} in phase {phase.name}")
    return following
