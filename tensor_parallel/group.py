"""All ranks of a worker in one group of torch.distributed: gloo on processors, NCCL on GPUs.

The two differ by how the group is made and by the device, and in nothing else. Whatever goes wrong in it is RankLost:
a group that has lost a member is of no use any more. Public in torch 2.13: FileStore and Work.wait. Exported but
without a promise, and used only here, as in `kvtransfer.dist_group`: the classes ProcessGroupGloo and ProcessGroupNCCL,
their options, and `_allgather_base`. The documented way, init_process_group, makes one group per process for good.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from engine.collective import Share
from engine.devices import first_gpu
from engine.errors import CapacityError, RankLost

LOOPBACK = "127.0.0.1"
STALL_S = 20.0
"""After which a rank that others wait for is given up: longer than any part of a step may differ between two ranks."""
COMPILING = 6
"""As many times longer a GPU may keep others waiting: its kernels are compiled when they are first launched."""

_dist: Any = dist
_c10d: Any = distributed_c10d


def patience_s(stall_s: float, device: str) -> float:
    """For how long ranks on such a device wait for each other. device: see engine.devices."""
    return stall_s if first_gpu(device) is None else COMPILING * stall_s


def require_group(device: str) -> None:
    """Raises CapacityError when this torch cannot put ranks on such a device together. device: see engine.devices."""
    if first_gpu(device) is not None and not dist.is_nccl_available():
        raise CapacityError(f"torch {torch.__version__} has no NCCL, by which GPUs find each other")


class TorchCollective:
    """See engine.collective.Collective. To be joined before the first step. stall_s: of a processor, see `patience_s`.

    Over gloo whoever calls waits no longer than that. Over NCCL the call only puts the gathering behind what the device
    has to do, since with a limit of its own it would hold the thread until the device is there; the group has the
    limit, and torch's watchdog, which looks after it, ends the process."""

    def __init__(self, share: Share, stall_s: float = STALL_S) -> None:
        self.share = share
        self._stall_s = stall_s
        self._limit: tuple[timedelta, ...] = ()
        self._group: Any = None

    def join(self, rendezvous: str, device: torch.device) -> None:
        """Waits for all others. rendezvous: path of a file, empty at first, that all ranks open. device: where what is
        gathered lies; it decides the backend. Raises RankLost."""
        patience = timedelta(seconds=patience_s(self._stall_s, device.type))
        with _lost("the ranks do not find each other"):
            store = _dist.FileStore(rendezvous, self.share.size)
            store.set_timeout(patience)
            if device.type == "cpu":
                self._group, self._limit = _make_gloo(store, self.share, patience), (patience,)
            else:
                self._group = _make_nccl(store, self.share, patience, device)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        assert self._group is not None, "the group has not been joined"
        rows, columns = x.shape
        size = self.share.size
        parts = x.new_empty(size * rows, columns)
        with _lost("another rank does not answer"):
            self._group._allgather_base(parts, x.contiguous()).wait(*self._limit)
        return parts.view(size, rows, columns).transpose(0, 1).reshape(rows, size * columns)


def _make_gloo(store: Any, share: Share, patience: timedelta) -> Any:
    options = _c10d.ProcessGroupGloo._Options()
    options._timeout = patience
    options._threads = 1
    options._devices = [_c10d.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
    return _c10d.ProcessGroupGloo(store, share.rank, share.size, options)


def _make_nccl(store: Any, share: Share, patience: timedelta, device: torch.device) -> Any:
    options = _c10d.ProcessGroupNCCL.Options()
    options._timeout = patience
    group = _c10d.ProcessGroupNCCL(store, share.rank, share.size, options)
    group.eager_connect_single_device(device)
    return group


@contextmanager
def _lost(detail: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ValueError, OSError, MemoryError) as error:
        raise RankLost(f"{detail}: {type(error).__name__}") from error
