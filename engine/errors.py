"""The errors the engine raises for faults of the world. Mistakes of our own are assertions.

EngineError
├── ModelError        the model's files are missing, unknown or broken
├── CapacityError     the device cannot hold what was asked for
├── NoCompiler        the CPU kernels cannot be built here
├── RankLost          another rank of this engine is gone, or does not answer
├── NonFiniteLogits   the model computed rows that cannot be sampled from
└── IllegalTransition an event that the current state does not allow; nothing has changed
"""


class EngineError(Exception):
    """Root of what the engine raises."""


class ModelError(EngineError):
    """The model's files are missing, unreadable, unknown or do not fit together. One line."""


class CapacityError(EngineError):
    """The device cannot hold what was asked for. One line with the sizes."""


class NonFiniteLogits(EngineError):
    """The largest logit of some rows is NaN or infinite. rows: their indices in the call, ascending."""

    def __init__(self, rows: tuple[int, ...]) -> None:
        super().__init__(f"non-finite logits in row {', '.join(map(str, rows))}")
        self.rows = rows


class RankLost(EngineError):
    """Another rank of this engine is gone, or does not answer in time: nothing can be computed any more. One line."""


class NoCompiler(EngineError):
    """No C++ compiler, or one that cannot build the CPU kernels. One line with what was tried."""


class IllegalTransition(EngineError):
    """An event that the current state does not allow. Raised before anything has changed."""
