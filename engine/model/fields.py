"""Typed, range-checked reading of a model file's loose key-value metadata.

Used by the readers of model files. Knows no file format and no model; refuses to guess: a value of the wrong
type or out of range is a ModelError that names the key.
"""

import math
from collections.abc import Mapping, Sequence

from engine.errors import ModelError

INTEGER_MAX = 2**31 - 1


class Fields:
    """Read-only view of metadata. A key whose value is None counts as absent."""

    def __init__(self, values: Mapping[str, object], prefix: str = "") -> None:
        self._values = values
        self._prefix = prefix

    def has(self, key: str) -> bool:
        return self._values.get(key) is not None

    def names(self, key: str) -> bool:
        """Whether the key is there at all, even without a value."""
        return key in self._values

    def sections(self) -> tuple[str, ...]:
        """Keys of nested values."""
        return tuple(key for key, value in self._values.items() if isinstance(value, dict))

    def integer(self, key: str, default: int | None = None, low: int = 1) -> int:
        """In [low, 2^31). Raises ModelError, also when the key is absent and there is no default."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= INTEGER_MAX:
            raise ModelError(f"{self._prefix}{key} is {_shown(value)}, wanted an integer >= {low}")
        return value

    def optional_integer(self, key: str, low: int = 0) -> int | None:
        return self.integer(key, low=low) if self.has(key) else None

    def number(self, key: str, default: float | None = None) -> float:
        """Finite and above 0."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelError(f"{self._prefix}{key} is {_shown(value)}, wanted a number")
        if not (math.isfinite(value) and value > 0):
            raise ModelError(f"{self._prefix}{key} is {value}, wanted a finite number above 0")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise ModelError(f"{self._prefix}{key} is {_shown(value)}, wanted true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise ModelError(f"{self._prefix}{key} is {_shown(value)}, wanted text")
        return value

    def choice(self, key: str, served: Sequence[str], default: str | None = None) -> str:
        """One of the served texts, however it is cased."""
        value = self.text(key, default)
        if value.lower() not in served:
            raise ModelError(f"{self._prefix}{key} is {_shown(value)}; served are {', '.join(served)}")
        return value.lower()

    def texts(self, key: str) -> tuple[str, ...]:
        value = self._value(key, None)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ModelError(f"{self._prefix}{key} is {_shown(value)}, wanted a list of texts")
        return tuple(value)

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One id, or a list of ids; none when absent."""
        value = self._values.get(key)
        items = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in items):
            raise ModelError(f"{self._prefix}{key} is {_shown(value)}, wanted token ids")
        return tuple(items)

    def section(self, key: str) -> "Fields":
        """The nested values under a key; empty when absent."""
        value = self._values.get(key)
        if value is None:
            return Fields({}, f"{self._prefix}{key}.")
        if not isinstance(value, dict):
            raise ModelError(f"{self._prefix}{key} is {_shown(value)}, wanted a section")
        return Fields(value, f"{self._prefix}{key}.")

    def _value(self, key: str, default: object) -> object:
        value = self._values.get(key)
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"{self._prefix}{key} is missing")
        return value


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
