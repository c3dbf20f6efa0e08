"""What each field of a request may hold: one table, read once from what the contracts say beside their fields
(protos/crossdock/v1/limits.proto), by which gateways and workers check every message.

Pure. Rules between fields are not here: whoever accepts a message knows them.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from crossdock.v1 import inference_pb2, limits_pb2
from service.errors import Excess, FieldViolation

_LIMITS: Any = limits_pb2.limits
_UNSIGNED = (FieldDescriptor.CPPTYPE_UINT32, FieldDescriptor.CPPTYPE_UINT64)
_TEXT = FieldDescriptor.CPPTYPE_STRING  # bytes too


@dataclass(frozen=True, slots=True, kw_only=True)
class Measures:
    """What bounds are multiples of, by their names in limits.proto."""

    vocab_size: int
    max_model_len: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """As in limits.proto; a bound that is not given is infinite. times: the name of a measure, empty for none. unit: of
    a length, the word for one."""

    low: float
    high: float
    above_low: bool
    below_high: bool
    times: str
    also: float | None
    unit: str

    def most(self, measures: Measures | None = None) -> int:
        """measures: may be None where high is no multiple."""
        return int(self._high(measures))

    def admits(self, number: float, measures: Measures) -> bool:
        """Never NaN."""
        high = self._high(measures)
        within = self.low <= number <= high
        if within and (self.above_low or self.below_high):
            within = not ((self.above_low and number == self.low) or (self.below_high and number == high))
        return within or number == self.also

    def words(self, measures: Measures) -> str:
        """Where a number must be."""
        low, high = _plain(self.low), _plain(self._high(measures))
        if high == math.inf:
            return f"at least {low}"
        also = "" if self.also is None else f", or {_plain(self.also)}"
        return f"in {'(' if self.above_low else '['}{low}, {high}{')' if self.below_high else ']'}{also}"

    def violations(
        self, field: str, length: int, measures: Measures | None = None
    ) -> Sequence[FieldViolation]:
        """Of a field that has such a length: at most one."""
        high, excess = self._high(measures), None
        if self.low <= length <= high:
            return ()
        if length < self.low and (self.times or high == math.inf):
            rule = f"at least one {self.unit}"
        elif self.low > 0 and not self.times:
            rule = f"{self.low:.0f} to {high:.0f} {self.unit}s"
        else:
            rule = f"at most {high:.0f} {self.unit}s"
        if length > high and self.times:
            excess = Excess(most=int(high), got=length, unit=self.unit)
            rule += f" for at most {high / self.high:.0f} tokens" if self.high != 1 else ""
            rule += f"; {length} were given"
        return (FieldViolation(field=field, description=rule, excess=excess),)

    def _high(self, measures: Measures | None) -> float:
        return self.high * getattr(measures, self.times) if self.times else self.high


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of one field, as in limits.proto; None for none."""

    value: Range | None
    key: Range | None
    count: Range | None
    bytes: Range | None
    characters: Range | None


def violations(message: Message, measures: Measures) -> list[FieldViolation]:
    """Every range that is broken, by number of field. Where there are too many of something, none is looked at."""
    return _walk(message, "", measures)


def range_of(message: type[Message], field: str, kind: str) -> Range:
    """What the contracts say of one field. kind: as in Limits."""
    found = getattr(_limits(message.DESCRIPTOR.fields_by_name[field]), kind)
    assert isinstance(found, Range), f"{field} has no range of {kind}"
    return found


_Look = Callable[[Limits, Any, str, Measures], Sequence[FieldViolation]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """Of the table. optional: the field may be absent. look: finds what is wrong with what it holds."""

    name: str
    optional: bool
    limits: Limits
    look: _Look


def _walk(message: Message, path: str, measures: Measures) -> list[FieldViolation]:
    broken: list[FieldViolation] = []
    for row in _rows(message.DESCRIPTOR):
        if not row.optional or message.HasField(row.name):
            broken += row.look(row.limits, getattr(message, row.name), path + row.name, measures)
    return broken


@cache
def _rows(message: Descriptor) -> tuple[_Row, ...]:
    """The table, of one message: its fields that have limits, or that hold messages."""
    return tuple(
        _Row(name=field.name, optional=field.has_presence, limits=limits, look=_look(field))
        for field in message.fields
        for limits in [_limits(field)]
        if limits != _NONE or field.message_type is not None
    )


def _look(field: FieldDescriptor) -> _Look:
    if not field.is_repeated:
        return _message if field.message_type is not None else _text if field.cpp_type == _TEXT else _number
    if field.message_type is not None:
        return _counted(_map if field.message_type.GetOptions().map_entry else _each(_message))
    if field.cpp_type == _TEXT:
        return _counted(_each(_text))
    assert field.cpp_type in _UNSIGNED, field.full_name
    return _counted(_unsigned)


def _number(limits: Limits, held: float, field: str, measures: Measures) -> Sequence[FieldViolation]:
    if limits.value is None or limits.value.admits(held, measures):
        return ()
    return (FieldViolation(field=field, description=f"must be {limits.value.words(measures)}"),)


def _text(limits: Limits, held: str | bytes, field: str, measures: Measures) -> Sequence[FieldViolation]:
    broken = limits.characters.violations(field, len(held), measures) if limits.characters else ()
    if broken or limits.bytes is None:
        return broken
    return limits.bytes.violations(field, len(held.encode() if isinstance(held, str) else held), measures)


def _message(_: Limits, held: Message, field: str, measures: Measures) -> Sequence[FieldViolation]:
    return _walk(held, f"{field}.", measures)


def _unsigned(limits: Limits, held: Any, field: str, measures: Measures) -> Sequence[FieldViolation]:
    """Numbers that no range begins above: of what can be a long prompt, only the largest is compared."""
    if limits.value is None or not held or limits.value.admits(max(held), measures):
        return ()
    return (FieldViolation(field=field, description=f"each must be {limits.value.words(measures)}"),)


def _map(limits: Limits, held: Any, field: str, measures: Measures) -> Sequence[FieldViolation]:
    parts = (("key", limits.key, held), ("value", limits.value, held.values()))
    return [
        FieldViolation(field=field, description=f"each {part} must be {limit.words(measures)}")
        for part, limit, numbers in parts
        if limit is not None and not all(limit.admits(each, measures) for each in numbers)
    ]


def _each(look: _Look) -> _Look:
    def look_at_each(limits: Limits, held: Any, field: str, measures: Measures) -> Sequence[FieldViolation]:
        each = enumerate(held)
        return [wrong for at, one in each for wrong in look(limits, one, f"{field}[{at}]", measures)]

    return look_at_each


def _counted(look: _Look) -> _Look:
    def count_and_look(limits: Limits, held: Any, field: str, measures: Measures) -> Sequence[FieldViolation]:
        wrong = limits.count.violations(field, len(held), measures) if limits.count else ()
        return wrong or look(limits, held, field, measures)

    return count_and_look


@cache
def _limits(field: FieldDescriptor) -> Limits:
    said: limits_pb2.Limits = field.GetOptions().Extensions[_LIMITS]
    if said.same_as:
        return _limits(inference_pb2.DESCRIPTOR.pool.FindFieldByName(said.same_as))
    return Limits(
        value=_range(said, "value"),
        key=_range(said, "key"),
        count=_range(said, "count"),
        bytes=_range(said, "bytes", unit="byte"),
        characters=_range(said, "characters", unit="character"),
    )


def _range(said: limits_pb2.Limits, kind: str, unit: str = "") -> Range | None:
    if not said.HasField(kind):
        return None
    told = getattr(said, kind)
    return Range(
        low=told.low if told.HasField("low") else -math.inf,
        high=told.high if told.HasField("high") else math.inf,
        above_low=told.above_low,
        below_high=told.below_high,
        times=limits_pb2.Measure.Name(told.times).removeprefix("MEASURE_").lower() if told.times else "",
        also=told.also if told.HasField("also") else None,
        unit=unit or told.unit,
    )


def _plain(number: float) -> int | float:
    return int(number) if number.is_integer() else number


_NONE = Limits(value=None, key=None, count=None, bytes=None, characters=None)
