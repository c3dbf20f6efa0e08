"""What the contracts declare of their fields, read from the descriptors, and values on both sides of each border."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from google.protobuf.descriptor import FieldDescriptor as Field

from crossdock.v1 import inference_pb2, limits_pb2

FLOATS = (Field.TYPE_DOUBLE, Field.TYPE_FLOAT)
UNSIGNED = (Field.TYPE_UINT32, Field.TYPE_UINT64)
BOUNDLESS = (Field.TYPE_BOOL, Field.TYPE_ENUM, Field.TYPE_MESSAGE)


class Border(NamedTuple):
    """path: of a field, from the outermost message. number: of such a kind. value: what the field holds then. inside:
    whether that is within."""

    path: str
    kind: str
    number: float
    value: object
    inside: bool

    def __str__(self):
        return f"{self.path}-{self.kind}-{self.number}"


def fields(message, path="") -> Iterator[tuple[str, Field]]:
    """All fields that are in such a message, however deep."""
    for field in message.fields:
        yield path + field.name, field
        if field.message_type is not None and not is_map(field):
            yield from fields(field.message_type, f"{path}{field.name}.")


def is_map(field):
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def needs_limits(field):
    """Whether it holds a number, or has a length."""
    return field.is_repeated or field.type not in BOUNDLESS


def declared(field) -> limits_pb2.Limits:
    said = field.GetOptions().Extensions[limits_pb2.limits]
    return declared(inference_pb2.DESCRIPTOR.pool.FindFieldByName(said.same_as)) if said.same_as else said


def borders(message, measures) -> list[Border]:
    """measures: by their names in limits.proto, without the prefix."""
    return [
        Border(path, kind.name, number, _holding(field, kind.name, number), inside)
        for path, field in fields(message)
        for kind, bounds in declared(field).ListFields()
        for number, inside in _both_sides(bounds, _numbers(field, kind.name), measures)
        if inside or not (bounds.HasField("also") and number == bounds.also)
    ]


def put(message, path, value):
    """Sets a field however deep; of a list on the way there, in its only entry."""
    *way, name = path.split(".")
    for step in way:
        message = getattr(message, step)
        if hasattr(message, "add"):
            message = message[0] if message else message.add()
    message.ClearField(name)
    message.SetInParent()
    if isinstance(value, dict):
        getattr(message, name).update(value)
    elif isinstance(value, list):
        getattr(message, name).extend(value)
    else:
        setattr(message, name, value)


def _numbers(field, kind):
    """The type of what is compared: of the field, of a map's keys or values; lengths are unsigned."""
    if kind in ("count", "bytes", "characters"):
        return Field.TYPE_UINT32
    return field.message_type.fields_by_name[kind].type if is_map(field) else field.type


def _both_sides(bounds, type_, measures) -> Iterator[tuple[float, bool]]:
    times = measures[limits_pb2.Measure.Name(bounds.times).removeprefix("MEASURE_")] if bounds.times else 1
    if bounds.HasField("low"):
        yield from _around(bounds.low, -math.inf, bounds.above_low, type_)
    if bounds.HasField("high"):
        yield from _around(bounds.high * times, math.inf, bounds.below_high, type_)
    if bounds.HasField("also"):
        yield int(bounds.also), True
    if type_ in FLOATS:
        yield from ((each, False) for each in (math.nan, math.inf, -math.inf))


def _around(bound, outwards, is_open, type_):
    further, nearer = _next(bound, outwards, type_), _next(bound, -outwards, type_)
    inner, outer = (nearer, bound) if is_open else (bound, further)
    for number, inside in ((inner, True), (outer, False)):
        if number >= 0 or type_ not in UNSIGNED:
            yield (number if type_ in FLOATS else int(number)), inside


def _next(number, towards, type_):
    if type_ == Field.TYPE_DOUBLE:
        return math.nextafter(number, towards)
    if type_ == Field.TYPE_FLOAT:
        return float(np.nextafter(np.float32(number), np.float32(towards)))
    return number + math.copysign(1, towards)


def _holding(field, kind, number):
    """What a field holds that has this number there; of several, beside one that is fine."""
    if kind in ("bytes", "characters"):
        text = b"x" * number if field.type == Field.TYPE_BYTES else "x" * number
        return ["x", text] if field.is_repeated else text
    if is_map(field):
        if kind == "count":
            return dict.fromkeys(range(number), 1)
        return {number: 1, 5: 1} if kind == "key" else {4: number, 5: 1}
    if kind == "count":
        return [_one_of(field, index) for index in range(number)]
    return [number, 1] if field.is_repeated else number


def _one_of(field, index):
    if field.message_type is None:
        return "x" if field.type == Field.TYPE_STRING else 1
    made = field.message_type._concrete_class()
    for inner in made.DESCRIPTOR.fields:
        if inner.name in ("index", "role"):
            setattr(made, inner.name, index if inner.name == "index" else "user")
    return made
