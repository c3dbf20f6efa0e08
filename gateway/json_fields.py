"""Typed reading of a JSON object's fields, with every mistake collected.

The OpenAI schemas read through it. null means absent, as clients send it. It checks types only; ranges are
validation's.
"""

from collections.abc import Collection, Mapping
from typing import TypeAlias, TypeGuard

from service.errors import FieldViolation, InvalidRequest

JsonObject: TypeAlias = Mapping[str, object]

_UINT32_MAX = 2**32 - 1


class JsonFields:
    """A field of the wrong type reads as absent, and is reported by `refuse`. written: by which of its names a field of
    the message was given, where it has several."""

    def __init__(self, values: JsonObject) -> None:
        self.written: dict[str, str] = {}
        self._values = values
        self._violations: list[FieldViolation] = []

    def refuse(self) -> None:
        """Raises InvalidRequest when any field was wrong."""
        if self._violations:
            raise InvalidRequest(*self._violations)

    def wrong(self, field: str, rule: str) -> None:
        self._violations.append(FieldViolation(field=field, description=rule))

    def take(self, prefix: str, inner: "JsonFields") -> None:
        """Reports the mistakes of an inner object too, under its place."""
        for violation in inner._violations:
            self.wrong(prefix + violation.field, violation.description)

    def raw(self, field: str) -> object:
        return self._values.get(field)

    def flag(self, field: str, *, default: bool = False) -> bool:
        value = self._values.get(field)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.wrong(field, "must be true or false")
            return default
        return value

    def text(self, field: str) -> str | None:
        value = self._values.get(field)
        if value is None or isinstance(value, str):
            return value
        self.wrong(field, "must be a string")
        return None

    def number(self, field: str) -> float | None:
        value = self._values.get(field)
        if value is None or isinstance(value, float):
            return value
        if is_integer(value, bits=64):
            return float(value)
        self.wrong(field, "must be a number")
        return None

    def integer(self, field: str, *, bits: int = 32) -> int | None:
        value = self._values.get(field)
        if value is None or is_integer(value, bits=bits):
            return value
        self.wrong(field, f"must be a whole number of {bits} bits")
        return None

    def texts(self, field: str) -> list[str]:
        """A string alone is a list of one."""
        value = self._values.get(field)
        if value is None:
            return []
        if isinstance(value, str):
            return [value]
        if is_texts(value):
            return value
        self.wrong(field, "must be a string or a list of strings")
        return []

    def ids(self, field: str) -> list[int]:
        value = self._values.get(field)
        if value is None or is_ids(value):
            return value or []
        self.wrong(field, "must be a list of token ids, whole numbers from 0")
        return []

    def numbers_by_id(self, field: str) -> dict[int, float]:
        """An object; its names are token ids in decimal digits."""
        value, numbers = JsonFields(self.mapping(field)), {}
        for name in value._values:
            number = value.number(name)
            if number is None or not _is_id(name):
                self.wrong(field, "must be numbers by token id, a whole number from 0 in quotes")
                return {}
            numbers[int(name)] = number
        return numbers

    def mapping(self, field: str) -> JsonObject:
        value = self._values.get(field)
        if value is None or isinstance(value, dict):
            return value or {}
        self.wrong(field, "must be an object")
        return {}

    def mappings(self, field: str) -> list[JsonObject]:
        value = self._values.get(field)
        if value is None:
            return []
        if isinstance(value, list) and all(isinstance(item, dict) for item in value):
            return value
        self.wrong(field, "must be a list of objects")
        return []

    def neutral_only(self, field: str, neutral: Collection[object]) -> None:
        """For what is known but not offered: any other value than these is a mistake."""
        value = self._values.get(field)
        if value is not None and value not in neutral:
            self.wrong(field, "is not supported")


def is_integer(value: object, *, bits: int) -> TypeGuard[int]:
    """true and false are no numbers."""
    return (
        isinstance(value, int) and not isinstance(value, bool) and -(1 << bits - 1) <= value < 1 << bits - 1
    )


def is_texts(value: object) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def is_ids(value: object) -> TypeGuard[list[int]]:
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        return False
    return not value or (min(value) >= 0 and max(value) <= _UINT32_MAX)


def _is_id(name: str) -> bool:
    """One way to write each id, so that none can be there twice."""
    few = len(name) <= len(str(_UINT32_MAX)) and name.isascii() and name.isdecimal()
    return few and int(name) <= _UINT32_MAX and str(int(name)) == name
