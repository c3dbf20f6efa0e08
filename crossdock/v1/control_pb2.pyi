from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_ROLE_UNSPECIFIED: _ClassVar[WorkerRole]
    WORKER_ROLE_PREFILL: _ClassVar[WorkerRole]
    WORKER_ROLE_DECODE: _ClassVar[WorkerRole]

class WorkerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_STATE_UNSPECIFIED: _ClassVar[WorkerState]
    WORKER_STATE_CONNECTING: _ClassVar[WorkerState]
    WORKER_STATE_READY: _ClassVar[WorkerState]
    WORKER_STATE_DRAINING: _ClassVar[WorkerState]
    WORKER_STATE_REFUSED: _ClassVar[WorkerState]
WORKER_ROLE_UNSPECIFIED: WorkerRole
WORKER_ROLE_PREFILL: WorkerRole
WORKER_ROLE_DECODE: WorkerRole
WORKER_STATE_UNSPECIFIED: WorkerState
WORKER_STATE_CONNECTING: WorkerState
WORKER_STATE_READY: WorkerState
WORKER_STATE_DRAINING: WorkerState
WORKER_STATE_REFUSED: WorkerState

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("workers", "live_requests")
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    LIVE_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    live_requests: int
    def __init__(self, workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., live_requests: _Optional[int] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("worker_id", "role", "epoch", "state", "running_sequences", "waiting_sequences", "free_blocks", "total_blocks", "finished_sequences", "reason", "borrowed_core_ms")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    RUNNING_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    WAITING_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    BORROWED_CORE_MS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    role: WorkerRole
    epoch: int
    state: WorkerState
    running_sequences: int
    waiting_sequences: int
    free_blocks: int
    total_blocks: int
    finished_sequences: int
    reason: str
    borrowed_core_ms: int
    def __init__(self, worker_id: _Optional[str] = ..., role: _Optional[_Union[WorkerRole, str]] = ..., epoch: _Optional[int] = ..., state: _Optional[_Union[WorkerState, str]] = ..., running_sequences: _Optional[int] = ..., waiting_sequences: _Optional[int] = ..., free_blocks: _Optional[int] = ..., total_blocks: _Optional[int] = ..., finished_sequences: _Optional[int] = ..., reason: _Optional[str] = ..., borrowed_core_ms: _Optional[int] = ...) -> None: ...

class AuditRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AuditResponse(_message.Message):
    __slots__ = ("ledgers", "live_requests", "balanced")
    LEDGERS_FIELD_NUMBER: _ClassVar[int]
    LIVE_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    BALANCED_FIELD_NUMBER: _ClassVar[int]
    ledgers: _containers.RepeatedCompositeFieldContainer[WorkerLedger]
    live_requests: int
    balanced: bool
    def __init__(self, ledgers: _Optional[_Iterable[_Union[WorkerLedger, _Mapping]]] = ..., live_requests: _Optional[int] = ..., balanced: _Optional[bool] = ...) -> None: ...

class WorkerLedger(_message.Message):
    __slots__ = ("worker_id", "role", "total_blocks", "free_blocks", "cached_blocks", "owned_blocks", "quarantined_blocks", "owners", "violations", "unreachable", "in_flight_blocks", "tokens", "promised_blocks")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    OWNED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    OWNERS_FIELD_NUMBER: _ClassVar[int]
    VIOLATIONS_FIELD_NUMBER: _ClassVar[int]
    UNREACHABLE_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMISED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    role: WorkerRole
    total_blocks: int
    free_blocks: int
    cached_blocks: int
    owned_blocks: int
    quarantined_blocks: int
    owners: _containers.RepeatedCompositeFieldContainer[BlockOwner]
    violations: _containers.RepeatedScalarFieldContainer[str]
    unreachable: bool
    in_flight_blocks: int
    tokens: TokenCounts
    promised_blocks: int
    def __init__(self, worker_id: _Optional[str] = ..., role: _Optional[_Union[WorkerRole, str]] = ..., total_blocks: _Optional[int] = ..., free_blocks: _Optional[int] = ..., cached_blocks: _Optional[int] = ..., owned_blocks: _Optional[int] = ..., quarantined_blocks: _Optional[int] = ..., owners: _Optional[_Iterable[_Union[BlockOwner, _Mapping]]] = ..., violations: _Optional[_Iterable[str]] = ..., unreachable: _Optional[bool] = ..., in_flight_blocks: _Optional[int] = ..., tokens: _Optional[_Union[TokenCounts, _Mapping]] = ..., promised_blocks: _Optional[int] = ...) -> None: ...

class TokenCounts(_message.Message):
    __slots__ = ("computed", "delivered", "live", "wasted")
    COMPUTED_FIELD_NUMBER: _ClassVar[int]
    DELIVERED_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    WASTED_FIELD_NUMBER: _ClassVar[int]
    computed: int
    delivered: int
    live: int
    wasted: _containers.RepeatedCompositeFieldContainer[WastedTokens]
    def __init__(self, computed: _Optional[int] = ..., delivered: _Optional[int] = ..., live: _Optional[int] = ..., wasted: _Optional[_Iterable[_Union[WastedTokens, _Mapping]]] = ...) -> None: ...

class WastedTokens(_message.Message):
    __slots__ = ("cause", "tokens")
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    cause: str
    tokens: int
    def __init__(self, cause: _Optional[str] = ..., tokens: _Optional[int] = ...) -> None: ...

class BlockOwner(_message.Message):
    __slots__ = ("kind", "request_id", "blocks")
    KIND_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    kind: str
    request_id: str
    blocks: int
    def __init__(self, kind: _Optional[str] = ..., request_id: _Optional[str] = ..., blocks: _Optional[int] = ...) -> None: ...

class DrainWorkerRequest(_message.Message):
    __slots__ = ("worker_id",)
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    def __init__(self, worker_id: _Optional[str] = ...) -> None: ...

class DrainWorkerResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
