"""Where one worker reads the tickets it is shown: opened, and checked against what they came with.

Called before anything is done for a ticket. Spends nothing: that a ticket is used once is the transfer's business.
"""

from dataclasses import dataclass
from enum import Enum, auto

from kvtransfer.errors import Reason, TicketRefused
from kvtransfer.identity import Identity
from kvtransfer.ticket import Ticket, open_sealed


class End(Enum):
    """Which end of a hand-off a worker is."""

    SOURCE = auto()
    TARGET = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class TicketDesk:
    """key: shared with who mints. identity: this worker. block_size: positions per block."""

    key: bytes
    identity: Identity
    end: End
    layout_fingerprint: bytes
    block_size: int

    def read(self, sealed: bytes, *, request_id: str, attempt: int, num_tokens: int) -> Ticket:
        """The ticket inside, if it is for this worker and for exactly this attempt. Raises TicketRefused."""
        ticket = open_sealed(sealed, self.key)
        mine = ticket.source() if self.end is End.SOURCE else ticket.target()
        if mine.worker_id != self.identity.worker_id:
            raise TicketRefused(Reason.WRONG_SOURCE if self.end is End.SOURCE else Reason.WRONG_TARGET)
        if mine.epoch != self.identity.epoch:
            raise TicketRefused(Reason.WRONG_EPOCH)
        if (ticket.request_id, ticket.attempt) != (request_id, attempt):
            raise TicketRefused(Reason.WRONG_ATTEMPT)
        if ticket.layout_fingerprint != self.layout_fingerprint:
            raise TicketRefused(Reason.WRONG_LAYOUT)
        if (ticket.num_tokens, ticket.num_blocks) != (num_tokens, -(-num_tokens // self.block_size)):
            raise TicketRefused(Reason.WRONG_RANGE)
        return ticket
