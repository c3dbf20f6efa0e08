"""Groups of torch.distributed that are none: blocks move inside this process, and a test says when."""

import queue
import threading

import torch

from kvtransfer.dist_group import GroupOptions, PairBroken
from kvtransfer.dist_transport import DistOptions

BLOCK_BYTES = 64
WINDOW_BLOCKS = 3
WAIT_S = 20


class Wires:
    """Makes groups inside this process; what each end does is in the log. move_at_once: else a block moves
    when there is a permit for it."""

    def __init__(self, *, move_at_once=True) -> None:
        self.log: queue.Queue[tuple[str, int]] = queue.Queue()
        self.seen: list[tuple[str, int]] = []
        self.permits = threading.Semaphore(10**6 if move_at_once else 0)
        self.payloads: queue.Queue[bytes] = queue.Queue()
        self.staging: list[torch.Tensor] = []
        self.breaks_at = -1

    def join(self, backend, rank, rendezvous, options):
        rendezvous.set(str(rank), b"address")
        rendezvous.get(str(1 - rank))
        return FakeGroup(self)

    def let_all_move(self) -> None:
        """At the end of a test: nobody waits in vain."""
        self.permits.release(100)
        for _ in range(100):
            self.payloads.put(bytes(BLOCK_BYTES))

    def add(self, what, number=-1):
        self.log.put((what, number))

    def wait_for(self, what, number=-1):
        while (what, number) not in self.seen:
            self.seen.append(self.log.get(timeout=WAIT_S))

    def count(self, what) -> int:
        while not self.log.empty():
            self.seen.append(self.log.get())
        return sum(1 for each, _ in self.seen if each == what)


class FakeGroup:
    def __init__(self, wires) -> None:
        self._wires = wires

    def send(self, number, memory):
        self._wires.add("send", number)
        return FakeOperation(self._wires, number, lambda: self._wires.payloads.put(bytes(memory.numpy())))

    def receive(self, number, memory):
        self._wires.staging.append(memory)
        self._wires.add("receive", number)

        def fill():
            try:
                payload = self._wires.payloads.get(timeout=WAIT_S)
            except queue.Empty:
                raise PairBroken("nothing came") from None
            memory.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))

        return FakeOperation(self._wires, number, fill)

    def destroy(self):
        self._wires.add("destroyed")


class FakeOperation:
    def __init__(self, wires, number, move) -> None:
        self._wires = wires
        self._number = number
        self._move = move

    def wait(self, timeout_s):
        self._wires.add("wait", self._number)
        if not self._wires.permits.acquire(timeout=timeout_s) or self._number == self._wires.breaks_at:
            raise PairBroken("broken on purpose")
        self._move()

    def drop(self):
        self._wires.add("dropped", self._number)


def options_with(**changes) -> DistOptions:
    group = GroupOptions(join_s=10 * WAIT_S, move_s=changes.pop("move_s", WAIT_S))
    fields = {
        "backends": ("gloo",),
        "block_bytes": BLOCK_BYTES,
        "window_bytes": WINDOW_BLOCKS * BLOCK_BYTES,
    } | changes
    return DistOptions(group=group, **fields)


def payload(number) -> bytes:
    return bytes([number + 1]) * BLOCK_BYTES
