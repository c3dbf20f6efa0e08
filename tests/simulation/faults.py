"""What can go wrong in a history, as a list that can be read, repeated and shortened.

A fault of the network hits the packet with a certain number; all others happen at some instant. Which kinds a history
has is drawn first, so that many histories have few kinds and much of them.
"""

from dataclasses import dataclass, replace
from enum import Enum


class Kind(Enum):
    DROP = "drop"
    DUPLICATE = "duplicate"
    REORDER = "reorder"
    TRUNCATE_HEADER = "truncate header"
    TRUNCATE_PAYLOAD = "truncate payload"
    FLIP_HEADER = "flip header"
    FLIP_PAYLOAD = "flip payload"
    REPLAY = "replay"
    """An older packet of the same direction comes again, on whatever connection."""
    STALL_DATA = "stall data"
    SEVER_DATA = "sever data"
    SLOW_STREAM = "slow stream"
    BREAK_STREAM = "break stream"
    KILL = "kill"
    FREEZE = "freeze"
    DRAIN = "drain"
    """A worker is told to end in good order; the fault says how long it may take before it is killed."""
    SLOW = "slow"
    CANCEL = "cancel"


PACKET_KINDS = tuple(Kind)[: tuple(Kind).index(Kind.REPLAY) + 1]
PACKETS_MAX = 800
NEAR_LOG_S = (-3.5, 0.5)


@dataclass(frozen=True, slots=True)
class Fault:
    """at: number of the packet, or seconds. who: names of processes, or the number of a request. seconds: how long.
    share: in [0, 1), where a kind needs one more choice."""

    kind: Kind
    at: float
    who: tuple[str, ...] = ()
    seconds: float = 0.0
    share: float = 0.0

    def __str__(self):
        where = f"packet {self.at:.0f}" if self.kind in PACKET_KINDS else f"{self.at:.3f} s"
        parts = [self.kind.value, *self.who, f"at {where}"]
        if self.seconds:
            parts.append(f"for {self.seconds:.3f} s")
        return " ".join(parts) + f" ({self.share:.3f})"

    def over_at(self):
        """When the world is whole again, as far as this fault goes."""
        return 0.0 if self.kind in PACKET_KINDS else self.at + self.seconds


def draw_faults(dice, scenario, kinds):
    """The scenario with faults. kinds: which ones, None for some drawn ones; with a few, there is much of them."""
    rate = dice.choice((0.003, 0.01, 0.03, 0.08) if kinds is None else (0.03, 0.1, 0.3))
    counts = (1, 1, 2, 4) if kinds is None else (4, 8, 12)
    if kinds is None:
        share = dice.choice((0.0, 0.15, 0.15, 0.3, 0.3, 0.6, 0.6))
        kinds = [kind for kind in Kind if dice.random() < share]
    faults = []
    for kind in kinds:
        if kind in PACKET_KINDS:
            hit = [number for number in range(PACKETS_MAX) if dice.random() < rate]
            faults += [Fault(kind, number, seconds=_late_s(dice), share=dice.random()) for number in hit]
        else:
            faults += [_timed(dice, kind, scenario) for _ in range(dice.choice(counts))]
    return replace(scenario, faults=tuple(faults))


def _late_s(dice):
    return dice.choice((0.0005, 0.005, 0.05, 0.5))


def _timed(dice, kind, scenario):
    """Near the life of some request: most are short."""
    number = dice.randrange(len(scenario.wishes))
    at = scenario.wishes[number].at + 10 ** dice.uniform(*NEAR_LOG_S)
    pair = (dice.choice(scenario.prefills()), dice.choice(scenario.decodes()))
    stream = (dice.choice(scenario.gateways), dice.choice((*scenario.prefills(), *scenario.decodes())))
    anybody = (dice.choice(scenario.processes()),)
    share = dice.random()
    match kind:
        case Kind.STALL_DATA:
            return Fault(kind, at, pair, dice.choice((0.01, 0.3, 2.0, 5.0)), share)
        case Kind.SEVER_DATA:
            return Fault(kind, at, pair, share=share)
        case Kind.SLOW_STREAM:
            return Fault(kind, at, stream, dice.choice((0.05, 0.5, 3.0)), share)
        case Kind.BREAK_STREAM:
            return Fault(kind, at, stream, share=share)
        case Kind.KILL:
            return Fault(kind, at, anybody, dice.choice((0.001, 0.05, 0.5, 6.0, 15.0)), share)
        case Kind.FREEZE:
            return Fault(kind, at, anybody, dice.choice((0.01, 0.2, 1.5, 3.5, 6.0, 12.0)), share)
        case Kind.DRAIN:
            worker = (dice.choice((*scenario.prefills(), *scenario.decodes())),)
            return Fault(kind, at, worker, dice.choice((0.3, 5.0, 5.0)), share)
        case Kind.SLOW:
            return Fault(kind, at, anybody, dice.choice((0.1, 1.0)), share)
    assert kind is Kind.CANCEL
    return Fault(kind, at, (str(number),), share=share)
