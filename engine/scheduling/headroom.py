"""How much of what running sequences may still come to need is kept free when another one starts.

Most answers end long before their limit, so to keep all of it free wastes memory, and to keep nothing free makes
sequences be given up again and again. The share slides between the two: up when somebody was given up, and slowly down
while nobody is. A value; whoever has it asks for the next one after each step.
"""

from typing import NamedTuple

SHARE_MIN = 0.1
SHARE_AT_START = 0.4
RISE = 0.15
DECAY = 0.995


class Headroom(NamedTuple):
    """share: of the blocks that all sequences may still come to need, in [least, 1]."""

    share: float = SHARE_AT_START
    least: float = SHARE_MIN

    def after_step(self, preempted: int) -> "Headroom":
        """preempted: how many sequences the step gave up."""
        share = self.share + RISE * preempted if preempted else self.share * DECAY
        return Headroom(min(1.0, max(self.least, share)), self.least)
