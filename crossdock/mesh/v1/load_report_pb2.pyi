import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class OrcaLoadReport(_message.Message):
    __slots__ = ("utilization", "rps_fractional", "eps", "named_metrics", "application_utilization")
    class UtilizationEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class NamedMetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    UTILIZATION_FIELD_NUMBER: _ClassVar[int]
    RPS_FRACTIONAL_FIELD_NUMBER: _ClassVar[int]
    EPS_FIELD_NUMBER: _ClassVar[int]
    NAMED_METRICS_FIELD_NUMBER: _ClassVar[int]
    APPLICATION_UTILIZATION_FIELD_NUMBER: _ClassVar[int]
    utilization: _containers.ScalarMap[str, float]
    rps_fractional: float
    eps: float
    named_metrics: _containers.ScalarMap[str, float]
    application_utilization: float
    def __init__(self, utilization: _Optional[_Mapping[str, float]] = ..., rps_fractional: _Optional[float] = ..., eps: _Optional[float] = ..., named_metrics: _Optional[_Mapping[str, float]] = ..., application_utilization: _Optional[float] = ...) -> None: ...

class OrcaLoadReportRequest(_message.Message):
    __slots__ = ("report_interval",)
    REPORT_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    report_interval: _duration_pb2.Duration
    def __init__(self, report_interval: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...
