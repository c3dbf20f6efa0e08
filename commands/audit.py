"""`crossdock audit`: every worker's block ledger, recounted, and whether it balances. Needs the client only.

It adds the books up again by itself rather than trust the gateway's word that they balance.
"""

from collections.abc import Iterator, Sequence

from commands import control
from crossdock.v1 import control_pb2 as pb

_NOT_CHECKED = 2
_EXIT_CODES = (
    "Exits with 0 when all books balance; 1 when some do not; 2 when not all could be checked, since a worker or the "
    "gateway did not answer, and nothing is wrong with the others."
)


def main(argv: Sequence[str]) -> int:
    """Returns 0 when every ledger balances and nothing is owned or promised where nothing is live, 1 when one does not,
    and 2 when those that were checked do but some were not: a worker or the gateway did not answer."""
    flags = control.parser("audit", "Checks every worker's block ledger.", _EXIT_CODES).parse_args(argv)
    return control.run(flags, _show, unanswered=_NOT_CHECKED)


def _show(gateway: control.Control) -> int:
    response: pb.AuditResponse = gateway.call(gateway.stub.Audit, pb.AuditRequest())
    print(
        f"{'worker':<16} {'total':>8} {'free':>8} {'promised':>8} {'cached':>8} {'owned':>8} {'in flight':>10}"
        f" {'quarantined':>12}"
    )
    checked = [ledger for ledger in response.ledgers if not ledger.unreachable]
    for ledger in checked:
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
    unchecked = [ledger.worker_id for ledger in response.ledgers if ledger.unreachable]
    for name in unchecked:
        print(f"{name:<16} not checked: did not answer")
    wrong = [line for ledger in checked for line in _violations(ledger, response.live_requests)]
    if not (wrong or unchecked or response.balanced):
        wrong = ["the gateway says that the books do not balance"]
    print(*wrong, sep="\n", end="\n" if wrong else "")
    if wrong:
        verdict = "NOT balanced"
    elif unchecked:
        verdict = f"NOT checked: {', '.join(unchecked)}; the others are balanced"
    else:
        verdict = "balanced"
    print(f"{response.live_requests} live requests; {verdict}")
    return 1 if wrong else _NOT_CHECKED if unchecked else 0


def _violations(ledger: pb.WorkerLedger, live_requests: int) -> Iterator[str]:
    """What is wrong in these books, one line each."""
    name = ledger.worker_id
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
