"""`crossdock audit`: every worker's block ledger, recounted, and whether it balances. Needs the client only.

It adds the books up again by itself rather than trust the gateway's word that they balance.
"""

from collections.abc import Iterator, Sequence

from commands import control
from crossdock.v1 import control_pb2 as pb


def main(argv: Sequence[str]) -> int:
    """Returns 0 when every ledger balances and nothing is owned or promised where nothing is live, else 1."""
    flags = control.parser("audit", "Checks every worker's block ledger.").parse_args(argv)
    return control.run(flags, _show)


def violations(response: pb.AuditResponse) -> list[str]:
    """What is wrong in these books, one line each."""
    return [
        line for ledger in response.ledgers for line in _ledger_violations(ledger, response.live_requests)
    ]


def _show(gateway: control.Control) -> int:
    response: pb.AuditResponse = gateway.call(gateway.stub.Audit, pb.AuditRequest())
    print(
        f"{'worker':<16} {'total':>8} {'free':>8} {'promised':>8} {'cached':>8} {'owned':>8} {'in flight':>10}"
        f" {'quarantined':>12}"
    )
    for ledger in response.ledgers:
        print(
            f"{ledger.worker_id:<16} {ledger.total_blocks:>8} {ledger.free_blocks:>8}"
            f" {ledger.promised_blocks:>8} {ledger.cached_blocks:>8} {ledger.owned_blocks:>8}"
            f" {ledger.in_flight_blocks:>10} {ledger.quarantined_blocks:>12}"
        )
        for owner in ledger.owners:
            print(f"  {owner.kind} {owner.request_id}: {owner.blocks}")
        tokens = ledger.tokens
        wasted = "".join(f", {each.tokens} wasted ({each.cause})" for each in tokens.wasted)
        print(
            f"  tokens: {tokens.computed} computed = {tokens.delivered} delivered, {tokens.live} live{wasted}"
        )
    wrong = violations(response)
    if not wrong and not response.balanced:
        wrong = ["the gateway says that the books do not balance"]
    print(*wrong, sep="\n", end="\n" if wrong else "")
    print(f"{response.live_requests} live requests; {'NOT balanced' if wrong else 'balanced'}")
    return 1 if wrong else 0


def _ledger_violations(ledger: pb.WorkerLedger, live_requests: int) -> Iterator[str]:
    name = ledger.worker_id
    if ledger.unreachable:
        yield f"{name}: did not answer"
        return
    for violation in ledger.violations:
        yield f"{name}: {violation}"
    counted = ledger.free_blocks + ledger.cached_blocks + ledger.owned_blocks + ledger.quarantined_blocks
    if counted != ledger.total_blocks:
        yield f"{name}: {counted} blocks are accounted for, of {ledger.total_blocks}"
    spent = ledger.tokens.delivered + ledger.tokens.live + sum(each.tokens for each in ledger.tokens.wasted)
    if spent != ledger.tokens.computed:
        yield f"{name}: {spent} tokens are accounted for, of {ledger.tokens.computed}"
    if live_requests == 0 and ledger.owned_blocks:
        yield f"{name}: {ledger.owned_blocks} blocks are owned, though nothing is live"
    if live_requests == 0 and ledger.promised_blocks:
        yield f"{name}: {ledger.promised_blocks} blocks are promised, though nothing is live"
    swapped = sum(owner.blocks for owner in ledger.owners if owner.kind == "swapped")
    if live_requests == 0 and swapped:
        yield f"{name}: {swapped} blocks are swapped out, though nothing is live"
