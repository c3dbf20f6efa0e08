"""The errors the engine raises for faults of the world. Mistakes of our own are assertions.

EngineError
├── ModelError        the model's files are missing, unknown or broken
├── CapacityError     the device cannot hold what was asked for
└── IllegalTransition an event that the current state does not allow; nothing has changed
"""


class EngineError(Exception):
    """Root of what the engine raises."""


class ModelError(EngineError):
    """The model's files are missing, unreadable, unknown or do not fit together. One line, for the operator."""


class CapacityError(EngineError):
    """The device cannot hold what was asked for. One line with the sizes."""


class IllegalTransition(EngineError):
    """An event that the current state does not allow. Raised before anything has changed."""
