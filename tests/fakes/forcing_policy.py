"""A decode policy that also gives sequences up where a test wants it."""

from engine.policy import Plan


class Forcing:
    """As the policy, except that a sequence that has so many tokens is given up; each length once. Counts tokens
    in the core that it is set to watch."""

    def __init__(self, policy, *lengths):
        self._policy, self._lengths = policy, list(lengths)
        self.seats, self.grant = policy.seats, policy.grant

    def watch(self, owner):
        """owner: of the core that runs under this policy, as its `core`."""
        self._owner = owner
        return self

    def plan(self, view, now):
        plan = self._policy.plan(view, now)
        forced = [one for one in view.running if one.uncomputed == 1 and self._length(one) in self._lengths]
        for one in forced:
            self._lengths.remove(self._length(one))
        given_up = tuple(one.id for one in forced)
        work = tuple(each for each in plan.work if each.id not in given_up)
        return Plan(work=work, preempt=(*plan.preempt, *given_up))

    def _length(self, one):
        return len(self._owner.core._running[one.id].tokens)
