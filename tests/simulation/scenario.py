"""From a seed to everything that a history is made of, except the order of its events."""

import random
from dataclasses import dataclass, replace

from service.orders import Beam
from tests.fakes.hash_model import VOCAB
from tests.simulation import oracle
from tests.simulation.faults import Fault, Kind, draw_faults

KEY = b"0123456789abcdef0123456789abcdef"
BLOCK = 4
AMPLE = (1000,) * 9
STARTED_S = 0.5
"""By now every gateway has found every worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What one client asks. deadline_s: from its start, on the gateway's clock. pause_s: how long it chews on each
    batch. enough: tokens after which it wants no more, as after a stop string. salt: whose cache it uses. priority:
    lower goes first. n: choices; what ends one of them ends no other. beam: they are the best of a search."""

    gateway: str
    at: float
    prompt: tuple[int, ...]
    max_tokens: int
    min_tokens: int = 0
    stop: frozenset[int] = frozenset()
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    deadline_s: float | None = None
    pause_s: float = 0.0
    enough: int | None = None
    salt: str = ""
    priority: int = 0
    n: int = 1
    beam: Beam | None = None
    penalties: oracle.Penalties = oracle.NO_PENALTIES

    def tokens(self):
        return len(self.prompt) + self.max_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """blocks: of each worker, by name. rates: how fast each process's clock goes. lags_s: how long each process's
    threads take to wake up. absent: numbers of the wishes that nobody has after all. remembered_max:
    ended transfers that a target remembers. run_blocks: in one message, at most. cache_messages_max: waiting on a
    stream that is told what is cached. swap_blocks: of host memory of each decode worker. headroom: least share of
    their growth that these keep free. ahead: whether engines begin a step before what the last one drew is read.
    staged_blocks: blocks are on a device, and so many of them are copied at once; 0 where they are in host memory.
    pace_s: what engines believe that a step that generates and a token of a prompt
    take, zeroes for nothing."""

    seed: int
    blocks: dict[str, int]
    gateways: tuple[str, ...]
    rates: dict[str, float]
    lags_s: dict[str, float]
    wishes: tuple[Wish, ...]
    faults: tuple[Fault, ...] = ()
    absent: frozenset[int] = frozenset()
    budget_tokens: int = 7
    seats: int = 8
    queue_requests_max: int = 100
    inbox_actions_max: int = 65_536
    transfers_max: int = 1024
    remembered_max: int = 1024
    swap_blocks: int = 0
    headroom: float = 0.1
    ahead: bool = False
    staged_blocks: int = 0
    pace_s: tuple[float, float] = (0.0, 0.0)
    window_blocks: int = 64
    run_blocks: int = 2
    cache_messages_max: int = 64
    capacity_packets: int = 16
    lease_ms: int = 1000
    connect_ms: int = 300
    data_latency_s: float = 0.0002
    stream_latency_s: float = 0.0003

    def may_refuse(self):
        """Whether a queue can be full."""
        return min(self.queue_requests_max, self.inbox_actions_max, self.transfers_max) < self.choices()

    def choices(self):
        """Answers in all: after a loss each goes its own way."""
        return sum(wish.n for wish in self.wishes)

    def prefills(self):
        return tuple(name for name in self.blocks if name.startswith("p"))

    def decodes(self):
        return tuple(name for name in self.blocks if name.startswith("d"))

    def processes(self):
        return (*self.blocks, *self.gateways)


def quiet(wishes, *, prefills=1, decodes=1, blocks=64, seed=0, **changes):
    """A scenario without faults, skew or haste, for a scene that a test sets itself."""
    names = [*(f"p{n}" for n in range(prefills)), *(f"d{n}" for n in range(decodes))]
    everybody = [*names, "g0"]
    return Scenario(
        seed=seed,
        blocks=dict.fromkeys(names, blocks),
        gateways=("g0",),
        rates=dict.fromkeys(everybody, 1.0),
        lags_s=dict.fromkeys(everybody, 0.0002),
        wishes=tuple(wishes),
        **changes,
    )


def draw(seed, kinds=None):
    """The scenario of a seed. kinds: of faults, None for some drawn ones."""
    dice = random.Random(f"scenario {seed}")
    gateways = tuple(f"g{n}" for n in range(dice.choice((1, 1, 2))))
    names = [f"{role}{n}" for role in "pd" for n in range(dice.choice((1, 1, 2, 2, 3)))]
    spread_s = dice.choice((0.0, 0.02, 0.2, 2.0))
    openings = [_tokens(dice, dice.randint(4, 24)) for _ in range(dice.choice((0, 1, 1, 2)))]
    wishes = [_wish(dice, dice.choice(gateways), spread_s, openings) for _ in range(dice.randint(3, 8))]
    wishes = _penalised(seed, wishes)
    wishes = (*wishes, *_next_turns(dice, wishes))
    everybody = (*names, *gateways)
    skewed, slow = dice.random() < 0.5, dice.random() < 0.4
    capacity, latency_s = dice.choice((1, 2, 4, 16)), dice.choice((0.00002, 0.0002, 0.002, 0.02))
    hasty = not slow and capacity >= 4 and latency_s < 0.02
    scenario = Scenario(
        seed=seed,
        blocks={name: _blocks(dice, wishes) for name in names},
        gateways=gateways,
        rates={name: dice.uniform(0.9, 1.1) if skewed else 1.0 for name in everybody},
        lags_s={name: _lag_s(dice, slow) for name in everybody},
        wishes=wishes,
        budget_tokens=dice.choice((1, 2, 3, 5, 7, 16, 64)),
        seats=dice.choice((1, 2, 4, 8, 8)),
        queue_requests_max=dice.choice((2, *AMPLE)),
        inbox_actions_max=dice.choice((2, *AMPLE)),
        transfers_max=dice.choice((2, *AMPLE)),
        remembered_max=dice.choice((1, *AMPLE)),
        window_blocks=dice.choice((1, 2, 3, 64)),
        cache_messages_max=dice.choice((1, 1, 64)),
        capacity_packets=capacity,
        # Shorter than a few round trips, with signs of life that find no room, none can be kept.
        lease_ms=dice.choice((300, 1000) if hasty else (1000, 3000)),
        connect_ms=dice.choice((300, 1000)),
        data_latency_s=latency_s,
        stream_latency_s=dice.choice((0.0001, 0.0003, 0.003, 0.03)),
    )
    scenario = replace(draw_faults(dice, _squeezed(scenario), kinds), run_blocks=dice.choice((1, 2, 3, 64)))
    return _left_alone(scenario) if kinds is None else scenario


def _left_alone(scenario):
    """Now and then decode workers compute prompts too: all, or short ones, as far as steps are measured to be long;
    and all of them while every prefill worker is dead."""
    dice = random.Random(f"alone {scenario.seed}")
    scenario = replace(scenario, pace_s=dice.choice((*(4 * ((0.0, 0.0),)), (0.02, 0.002), (0.02, 1e-5))))
    if dice.random() < 0.8:
        return scenario
    at = dice.choice(scenario.wishes).at + dice.choice((-0.1, 0.0, 0.002, 0.02))
    seconds = dice.choice((0.05, 2.0, 15.0))
    dead = tuple(Fault(Kind.KILL, at, (name,), seconds, 0.5) for name in scenario.prefills())
    return replace(scenario, faults=(*scenario.faults, *dead))


def _squeezed(scenario):
    """Now and then all ask at once for more than fits, and steps take long enough for them to meet in one."""
    dice = random.Random(f"memory {scenario.seed}")
    scenario = replace(
        scenario,
        swap_blocks=dice.choice((0, 0, 2, 5, 64)),
        headroom=dice.choice((0.0, 0.0, 0.1)),
        ahead=random.Random(f"ahead {scenario.seed}").random() < 0.4,
        staged_blocks=random.Random(f"staged {scenario.seed}").choice((0, 0, 0, 1, 3)),
    )
    if dice.random() < 0.7:
        return scenario
    wishes = tuple(
        replace(
            wish,
            at=STARTED_S + dice.random() * 0.01,
            max_tokens=wish.max_tokens + dice.randint(8, 40),
            priority=dice.choice((0, 0, 0, -1, 3)),
        )
        for wish in scenario.wishes
    )
    blocks = {name: _blocks(dice, wishes) for name in scenario.blocks}
    slower = {name: max(scenario.lags_s[name], 0.003) for name in scenario.decodes()}
    return replace(scenario, wishes=wishes, blocks=blocks, lags_s=scenario.lags_s | slower, seats=8)


def _wish(dice, gateway, spread_s, openings):
    """openings: what several prompts begin with, as with a system prompt."""
    prompt = _tokens(dice, dice.choice((1, 3, 4, 5, dice.randint(1, 30))))
    if openings and dice.random() < 0.7:
        prompt = dice.choice(openings) + prompt[: dice.choice((1, 4, 30))]
    max_tokens = dice.choice((1, 2, dice.randint(1, 14), dice.randint(1, 14)))
    stops = frozenset(dice.sample(range(VOCAB), 12)) if dice.random() < 0.25 else frozenset()
    sampled = dice.random() < 0.4
    return Wish(
        gateway=gateway,
        at=STARTED_S + dice.random() * spread_s,
        prompt=prompt,
        max_tokens=max_tokens,
        min_tokens=dice.randint(0, max_tokens) if stops else 0,
        stop=stops,
        temperature=dice.choice((0.3, 1.0)) if sampled else 0.0,
        top_p=dice.choice((0.7, 1.0)) if sampled else 1.0,
        top_k=dice.choice((0, 2)) if sampled else 0,
        seed=dice.getrandbits(62) if sampled else 0,
        deadline_s=dice.choice((0.02, 0.2, 1.0, 8.0)) if dice.random() < 0.15 else None,
        pause_s=dice.choice((0.001, 0.05, 0.4)) if dice.random() < 0.15 else 0.0,
        enough=dice.randint(1, max_tokens) if dice.random() < 0.15 else None,
        salt=dice.choice(("", "", "other")),
        n=dice.choice((1, 1, 1, 1, 2, 3)),
        beam=Beam(width=3, early_stopping=dice.random() < 0.5) if dice.random() < 0.07 else None,
    )


def _penalised(seed, wishes):
    """Some with penalties and biases, which look at what the prompt and the answer had so far."""
    dice = random.Random(f"penalties {seed}")
    return [replace(wish, penalties=_penalties(dice)) if dice.random() < 0.35 else wish for wish in wishes]


def _penalties(dice):
    return oracle.Penalties(
        presence=dice.choice((0.0, 0.0, 2.0, -1.5)),
        frequency=dice.choice((0.0, 0.0, 1.3, -0.7)),
        repetition=dice.choice((1.0, 1.9, 0.4)),
        biases=tuple(
            (token, dice.choice((-100.0, 3.5, 1.2))) for token in sorted(dice.sample(range(VOCAB), 4))
        )
        if dice.random() < 0.5
        else (),
    )


def _next_turns(dice, wishes):
    """Conversations go on: what was asked, the right answer and more, a while later."""
    turns = []
    for _ in range(dice.choice((0, 1, 2, 4))):
        before = dice.choice([*wishes, *turns])
        prompt = (*before.prompt, *oracle.answer_to(before).tokens, *_tokens(dice, dice.randint(1, 6)))
        pause_s = dice.choice((0.02, 0.1, 0.5))
        turns.append(
            replace(before, at=before.at + pause_s, prompt=prompt, seed=before.seed + 1, deadline_s=None)
        )
    return turns


def _tokens(dice, count):
    return tuple(dice.randrange(VOCAB) for _ in range(count))


def _blocks(dice, wishes):
    """From just enough for the largest request up to ample."""
    largest = max(-(-wish.tokens() // BLOCK) for wish in wishes)
    return int(largest * dice.choice((1, 1.5, 1.5, 2, 3, 6)))


def _lag_s(dice, slow):
    return dice.choice((0.00005, 0.0002, 0.005, 0.03)) if slow else 0.0001
