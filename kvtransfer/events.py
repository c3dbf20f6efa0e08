"""What an endpoint tells its owner.

Each ticket ends with exactly one Closed, and it comes last. Failed says what others did: after the owner's
own cancel, withdraw or close there is only Closed."""

from dataclasses import dataclass
from typing import TypeAlias

from kvtransfer.errors import Reason

FirstTokens: TypeAlias = tuple[tuple[int, int], ...]
"""(choice, token) of each sequence that goes on from the blocks of one transfer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """Target: the source is there. Please bind blocks."""

    ticket_id: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """Target: all blocks are verified and in their places. Please adopt, then commit. Excludes Failed.

    num_tokens: tokens whose KV is there. first_tokens: the token after them in each choice that goes on, sampled by
    the source.
    """

    ticket_id: bytes
    num_tokens: int
    first_tokens: FirstTokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """Source: the target owns the sequence. Excludes Failed."""

    ticket_id: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """Both: this transfer will not complete. detail: one line, without addresses or contents."""

    ticket_id: bytes
    reason: Reason
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """Source: nobody will read the pushed blocks any more. Target: nobody will write into the bound
    blocks."""

    ticket_id: bytes


SourceEvent: TypeAlias = Committed | Failed | Closed
TargetEvent: TypeAlias = Opened | Received | Failed | Closed
