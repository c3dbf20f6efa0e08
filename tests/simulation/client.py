"""One client of a gateway: what it asks, what it is told, and whether that may be so.

Checks as it hears: the next positions of the right answer (I6, I7), one end (I8), in time.
"""

from gateway.request import Request, Sampling, Stop
from tests.simulation import oracle


class Client:
    """One request and what became of it. outcome: stop, length, enough, cancelled, broken (its gateway died), or
    the name of a service error."""

    def __init__(self, world, number, wish):
        self.number = number
        self.wish = wish
        self.tokens = []
        self.outcome = None
        self.detail = ""
        self.task = None
        self.gateway = None
        self.wire_id = None
        self.attempts = 0
        self.answer = oracle.answer_to(wish)
        self._world = world
        self._deadline = None

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
        )

    def take(self, batch):
        """I6, I7: the next positions of the right answer, and nothing after its end."""
        fail = self._world.fail
        if self.outcome is not None:
            fail("I8", f"request {self.number} is told more after {self.outcome}")
        for token in batch.tokens:
            if token.position != len(self.tokens):
                fail("I6", f"request {self.number} is told position {token.position} at {len(self.tokens)}")
            self.tokens.append(token.token_id)
        right = self.answer.tokens[: len(self.tokens)]
        if tuple(self.tokens) != right:
            fail("I7", f"request {self.number} is told {self.tokens}, not {right}")
        if batch.end is not None:
            self.end(batch.end.name.lower())

    def served(self, task):
        """The coroutine that serves it has ended."""
        if task.cancelled() and self.outcome is None:
            self.end("cancelled")

    def has_enough(self):
        return self.wish.enough is not None and len(self.tokens) >= self.wish.enough

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
        for role, workers in (("prefill", self.gateway.prefills), ("decode", self.gateway.decodes)):
            if self.detail.startswith(f"no {role} worker") and (
                workers.any_ready() or (role == "decode" and self.wish.max_tokens - len(self.tokens) == 1)
            ):
                self._world.fail("I8", f"request {self.number} ends without need: {self.detail}")

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
        if self.outcome in ("stop", "length"):
            if (tuple(self.tokens), self.outcome) != (self.answer.tokens, self.answer.end):
                fail("I7", f"request {self.number} ends {self.outcome} with {self.tokens}, not {self.answer}")
        elif self.outcome == "DeadlineExpired":
            if self._deadline is None or self.gateway.clock() < self._deadline - 0.01:
                fail("I8", f"request {self.number} is too late for a deadline of {self.wish.deadline_s} s")
        elif self.outcome == "Exhausted":
            if not self._world.scenario.may_refuse():
                fail("I8", f"request {self.number} is refused by a queue with room")
        elif self.outcome == "Unavailable":
            if not faults and not self._world.scenario.may_refuse():
                fail("I8", f"request {self.number} is not served: {self.detail}")
        elif self.outcome not in ("cancelled", "broken", "enough"):
            fail("I8", f"request {self.number} ends with {self.outcome}: {self.detail}")
