"""Which cores of its machine a backend computes with. A value; finds nothing out."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreShare:
    """own: cores that the backend's threads run on; none: wherever the system puts them. board: where the workers of
    this machine say whether their cores are free for others (`service.core_board`); None: none are borrowed. seat:
    of this worker on the board."""

    own: tuple[int, ...] = ()
    board: Path | None = None
    seat: int = 0


ANY_CORES = CoreShare()
"""Nobody has dealt any, and none are lent."""
