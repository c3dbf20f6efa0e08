"""The ranks that follow, as processes, seen from the one that plans.

Owns their processes, a channel to each, the memory of whole blocks that all ranks share, and the collective. Called by
one thread at a time: at first by the one that assembles, then by the step thread. Any rank that is lost ends the whole:
there is no step without it.
"""

import mmap
import os
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import zmq

from engine.cache.layout import KVLayout
from engine.collective import Share
from engine.devices import first_gpu
from engine.errors import CapacityError, RankLost
from engine.ranks import Work
from tensor_parallel.channel import Channel
from tensor_parallel.group import STALL_S, TorchCollective, patience_s
from tensor_parallel.wire import Done, Loaded, Message, Open, Ready, Refused, Stop

LOAD_S = 600.0
"""Given to ranks that still load when the first one, which has as much to load, is done."""
EXIT_REFUSED = 2
"""Of a process whose rank has said what it is refused for."""
END_S = 3.0
"""Given to ranks that were told to stop, all together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """How a rank finds the others. endpoint: of its channel. memory, rendezvous: descriptors that its process inherits,
    of the blocks' memory and of the file where the group finds itself."""

    endpoint: str
    memory: int
    rendezvous: int

    def rendezvous_path(self) -> str:
        return f"/proc/self/fd/{self.rendezvous}"


class ProcessFollowers:
    """See engine.ranks.Followers. folder: only this user may enter it. spawn: starts the process of a rank, which must
    not outlive this one. on_lost: called on a thread of its own as soon as one of them is gone, unless it was told to
    stop or has said what it is refused for. device: what the ranks compute on. stall_s: after which a rank that others
    wait for is given up, on a processor. own_threads: kernel ids of those of this process."""

    def __init__(
        self,
        size: int,
        folder: Path,
        spawn: Callable[[Share, Meeting], subprocess.Popen[bytes]],
        on_lost: Callable[[RankLost], None],
        *,
        device: str = "cpu",
        stall_s: float = STALL_S,
        own_threads: Callable[[], frozenset[int]] = frozenset,
    ) -> None:
        self.collective = TorchCollective(Share(rank=0, size=size), stall_s)
        self.threads: tuple[int, ...] = ()
        """Kernel ids of what computes in all that follow, once they are ready."""
        self.group_threads: frozenset[int] = frozenset()
        """Of this process, those that only carry what ranks say: they wake up now and then, whether anything moves or
        not."""
        self._on_lost = on_lost
        self._own_threads = own_threads
        gpu = first_gpu(device)
        self._device = torch.device("cpu") if gpu is None else torch.device("cuda", gpu)
        self._patience_s = patience_s(stall_s, device)
        self._block_size: int | None = None
        self._stopping = threading.Event()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._memory = os.memfd_create("crossdock-kv")
        self._rendezvous = os.memfd_create("crossdock-group")
        self._channels: list[Channel] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(1, size):
                endpoint = f"ipc://{folder / f'rank-{rank}'}"
                self._channels.append(Channel.listen(self._context, endpoint, self._patience_s))
                self._processes.append(spawn(Share(rank=rank, size=size), self._meeting(endpoint)))
                self._watch(rank)
        except BaseException:
            self.kill()
            raise

    def loaded(self, free_bytes: int | None) -> int | None:
        found = [free_bytes]
        for message in self._hear_all(LOAD_S):
            if isinstance(message, Refused):
                raise CapacityError(message.text)
            assert isinstance(message, Loaded), message
            found.append(message.free_bytes)
        return min((each for each in found if each is not None), default=None)

    def open(self, num_blocks: int, layout: KVLayout) -> mmap.mmap:
        size = num_blocks * layout.block_bytes()
        os.ftruncate(self._memory, size)
        memory = mmap.mmap(self._memory, size)
        self._block_size = layout.block_size
        for channel in self._channels:
            channel.say(Open(num_blocks=num_blocks))
        before = self._own_threads()
        self._join()
        self.group_threads = self._own_threads() - before
        ready = [message for message in self._hear_all(self._patience_s) if isinstance(message, Ready)]
        self.threads = tuple(thread for message in ready for thread in message.threads)
        return memory

    def tell(self, work: Work) -> None:
        self._check()
        for channel in self._channels:
            channel.say(work, self._block_size)

    def await_done(self) -> None:
        for message in self._hear_all(self._patience_s):
            assert isinstance(message, Done), message

    def kill(self) -> None:
        """For a start that failed. Returns when their processes are gone."""
        self._stopping.set()
        try:
            for process in self._processes:
                process.kill()
            for process in self._processes:
                process.wait()
        finally:
            self._context.destroy()
            os.close(self._memory)
            os.close(self._rendezvous)

    def stop(self) -> None:
        """Nothing is computed any more. Returns when their processes are gone; whoever does not end is killed."""
        self._stopping.set()
        try:
            for channel in self._channels:
                channel.say_at_once(Stop())
            end = time.monotonic() + END_S
            for process in self._processes:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, end - time.monotonic()))
        finally:
            self.kill()

    def _meeting(self, endpoint: str) -> Meeting:
        return Meeting(endpoint=endpoint, memory=self._memory, rendezvous=self._rendezvous)

    def _join(self) -> None:
        try:
            self.collective.join(self._meeting("").rendezvous_path(), self._device)
        except RankLost:
            self._check()  # which one it was, if one is gone
            raise

    def _hear_all(self, stall_s: float) -> list[Message]:
        return [channel.hear(self._check, stall_s) for channel in self._channels]

    def _check(self) -> None:
        """Raises RankLost when a process is gone, CapacityError when it has said why."""
        for rank, (process, channel) in enumerate(zip(self._processes, self._channels, strict=True), 1):
            if (code := process.poll()) is None:
                continue
            while (message := channel.hear_at_once()) is not None:
                if isinstance(message, Refused):
                    raise CapacityError(message.text)
            raise RankLost(_ended(rank, code))

    def _watch(self, rank: int) -> None:
        process = self._processes[rank - 1]

        def wait() -> None:
            code = process.wait()
            if not (self._stopping.is_set() or code == EXIT_REFUSED):
                self._on_lost(RankLost(_ended(rank, code)))

        threading.Thread(target=wait, name=f"rank-{rank}-watch", daemon=True).start()


def _ended(rank: int, code: int) -> str:
    return f"rank {rank} was killed by signal {-code}" if code < 0 else f"rank {rank} exited with {code}"
