"""Typed reading of a JSON object's fields, with every mistake collected.

The OpenAI schemas read through it. null means absent, as clients send it. It checks types only; ranges are
validation's.
"""

from collections.abc import Collection, Mapping
from typing import TypeAlias

from service.errors import FieldViolation, InvalidRequest

JsonObject: TypeAlias = Mapping[str, object]

INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1
_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1


class JsonFields:
    """A wrong type reads as absent, and is reported by `refuse`."""

    def __init__(self, values: JsonObject, prefix: str = "") -> None:
        self._values = values
        self._prefix = prefix
        self._violations: list[FieldViolation] = []

    def refuse(self) -> None:
        """Raises InvalidRequest when any field was wrong."""
        if self._violations:
            raise InvalidRequest(*self._violations)

    def wrong(self, field: str, rule: str) -> None:
        self._violations.append(FieldViolation(field=self._prefix + field, description=rule))

    def take(self, other: "JsonFields") -> None:
        """Reports the mistakes of an inner object too."""
        self._violations.extend(other._violations)

    def raw(self, field: str) -> object:
        return self._values.get(field)

    def flag(self, field: str, *, default: bool = False) -> bool:
        value = self._values.get(field)
        if value is None or isinstance(value, bool):
            return default if value is None else value
        self.wrong(field, "must be true or false")
        return default

    def text(self, field: str) -> str | None:
        value = self._values.get(field)
        if value is None or isinstance(value, str):
            return value
        self.wrong(field, "must be a string")
        return None

    def number(self, field: str) -> float | None:
        value = self._values.get(field)
        if value is None or is_number(value):
            return None if value is None else float(value)  # type: ignore[arg-type]
        self.wrong(field, "must be a number")
        return None

    def integer(self, field: str, *, bits: int = 32) -> int | None:
        value = self._values.get(field)
        if value is None:
            return None
        low, high = (INT32_MIN, INT32_MAX) if bits == 32 else (_INT64_MIN, _INT64_MAX)
        if not is_integer(value) or not low <= value <= high:  # type: ignore[operator]
            self.wrong(field, f"must be an integer of {bits} bits")
            return None
        return int(value)  # type: ignore[call-overload,no-any-return]

    def texts(self, field: str) -> list[str]:
        """A string alone is a list of one."""
        value = self._values.get(field)
        items = value if isinstance(value, list) else [] if value is None else [value]
        if all(isinstance(item, str) for item in items):
            return items
        self.wrong(field, "must be a string or a list of strings")
        return []

    def ids(self, field: str) -> list[int]:
        value = self._values.get(field)
        if value is None:
            return []
        if is_ids(value):
            return value  # type: ignore[return-value]
        self.wrong(field, "must be a list of token ids")
        return []

    def object(self, field: str) -> JsonObject:
        value = self._values.get(field)
        if value is None or isinstance(value, dict):
            return value or {}
        self.wrong(field, "must be an object")
        return {}

    def objects(self, field: str) -> list[JsonObject]:
        value = self._values.get(field)
        if isinstance(value, list) and all(isinstance(item, dict) for item in value):
            return value
        if value is not None:
            self.wrong(field, "must be a list of objects")
        return []

    def neutral_only(self, field: str, neutral: Collection[object]) -> None:
        """For what is known but not offered: any other value is a mistake."""
        value = self._values.get(field)
        if value is not None and value not in neutral:
            self.wrong(field, "is not supported")
