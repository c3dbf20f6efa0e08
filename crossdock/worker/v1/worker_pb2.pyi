from crossdock.v1 import limits_pb2 as _limits_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GuideKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GUIDE_KIND_UNSPECIFIED: _ClassVar[GuideKind]
    GUIDE_KIND_JSON_SCHEMA: _ClassVar[GuideKind]
    GUIDE_KIND_JSON_OBJECT: _ClassVar[GuideKind]
    GUIDE_KIND_REGEX: _ClassVar[GuideKind]
    GUIDE_KIND_CHOICE: _ClassVar[GuideKind]
    GUIDE_KIND_GRAMMAR: _ClassVar[GuideKind]

class EndReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    END_REASON_UNSPECIFIED: _ClassVar[EndReason]
    END_REASON_STOP: _ClassVar[EndReason]
    END_REASON_LENGTH: _ClassVar[EndReason]

class EndCause(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    END_CAUSE_UNSPECIFIED: _ClassVar[EndCause]
    END_CAUSE_CANCELLED: _ClassVar[EndCause]
    END_CAUSE_INVALID: _ClassVar[EndCause]
    END_CAUSE_EXHAUSTED: _ClassVar[EndCause]
    END_CAUSE_DRAINING: _ClassVar[EndCause]
    END_CAUSE_TRANSFER_FAILED: _ClassVar[EndCause]
    END_CAUSE_TICKET_REFUSED: _ClassVar[EndCause]
    END_CAUSE_INTERNAL: _ClassVar[EndCause]
    END_CAUSE_PREEMPTED: _ClassVar[EndCause]
    END_CAUSE_GUIDE_FAILED: _ClassVar[EndCause]
GUIDE_KIND_UNSPECIFIED: GuideKind
GUIDE_KIND_JSON_SCHEMA: GuideKind
GUIDE_KIND_JSON_OBJECT: GuideKind
GUIDE_KIND_REGEX: GuideKind
GUIDE_KIND_CHOICE: GuideKind
GUIDE_KIND_GRAMMAR: GuideKind
END_REASON_UNSPECIFIED: EndReason
END_REASON_STOP: EndReason
END_REASON_LENGTH: EndReason
END_CAUSE_UNSPECIFIED: EndCause
END_CAUSE_CANCELLED: EndCause
END_CAUSE_INVALID: EndCause
END_CAUSE_EXHAUSTED: EndCause
END_CAUSE_DRAINING: EndCause
END_CAUSE_TRANSFER_FAILED: EndCause
END_CAUSE_TICKET_REFUSED: EndCause
END_CAUSE_INTERNAL: EndCause
END_CAUSE_PREEMPTED: EndCause
END_CAUSE_GUIDE_FAILED: EndCause

class PrefillServiceAttachRequest(_message.Message):
    __slots__ = ("hello", "submit", "cancel", "audit", "drain")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    AUDIT_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    submit: SubmitPrompt
    cancel: Cancel
    audit: AuditQuery
    drain: Drain
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., submit: _Optional[_Union[SubmitPrompt, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., audit: _Optional[_Union[AuditQuery, _Mapping]] = ..., drain: _Optional[_Union[Drain, _Mapping]] = ...) -> None: ...

class PrefillServiceAttachResponse(_message.Message):
    __slots__ = ("welcome", "outputs", "ended", "load", "audit", "handed_over", "prompt_logprobs", "cache")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    AUDIT_FIELD_NUMBER: _ClassVar[int]
    HANDED_OVER_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    outputs: StepOutputs
    ended: Ended
    load: LoadReport
    audit: AuditReport
    handed_over: HandedOver
    prompt_logprobs: PromptLogprobs
    cache: CacheEvents
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., outputs: _Optional[_Union[StepOutputs, _Mapping]] = ..., ended: _Optional[_Union[Ended, _Mapping]] = ..., load: _Optional[_Union[LoadReport, _Mapping]] = ..., audit: _Optional[_Union[AuditReport, _Mapping]] = ..., handed_over: _Optional[_Union[HandedOver, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[PromptLogprobs, _Mapping]] = ..., cache: _Optional[_Union[CacheEvents, _Mapping]] = ...) -> None: ...

class DecodeServiceAttachRequest(_message.Message):
    __slots__ = ("hello", "reserve", "cancel", "audit", "drain", "end_choice")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    RESERVE_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    AUDIT_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    END_CHOICE_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    reserve: Reserve
    cancel: Cancel
    audit: AuditQuery
    drain: Drain
    end_choice: EndChoice
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., reserve: _Optional[_Union[Reserve, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., audit: _Optional[_Union[AuditQuery, _Mapping]] = ..., drain: _Optional[_Union[Drain, _Mapping]] = ..., end_choice: _Optional[_Union[EndChoice, _Mapping]] = ...) -> None: ...

class DecodeServiceAttachResponse(_message.Message):
    __slots__ = ("welcome", "outputs", "ended", "load", "audit", "reserved", "adopted", "prompt_logprobs", "cache")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    AUDIT_FIELD_NUMBER: _ClassVar[int]
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    ADOPTED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    outputs: StepOutputs
    ended: Ended
    load: LoadReport
    audit: AuditReport
    reserved: Reserved
    adopted: Adopted
    prompt_logprobs: PromptLogprobs
    cache: CacheEvents
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., outputs: _Optional[_Union[StepOutputs, _Mapping]] = ..., ended: _Optional[_Union[Ended, _Mapping]] = ..., load: _Optional[_Union[LoadReport, _Mapping]] = ..., audit: _Optional[_Union[AuditReport, _Mapping]] = ..., reserved: _Optional[_Union[Reserved, _Mapping]] = ..., adopted: _Optional[_Union[Adopted, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[PromptLogprobs, _Mapping]] = ..., cache: _Optional[_Union[CacheEvents, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol_version", "gateway_id", "gateway_epoch")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_ID_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_EPOCH_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    gateway_id: str
    gateway_epoch: int
    def __init__(self, protocol_version: _Optional[int] = ..., gateway_id: _Optional[str] = ..., gateway_epoch: _Optional[int] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("protocol_version", "worker_id", "epoch", "layout_fingerprint", "kv_endpoints", "model_digest", "max_model_len", "vocab_size", "block_size", "total_blocks", "max_num_seqs", "eos_token_ids", "layout_fields", "ticket_key_check")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    KV_ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELDS_FIELD_NUMBER: _ClassVar[int]
    TICKET_KEY_CHECK_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    worker_id: str
    epoch: int
    layout_fingerprint: bytes
    kv_endpoints: _containers.RepeatedScalarFieldContainer[str]
    model_digest: str
    max_model_len: int
    vocab_size: int
    block_size: int
    total_blocks: int
    max_num_seqs: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    layout_fields: _containers.RepeatedCompositeFieldContainer[LayoutField]
    ticket_key_check: bytes
    def __init__(self, protocol_version: _Optional[int] = ..., worker_id: _Optional[str] = ..., epoch: _Optional[int] = ..., layout_fingerprint: _Optional[bytes] = ..., kv_endpoints: _Optional[_Iterable[str]] = ..., model_digest: _Optional[str] = ..., max_model_len: _Optional[int] = ..., vocab_size: _Optional[int] = ..., block_size: _Optional[int] = ..., total_blocks: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., layout_fields: _Optional[_Iterable[_Union[LayoutField, _Mapping]]] = ..., ticket_key_check: _Optional[bytes] = ...) -> None: ...

class LayoutField(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: str
    def __init__(self, name: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...

class SubmitPrompt(_message.Message):
    __slots__ = ("sequence", "ticket", "target_endpoints")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    TARGET_ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    sequence: SequenceSpec
    ticket: bytes
    target_endpoints: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, sequence: _Optional[_Union[SequenceSpec, _Mapping]] = ..., ticket: _Optional[bytes] = ..., target_endpoints: _Optional[_Iterable[str]] = ...) -> None: ...

class Reserve(_message.Message):
    __slots__ = ("sequence", "ticket")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    sequence: SequenceSpec
    ticket: bytes
    def __init__(self, sequence: _Optional[_Union[SequenceSpec, _Mapping]] = ..., ticket: _Optional[bytes] = ...) -> None: ...

class Reserved(_message.Message):
    __slots__ = ("request_id", "attempt", "blocks_held")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_HELD_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    blocks_held: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., blocks_held: _Optional[int] = ...) -> None: ...

class Adopted(_message.Message):
    __slots__ = ("request_id", "attempt")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ...) -> None: ...

class HandedOver(_message.Message):
    __slots__ = ("request_id", "attempt")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ...) -> None: ...

class SequenceSpec(_message.Message):
    __slots__ = ("request_id", "attempt", "token_ids", "prompt_tokens", "max_tokens", "min_tokens", "stop_token_ids", "temperature", "top_p", "top_k", "min_p", "logprobs", "cache_scope", "choices", "beam", "preemptions", "age_ms", "priority", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "prompt_logprobs", "guide")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SCOPE_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    BEAM_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    GUIDE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    prompt_tokens: int
    max_tokens: int
    min_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    logprobs: int
    cache_scope: bytes
    choices: _containers.RepeatedCompositeFieldContainer[SequenceChoice]
    beam: BeamSearch
    preemptions: int
    age_ms: int
    priority: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    prompt_logprobs: int
    guide: Guide
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., prompt_tokens: _Optional[int] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., logprobs: _Optional[int] = ..., cache_scope: _Optional[bytes] = ..., choices: _Optional[_Iterable[_Union[SequenceChoice, _Mapping]]] = ..., beam: _Optional[_Union[BeamSearch, _Mapping]] = ..., preemptions: _Optional[int] = ..., age_ms: _Optional[int] = ..., priority: _Optional[int] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., prompt_logprobs: _Optional[int] = ..., guide: _Optional[_Union[Guide, _Mapping]] = ...) -> None: ...

class Guide(_message.Message):
    __slots__ = ("kind", "text")
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    kind: GuideKind
    text: str
    def __init__(self, kind: _Optional[_Union[GuideKind, str]] = ..., text: _Optional[str] = ...) -> None: ...

class SequenceChoice(_message.Message):
    __slots__ = ("index", "seed")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    index: int
    seed: int
    def __init__(self, index: _Optional[int] = ..., seed: _Optional[int] = ...) -> None: ...

class BeamSearch(_message.Message):
    __slots__ = ("width", "length_penalty", "early_stopping")
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    LENGTH_PENALTY_FIELD_NUMBER: _ClassVar[int]
    EARLY_STOPPING_FIELD_NUMBER: _ClassVar[int]
    width: int
    length_penalty: float
    early_stopping: bool
    def __init__(self, width: _Optional[int] = ..., length_penalty: _Optional[float] = ..., early_stopping: _Optional[bool] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("request_id", "attempt")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ...) -> None: ...

class EndChoice(_message.Message):
    __slots__ = ("request_id", "attempt", "choice")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    choice: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., choice: _Optional[int] = ...) -> None: ...

class StepOutputs(_message.Message):
    __slots__ = ("step", "request_ids", "attempts", "choices", "positions", "token_ids", "details")
    STEP_FIELD_NUMBER: _ClassVar[int]
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    step: int
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    attempts: _containers.RepeatedScalarFieldContainer[int]
    choices: _containers.RepeatedScalarFieldContainer[int]
    positions: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    details: _containers.RepeatedCompositeFieldContainer[TokenDetail]
    def __init__(self, step: _Optional[int] = ..., request_ids: _Optional[_Iterable[str]] = ..., attempts: _Optional[_Iterable[int]] = ..., choices: _Optional[_Iterable[int]] = ..., positions: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., details: _Optional[_Iterable[_Union[TokenDetail, _Mapping]]] = ...) -> None: ...

class TokenDetail(_message.Message):
    __slots__ = ("index", "logprob", "top_token_ids", "top_logprobs", "end_reason", "cached_tokens")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    END_REASON_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    index: int
    logprob: float
    top_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    end_reason: EndReason
    cached_tokens: int
    def __init__(self, index: _Optional[int] = ..., logprob: _Optional[float] = ..., top_token_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ..., end_reason: _Optional[_Union[EndReason, str]] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("request_id", "attempt", "first_position", "token_logprobs", "ranks", "top_count", "top_token_ids", "top_logprobs")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    FIRST_POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    TOP_COUNT_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    first_position: int
    token_logprobs: _containers.RepeatedScalarFieldContainer[float]
    ranks: _containers.RepeatedScalarFieldContainer[int]
    top_count: int
    top_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., first_position: _Optional[int] = ..., token_logprobs: _Optional[_Iterable[float]] = ..., ranks: _Optional[_Iterable[int]] = ..., top_count: _Optional[int] = ..., top_token_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class Ended(_message.Message):
    __slots__ = ("request_id", "attempt", "cause", "detail", "preemptions")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    cause: EndCause
    detail: str
    preemptions: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., cause: _Optional[_Union[EndCause, str]] = ..., detail: _Optional[str] = ..., preemptions: _Optional[int] = ...) -> None: ...

class LoadReport(_message.Message):
    __slots__ = ("step", "running_sequences", "waiting_sequences", "waiting_tokens", "free_blocks", "total_blocks", "finished_sequences", "draining", "borrowed_core_ms", "step_ms", "prompt_token_ms", "hand_off_token_ms", "frozen", "counts")
    class CountsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    STEP_FIELD_NUMBER: _ClassVar[int]
    RUNNING_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    WAITING_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    BORROWED_CORE_MS_FIELD_NUMBER: _ClassVar[int]
    STEP_MS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_MS_FIELD_NUMBER: _ClassVar[int]
    HAND_OFF_TOKEN_MS_FIELD_NUMBER: _ClassVar[int]
    FROZEN_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    step: int
    running_sequences: int
    waiting_sequences: int
    waiting_tokens: int
    free_blocks: int
    total_blocks: int
    finished_sequences: int
    draining: bool
    borrowed_core_ms: int
    step_ms: float
    prompt_token_ms: float
    hand_off_token_ms: float
    frozen: bool
    counts: _containers.ScalarMap[str, int]
    def __init__(self, step: _Optional[int] = ..., running_sequences: _Optional[int] = ..., waiting_sequences: _Optional[int] = ..., waiting_tokens: _Optional[int] = ..., free_blocks: _Optional[int] = ..., total_blocks: _Optional[int] = ..., finished_sequences: _Optional[int] = ..., draining: _Optional[bool] = ..., borrowed_core_ms: _Optional[int] = ..., step_ms: _Optional[float] = ..., prompt_token_ms: _Optional[float] = ..., hand_off_token_ms: _Optional[float] = ..., frozen: _Optional[bool] = ..., counts: _Optional[_Mapping[str, int]] = ...) -> None: ...

class CacheEvents(_message.Message):
    __slots__ = ("sequence", "snapshot", "added", "removed")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    ADDED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    snapshot: bool
    added: bytes
    removed: bytes
    def __init__(self, sequence: _Optional[int] = ..., snapshot: _Optional[bool] = ..., added: _Optional[bytes] = ..., removed: _Optional[bytes] = ...) -> None: ...

class AuditQuery(_message.Message):
    __slots__ = ("query_id",)
    QUERY_ID_FIELD_NUMBER: _ClassVar[int]
    query_id: int
    def __init__(self, query_id: _Optional[int] = ...) -> None: ...

class AuditReport(_message.Message):
    __slots__ = ("query_id", "total_blocks", "free_blocks", "cached_blocks", "owned_blocks", "quarantined_blocks", "owners", "violations", "tokens", "promised_blocks")
    QUERY_ID_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    OWNED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    OWNERS_FIELD_NUMBER: _ClassVar[int]
    VIOLATIONS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMISED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    query_id: int
    total_blocks: int
    free_blocks: int
    cached_blocks: int
    owned_blocks: int
    quarantined_blocks: int
    owners: _containers.RepeatedCompositeFieldContainer[Owner]
    violations: _containers.RepeatedScalarFieldContainer[str]
    tokens: TokenCounts
    promised_blocks: int
    def __init__(self, query_id: _Optional[int] = ..., total_blocks: _Optional[int] = ..., free_blocks: _Optional[int] = ..., cached_blocks: _Optional[int] = ..., owned_blocks: _Optional[int] = ..., quarantined_blocks: _Optional[int] = ..., owners: _Optional[_Iterable[_Union[Owner, _Mapping]]] = ..., violations: _Optional[_Iterable[str]] = ..., tokens: _Optional[_Union[TokenCounts, _Mapping]] = ..., promised_blocks: _Optional[int] = ...) -> None: ...

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

class Owner(_message.Message):
    __slots__ = ("kind", "request_id", "blocks")
    KIND_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    kind: str
    request_id: str
    blocks: int
    def __init__(self, kind: _Optional[str] = ..., request_id: _Optional[str] = ..., blocks: _Optional[int] = ...) -> None: ...

class Drain(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
