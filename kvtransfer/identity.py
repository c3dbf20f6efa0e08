"""Who a worker process is: its name and the number of this start of it."""

from dataclasses import dataclass

from kvtransfer.schema import U64_MAX, integer, text

WORKER_ID = text(1, 128)
EPOCH = integer(0, U64_MAX)


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """worker_id: 1 to 128 bytes. epoch: [0, 2^64), another one for each start; an older one is fenced."""

    worker_id: str
    epoch: int

    def __post_init__(self) -> None:
        WORKER_ID(self.worker_id)
        EPOCH(self.epoch)
