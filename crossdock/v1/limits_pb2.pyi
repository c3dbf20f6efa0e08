from google.protobuf import descriptor_pb2 as _descriptor_pb2
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Measure(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MEASURE_UNSPECIFIED: _ClassVar[Measure]
    MEASURE_VOCAB_SIZE: _ClassVar[Measure]
    MEASURE_MAX_MODEL_LEN: _ClassVar[Measure]
    MEASURE_PROMPT_TOKENS: _ClassVar[Measure]
MEASURE_UNSPECIFIED: Measure
MEASURE_VOCAB_SIZE: Measure
MEASURE_MAX_MODEL_LEN: Measure
MEASURE_PROMPT_TOKENS: Measure
LIMITS_FIELD_NUMBER: _ClassVar[int]
limits: _descriptor.FieldDescriptor

class Limits(_message.Message):
    __slots__ = ("value", "key", "count", "bytes", "characters", "same_as")
    VALUE_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    CHARACTERS_FIELD_NUMBER: _ClassVar[int]
    SAME_AS_FIELD_NUMBER: _ClassVar[int]
    value: Range
    key: Range
    count: Range
    bytes: Range
    characters: Range
    same_as: str
    def __init__(self, value: _Optional[_Union[Range, _Mapping]] = ..., key: _Optional[_Union[Range, _Mapping]] = ..., count: _Optional[_Union[Range, _Mapping]] = ..., bytes: _Optional[_Union[Range, _Mapping]] = ..., characters: _Optional[_Union[Range, _Mapping]] = ..., same_as: _Optional[str] = ...) -> None: ...

class Range(_message.Message):
    __slots__ = ("low", "high", "above_low", "below_high", "times", "also", "unit")
    LOW_FIELD_NUMBER: _ClassVar[int]
    HIGH_FIELD_NUMBER: _ClassVar[int]
    ABOVE_LOW_FIELD_NUMBER: _ClassVar[int]
    BELOW_HIGH_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    ALSO_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    low: float
    high: float
    above_low: bool
    below_high: bool
    times: Measure
    also: float
    unit: str
    def __init__(self, low: _Optional[float] = ..., high: _Optional[float] = ..., above_low: _Optional[bool] = ..., below_high: _Optional[bool] = ..., times: _Optional[_Union[Measure, str]] = ..., also: _Optional[float] = ..., unit: _Optional[str] = ...) -> None: ...
