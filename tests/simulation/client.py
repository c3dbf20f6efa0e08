"""One client of a gateway: what it asks, what it is told, and whether that may be so.

Checks as it hears: of each choice the next positions of the right answer (I6, I7), one end (I8), in time.
"""

from dataclasses import dataclass, field

from crossdock.seeds import choice_seed
from gateway.admission import UNREACHABLE
from gateway.request import Request, Sampling, Stop
from tests.simulation import oracle


@dataclass
class Choice:
    """One answer: what it must be, and what was told of it. end: stop, length or enough."""

    answer: oracle.Answer
    tokens: list = field(default_factory=list)
    end: str | None = None


class Client:
    """One request and what became of it. outcome: how its last choice ended (stop, length or enough), cancelled,
    broken (its gateway died), or the name of a service error. wire_ids: its names between the processes."""

    def __init__(self, world, number, wish):
        self.number = number
        self.wish = wish
        self.outcome = None
        self.detail = ""
        self.task = None
        self.gateway = None
        self.wire_ids = {}
        self.unread = set()
        self.preemptions = 0
        self.choices = [Choice(answer) for answer in self._right()]
        self._world = world
        self._deadline = None

    @property
    def tokens(self):
        """Of the first choice."""
        return self.choices[0].tokens

    @property
    def attempts(self):
        return sum(self.wire_ids.values())

    def _right(self):
        """What each choice must be."""
        wish = self.wish
        ends = {"max_tokens": wish.max_tokens, "min_tokens": wish.min_tokens, "stop": wish.stop}
        if wish.beam is not None:
            return oracle.searched(wish.prompt, wish.beam, wish.n, **ends, penalties=wish.penalties)
        drawn = {"temperature": wish.temperature, "top_p": wish.top_p, "top_k": wish.top_k}
        drawn["penalties"] = wish.penalties
        seeds = [choice_seed(wish.seed, number) for number in range(wish.n)]
        return [oracle.answer(wish.prompt, seed=seed, **ends, **drawn) for seed in seeds]

    def request(self, now):
        wish = self.wish
        self._deadline = None if wish.deadline_s is None else now + wish.deadline_s
        return Request(
            id=str(self.number),
            model="hash",
            prompt_token_ids=wish.prompt,
            sampling=Sampling(
                temperature=wish.temperature,
                top_p=wish.top_p,
                top_k=wish.top_k,
                min_p=0.0,
                seed=wish.seed,
                logprobs=None,
                presence_penalty=wish.penalties.presence,
                frequency_penalty=wish.penalties.frequency,
                repetition_penalty=wish.penalties.repetition,
                logit_bias=wish.penalties.biases,
            ),
            stop=Stop(
                max_tokens=wish.max_tokens,
                min_tokens=wish.min_tokens,
                token_ids=wish.stop,
                strings=(),
                include_string=False,
            ),
            include_special_tokens=False,
            deadline=self._deadline,
            cache_salt=wish.salt,
            priority=wish.priority,
            n=wish.n,
            best_of=wish.n,
            beam=wish.beam,
        )

    def take(self, batch):
        """I6, I7: the next positions of the right answer, and nothing after its end."""
        fail, choice, name = self._world.fail, self.choices[batch.choice], f"{self.number}.{batch.choice}"
        if batch.choice in self.unread and choice.end == "enough":
            return  # what was under way
        if self.outcome is not None or choice.end is not None:
            fail("I8", f"request {name} is told more after {self.outcome or choice.end}")
        for token in batch.tokens:
            if token.position != len(choice.tokens):
                fail("I6", f"request {name} is told position {token.position} at {len(choice.tokens)}")
            choice.tokens.append(token.token_id)
        right = choice.answer.tokens[: len(choice.tokens)]
        if tuple(choice.tokens) != right:
            fail("I7", f"request {name} is told {choice.tokens}, not {right}")
        if batch.end is not None:
            choice.end = batch.end.name.lower()
        elif self.wish.enough is not None and len(choice.tokens) >= self.wish.enough:
            choice.end = "enough"
            self.unread.add(batch.choice)
        if all(each.end for each in self.choices):
            self.end(choice.end)

    def served(self, task):
        """The coroutine that serves it has ended."""
        if task.cancelled() and self.outcome is None:
            self.end("cancelled")

    def end(self, outcome, detail=""):
        if self.outcome == "broken":
            return
        if self.outcome is not None:
            self._world.fail("I8", f"request {self.number} ends {outcome} after {self.outcome}")
        self.outcome, self.detail = outcome, detail
        if self.detail.startswith("no "):
            self._check_refusal()
        self._check_punctual()
        self._world.ended(self)

    def _check_refusal(self):
        """Whoever says that nobody can serve this knows nobody who can."""
        decodes, prefills = self.gateway.decodes.serves(), self.gateway.prefills.serves()
        if decodes or (prefills and (self.detail.startswith("no prefill") or self._one_token_is_left())):
            self._world.fail("I8", f"request {self.number} ends without need: {self.detail}")

    def _one_token_is_left(self):
        wanted = [choice for choice in self.choices if choice.end is None]
        left = [self.wish.max_tokens - len(choice.tokens) for choice in wanted]
        return self.wish.beam is None and 1 in left

    def _check_punctual(self):
        """A deadline is kept, unless something happened to the gateway's own process."""
        if self._deadline is None or self.wish.pause_s:
            return
        late_s = self.gateway.clock() - self._deadline
        if late_s > 0.05 + 4 * self.gateway.lag_s and self._world.calm(1.0, self.gateway.name):
            self._world.fail("I12", f"request {self.number} ends {late_s:.3f} s after its deadline")

    def check_end(self):
        """The outcome is one that this request may have."""
        fail, faults = self._world.fail, self._world.scenario.faults
        if self.outcome in ("stop", "length", "enough"):
            for choice in self.choices:
                told, right = (tuple(choice.tokens), choice.end), choice.answer
                if choice.end != "enough" and told != (right.tokens, right.end):
                    fail("I7", f"request {self.number} ends with {told}, not {right}")
        elif self.outcome == "DeadlineExpired":
            if self._deadline is None or self.gateway.clock() < self._deadline - 0.01:
                fail("I8", f"request {self.number} is too late for a deadline of {self.wish.deadline_s} s")
        elif self.outcome == "Exhausted":
            early = self._deadline is not None and self.detail == UNREACHABLE
            self._world.counts["refused early"] += early
            if not early and not self._world.scenario.may_refuse():
                fail("I8", f"request {self.number} is refused by a queue with room")
        elif self.outcome in ("Unavailable", "AttemptsLost"):
            if not faults and not self._world.scenario.may_refuse():
                fail("I8", f"request {self.number} is not served: {self.detail}")
        elif self.outcome == "InvalidRequest":
            if self.wish.beam is None:
                fail("I8", f"request {self.number} is refused: {self.detail}")
        elif self.outcome not in ("cancelled", "broken"):
            fail("I8", f"request {self.number} ends with {self.outcome}: {self.detail}")
