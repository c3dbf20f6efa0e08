"""A device that records work, on the processor."""


class Tape:
    """Records as a device does: what was read and written then is read and written again, wherever it lay."""

    def __init__(self):
        self.recorded = self.replayed = 0

    def __call__(self, work):
        self.recorded += 1
        work()

        def replay():
            self.replayed += 1
            work()

        return replay
