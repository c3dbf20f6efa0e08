"""`crossdock status`: what runs where, as the gateway sees it. Needs the client only."""

from collections.abc import Sequence

from commands import control
from crossdock.v1 import control_pb2 as pb


def main(argv: Sequence[str]) -> int:
    """Returns 0 when every worker is ready, else 1."""
    flags = control.parser(
        "status", "Shows what runs where.", "Exits with 0 when every worker is ready, else 1."
    ).parse_args(argv)
    return control.run(flags, _show)


def _show(gateway: control.Control) -> int:
    response: pb.GetStatusResponse = gateway.call(gateway.stub.GetStatus, pb.GetStatusRequest())
    print(
        f"{'worker':<16} {'role':<8} {'state':<11} {'running':>8} {'waiting':>8} {'free blocks':>15}  reason"
    )
    for worker in response.workers:
        role = _word(pb.WorkerRole.Name(worker.role))
        state = _word(pb.WorkerState.Name(worker.state))
        blocks = f"{worker.free_blocks}/{worker.total_blocks}"
        print(
            f"{worker.worker_id:<16} {role:<8} {state:<11} {worker.running_sequences:>8}"
            f" {worker.waiting_sequences:>8} {blocks:>15}  {worker.reason}".rstrip()
        )
    print(f"{response.live_requests} live requests")
    return 0 if all(worker.state == pb.WORKER_STATE_READY for worker in response.workers) else 1


def _word(constant: str) -> str:
    return constant.removeprefix("WORKER_ROLE_").removeprefix("WORKER_STATE_").lower()
