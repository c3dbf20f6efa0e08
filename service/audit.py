"""A worker's books on the wire: blocks and tokens. Knows the shape of a ledger, not the engine that keeps it."""

from collections.abc import Sequence
from typing import Protocol

from crossdock.worker.v1 import worker_pb2 as pb
from service.token_books import TokenCounts


class OwnerFields(Protocol):
    @property
    def kind(self) -> str: ...
    @property
    def request_id(self) -> str: ...


class OwnedFields(Protocol):
    @property
    def owner(self) -> OwnerFields: ...
    @property
    def blocks(self) -> int: ...


class LedgerFields(Protocol):
    """Counts are blocks; free + cached + owned + quarantined = total; promised is a part of free."""

    @property
    def total(self) -> int: ...
    @property
    def free(self) -> int: ...
    @property
    def cached(self) -> int: ...
    @property
    def owned(self) -> int: ...
    @property
    def quarantined(self) -> int: ...
    @property
    def promised(self) -> int: ...
    @property
    def owners(self) -> Sequence[OwnedFields]: ...
    @property
    def violations(self) -> Sequence[str]: ...


def to_audit_report(query_id: int, ledger: LedgerFields, tokens: TokenCounts) -> pb.AuditReport:
    violations = list(ledger.violations)
    if not tokens.balanced():
        violations.append(f"tokens do not add up: {tokens}")
    return pb.AuditReport(
        query_id=query_id,
        total_blocks=ledger.total,
        free_blocks=ledger.free,
        cached_blocks=ledger.cached,
        owned_blocks=ledger.owned,
        quarantined_blocks=ledger.quarantined,
        promised_blocks=ledger.promised,
        owners=[
            pb.Owner(kind=str(each.owner.kind), request_id=each.owner.request_id, blocks=each.blocks)
            for each in ledger.owners
        ],
        violations=violations,
        tokens=pb.TokenCounts(
            computed=tokens.computed,
            delivered=tokens.delivered,
            live=tokens.live,
            wasted=[
                pb.WastedTokens(cause=cause, tokens=count) for cause, count in sorted(tokens.wasted.items())
            ],
        ),
    )
