"""What can go wrong for a client, as exceptions. Only `service.status` knows their gRPC and HTTP codes.

ServiceError
├── InvalidRequest      a field breaks its limits
│   ├── TooLarge        the request is not even read
│   └── GuideFailed     an answer cannot go on within its guide
├── ModelNotFound       no such model here
├── NotServed           no such method here
├── Incompatible        the two ends are not of versions that understand each other
├── Exhausted           a queue or memory is full; try again later
├── Unavailable         nobody can serve this now; try again later
│   ├── AttemptsLost    every worker that it was given to was lost; whether to try again is for people to decide
│   └── Ending          this process ends, and its time for what runs is over; another one may serve
├── StreamLost          an answer ended after some of it was shown: what is tried again begins again
├── DeadlineExpired     the caller's deadline passed
├── Unauthorised        no or wrong credential
└── InternalFault       a mistake of ours

Texts carry field names and limits only: no addresses, no contents, no paths.
"""

from dataclasses import dataclass

CONTEXT_LENGTH_EXCEEDED = "CONTEXT_LENGTH_EXCEEDED"


@dataclass(frozen=True, slots=True, kw_only=True)
class Excess:
    """More than the model's context takes. most, got: what it takes, and what was given, in these units."""

    most: int
    got: int
    unit: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldViolation:
    """field: path in the request, for example "sampling.top_p". description: the rule with its limits. excess: set
    where length alone is wrong."""

    field: str
    description: str
    excess: Excess | None = None


class ServiceError(Exception):
    """reason: UPPER_SNAKE, at most 63 characters (google.rpc.ErrorInfo)."""

    reason = "INTERNAL"

    def __init__(self, message: str, *, retry_after_ms: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_ms = retry_after_ms


class InvalidRequest(ServiceError):
    """The reason is CONTEXT_LENGTH_EXCEEDED where nothing but length is wrong."""

    reason = "INVALID_REQUEST"

    def __init__(self, *violations: FieldViolation, reason: str | None = None) -> None:
        super().__init__("; ".join(f"{v.field}: {v.description}" for v in violations))
        self.violations = violations
        if reason is not None:
            self.reason = reason
        elif violations and all(v.excess for v in violations):
            self.reason = CONTEXT_LENGTH_EXCEEDED


class TooLarge(InvalidRequest):
    reason = "REQUEST_TOO_LARGE"


class GuideFailed(InvalidRequest):
    """Found out while answering: nothing may follow, or it takes too much work to tell what."""

    reason = "GUIDE_FAILED"

    def __init__(self) -> None:
        why = "the answer cannot be continued within it, or only with more work than is allowed"
        super().__init__(FieldViolation(field="guide", description=why))


class ModelNotFound(ServiceError):
    reason = "MODEL_NOT_FOUND"


class ServiceUnknown(ServiceError):
    """That somebody asks the health of."""

    reason = "SERVICE_UNKNOWN"


class NotServed(ServiceError):
    reason = "NOT_SERVED"


class Incompatible(ServiceError):
    reason = "INCOMPATIBLE"


class Exhausted(ServiceError):
    reason = "QUEUE_FULL"

    def __init__(self, message: str, *, reason: str | None = None, retry_after_ms: int | None = None) -> None:
        super().__init__(message, retry_after_ms=retry_after_ms)
        if reason is not None:
            self.reason = reason


class Unavailable(ServiceError):
    reason = "UNAVAILABLE"

    def __init__(self, message: str, *, reason: str | None = None, retry_after_ms: int | None = 1000) -> None:
        super().__init__(message, retry_after_ms=retry_after_ms)
        if reason is not None:
            self.reason = reason


class AttemptsLost(Unavailable):
    reason = "ATTEMPTS_LOST"

    def __init__(self, message: str) -> None:
        super().__init__(message, retry_after_ms=None)


class Ending(Unavailable):
    reason = "DRAINING"

    def __init__(self) -> None:
        super().__init__("this server ends, and its time for what runs is over")


class StreamLost(ServiceError):
    reason = "STREAM_LOST"

    def __init__(self, message: str, *, reason: str | None = None) -> None:
        super().__init__(message)
        if reason is not None:
            self.reason = reason


class DeadlineExpired(ServiceError):
    reason = "DEADLINE_EXPIRED"


class Unauthorised(ServiceError):
    reason = "UNAUTHORISED"


class InternalFault(ServiceError):
    reason = "INTERNAL"
