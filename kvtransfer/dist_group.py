"""One group of two processes in torch.distributed, and nothing else of that library.

Owns how a group is made without the process-wide default group, how two ends find each other without a
listening store, and how one block is moved. Called by a pair's own thread, since everything here waits.
Never touches a live block as a receiver, and never reads a size from the other end.

Public in torch 2.13: the `torch.distributed.Store` class, `Work.wait`, `is_gloo_available`,
`is_nccl_available`. Exported but without a promise, and used only here: a Store written in Python, the
classes ProcessGroupGloo and ProcessGroupNCCL and their constructors, ProcessGroupGloo._Options and
create_device, `abort`. The documented way, init_process_group, makes one group per process; when one of its
members dies all of them are lost.

What gloo does, and what follows:
- It trusts its peer: one that sends more than was asked for ends the process (an exception on a thread of
  gloo). Both ends compare sizes over the carrying transport before anything is posted.
- A wait that ran out of time closes the pair for good; no wait can be cut short from outside.
- A short payload leaves the rest of the buffer as it was. Digests find it."""

import ipaddress
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import Store

from kvtransfer.errors import BindRefused, TransferError

SOURCE_RANK, TARGET_RANK = 0, 1
ENTRIES_MAX = 16
CONNECT_MS = 5_000
"""For a source until it is answered: a group of NCCL takes seconds to be made, a connection some milliseconds."""

_TAGS = 2**31
_c10d: Any = distributed_c10d


Beside: TypeAlias = Callable[[], AbstractContextManager[object]]


class PairBroken(TransferError):
    """The group cannot be made or used any more. The text is one line, without addresses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOptions:
    """address: IP address of this machine, where gloo listens and what it tells the other end; NCCL chooses
    for itself (NCCL_SOCKET_IFNAME). allow_remote: other machines may reach it, though it knows neither keys
    nor encryption. device: the GPU, with its index, where NCCL sends from and receives to; each end needs
    one of its own. join_s: for making the group. move_s: for
    one block.

    Raises BindRefused for an address that is none, means every interface, or is remote without leave."""

    address: str = "127.0.0.1"
    allow_remote: bool = False
    device: str = "cuda:0"
    join_s: float = 3.0
    move_s: float = 3.0

    def __post_init__(self) -> None:
        try:
            address = ipaddress.ip_address(self.address)
        except ValueError as error:
            raise BindRefused(f"{self.address}: torch.distributed needs an IP address") from error
        if address.is_unspecified:
            raise BindRefused(f"{self.address}: torch.distributed would listen on every interface")
        if not address.is_loopback and not self.allow_remote:
            raise BindRefused(f"{self.address}: other machines reach it; give --allow-insecure-kv")


class Operation(Protocol):
    """One block under way. Its memory is in use until `wait` has returned or the group was destroyed."""

    def wait(self, timeout_s: float) -> None:
        """Raises PairBroken when the block did not get through in time."""
        ...

    def drop(self) -> None:
        """Forget it; then destroy the group."""
        ...


class Group(Protocol):
    """Blocks go from SOURCE_RANK to TARGET_RANK, in the order they were started at both ends.
    memory: uint8 [bytes of a block] on the host. number: the same at both ends."""

    def send(self, number: int, memory: torch.Tensor) -> Operation: ...

    def receive(self, number: int, memory: torch.Tensor) -> Operation: ...

    def destroy(self) -> None:
        """When it returns, and every operation was waited for or dropped, no memory is in use."""
        ...


class Rendezvous(Store):
    """A store for two that keeps what is set here, says it to the other end, and waits for what that says.

    say: may be called on any thread; takes what `learn` at the other end is given. So nothing listens
    for the sake of the rendezvous, and giving up ends a wait at once."""

    def __init__(self, say: Callable[[str, bytes], None], timeout_s: float) -> None:
        super().__init__()
        self._say = say
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._known: dict[str, bytes] = {}
        self._learnt = 0
        self._given_up = False

    def learn(self, key: str, value: bytes) -> bool:
        """What the other end has set. False for more than a rendezvous of two takes."""
        with self._changed:
            self._learnt += 1
            if self._learnt > ENTRIES_MAX:
                return False
            self._known[key] = value
            self._changed.notify_all()
            return True

    def give_up(self) -> None:
        with self._changed:
            self._given_up = True
            self._changed.notify_all()

    def set(self, key: str, value: str | bytes) -> None:
        """For torch, as everything below."""
        content = value.encode() if isinstance(value, str) else bytes(value)
        with self._changed:
            self._known[key] = content
            self._changed.notify_all()
        self._say(key, content)

    def get(self, key: str) -> bytes:
        with self._changed:
            self._changed.wait_for(lambda: self._given_up or key in self._known, self._timeout_s)
            if self._given_up or key not in self._known:
                raise PairBroken("the other end does not join the group")
            return self._known[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def check(self, keys: list[str]) -> bool:
        with self._changed:
            return all(key in self._known for key in keys)

    def clone(self) -> "Rendezvous":
        return self


def require_backend(backend: str, options: GroupOptions) -> None:
    """Raises BindRefused for a backend that this build of torch does not have or these options do not
    allow."""
    available = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available}
    if backend not in available or not available[backend]():
        raise BindRefused(f"{backend}: not a backend of this build of torch")
    if backend == "nccl" and not options.allow_remote:
        raise BindRefused("nccl: listens where it likes; give --allow-insecure-kv")


def join(backend: str, rank: int, rendezvous: Rendezvous, options: GroupOptions) -> Group:
    """Make the group together with the other end. backend: gloo or nccl. Raises PairBroken."""
    with _broken_by_torch("the group was not made"):
        if backend == "nccl":
            device = torch.device(options.device)
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            with torch.cuda.stream(stream):
                group = _join_nccl(rank, rendezvous, options, device)
            return TorchGroup(group, rank, device, partial(torch.cuda.stream, stream))
        return TorchGroup(_join_gloo(rank, rendezvous, options), rank, torch.device("cpu"))


class TorchGroup:
    """See `Group`. device: where the backend reads and writes; blocks pass through memory of it. beside: makes what
    is asked of the device within it go beside everything else that is asked of it."""

    def __init__(self, group: Any, rank: int, device: torch.device, beside: Beside = nullcontext) -> None:
        self._group = group
        self._other = 1 - rank
        self._device = device
        self._beside = beside

    def send(self, number: int, memory: torch.Tensor) -> Operation:
        with _broken_by_torch("a block could not be sent"), self._beside():
            there = memory.to(self._device)
            return _Started(self._group.send([there], self._other, number % _TAGS), self._beside)

    def receive(self, number: int, memory: torch.Tensor) -> Operation:
        with _broken_by_torch("a block could not be received"), self._beside():
            there = memory if self._device.type == "cpu" else torch.empty_like(memory, device=self._device)
            started = _Started(self._group.recv([there], self._other, number % _TAGS), self._beside)
            return started if there is memory else _Fetched(started, there, memory, self._beside)

    def destroy(self) -> None:
        group, self._group = self._group, None
        try:
            group.abort()
        except RuntimeError:
            # It is broken already; letting go of it ends it.
            return


class _Started:
    def __init__(self, work: Any, beside: Beside) -> None:
        self._work = work
        self._beside = beside

    def wait(self, timeout_s: float) -> None:
        with _broken_by_torch("a block did not get through"), self._beside():
            self._work.wait(timedelta(seconds=timeout_s))

    def drop(self) -> None:
        self._work = None


class _Fetched:
    """Received on a device; the host has it after the wait."""

    def __init__(
        self, operation: Operation, there: torch.Tensor, memory: torch.Tensor, beside: Beside
    ) -> None:
        self._operation = operation
        self._there = there
        self._memory = memory
        self._beside = beside

    def wait(self, timeout_s: float) -> None:
        self._operation.wait(timeout_s)
        with _broken_by_torch("a block did not come from the device"), self._beside():
            self._memory.copy_(self._there)

    def drop(self) -> None:
        self._operation.drop()


@contextmanager
def _broken_by_torch(detail: str) -> Iterator[None]:
    """Whatever torch raises means that this pair is of no use any more. MemoryError: gloo was told nonsense
    by the other end."""
    try:
        yield
    except (RuntimeError, ValueError, OSError, MemoryError) as error:
        raise PairBroken(f"{detail}: {type(error).__name__}") from error


def _join_gloo(rank: int, rendezvous: Rendezvous, options: GroupOptions) -> Any:
    group_options = _c10d.ProcessGroupGloo._Options()
    group_options._timeout = timedelta(seconds=options.join_s)
    group_options._threads = 1  # for collectives, which are never called
    group_options._devices = [_c10d.ProcessGroupGloo.create_device(hostname=options.address)]
    return _c10d.ProcessGroupGloo(rendezvous, rank, 2, group_options)


def _join_nccl(rank: int, rendezvous: Rendezvous, options: GroupOptions, device: torch.device) -> Any:
    group_options = _c10d.ProcessGroupNCCL.Options()
    # Longer than any wait of ours: torch's own watchdog must not be the one that finds out.
    group_options._timeout = timedelta(seconds=10 * (options.join_s + options.move_s))
    group = _c10d.ProcessGroupNCCL(rendezvous, rank, 2, group_options)
    group.eager_connect_single_device(device)
    return group
