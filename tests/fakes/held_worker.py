"""A worker whose step thread can be held: `python -m tests.fakes.held_worker VERB FLAGS`. Every line on its standard
input holds it where it waits for its inbox, or lets it go; all other threads go on."""

import sys
import threading

from commands import main, worker
from service.pulse import Pulse


class _HeldPulse(Pulse):
    def __init__(self, insist, *rest):
        super().__init__(insist, *rest)
        threading.Thread(target=_hold_by_lines, args=(insist,), daemon=True).start()


def _hold_by_lines(insist):
    for _ in sys.stdin:
        go = threading.Event()
        insist(go.wait)
        sys.stdin.readline()
        go.set()


if __name__ == "__main__":
    worker.Pulse = _HeldPulse
    sys.exit(main.main(sys.argv[1:]))
