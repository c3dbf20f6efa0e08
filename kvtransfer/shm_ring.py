"""Staging memory that two processes of one host share: slots of one block each, and the packets about them.

The target makes it, as memory without a name, and hands it to the source over their Unix socket; so nothing
is left behind however either of them ends. A source writes into slots and nowhere else. Never trusts what the
other end says or writes, and knows no socket.
"""

import fcntl
import mmap
import os
import struct
from collections.abc import Collection

from kvtransfer.wire import HEADER_BYTES_MAX

PACKET_BYTES_MAX = HEADER_BYTES_MAX + 4
NO_SLOT = 2**32 - 1

_WORD = struct.Struct("!I")
_GREETING = struct.Struct("!16sIQ")
_MAGIC = b"crossdock shm 1\0"


class BadPacket(Exception):
    """Bytes that the other end should not have sent, or memory that is not as it says."""


class Ring:
    """slots: one block each; writable at the source alone."""

    def __init__(self, fd: int, slot_count: int, slot_bytes: int, protection: int) -> None:
        memory = memoryview(mmap.mmap(fd, slot_count * slot_bytes, prot=protection))
        self.slot_bytes = slot_bytes
        self.slots = [memory[at : at + slot_bytes] for at in range(0, len(memory), slot_bytes)]

    def greeting(self) -> bytes:
        """What goes along with the descriptor."""
        return _GREETING.pack(_MAGIC, len(self.slots), self.slot_bytes)


def new_ring(slot_count: int, slot_bytes: int) -> tuple[Ring, int]:
    """For the target: a ring, and the descriptor to hand over and then to close. Memory is taken from the
    system when it is first written."""
    fd = os.memfd_create("crossdock-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, slot_count * slot_bytes)
        # Nobody can make it shorter any more: touching memory that is gone would kill the process.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return Ring(fd, slot_count, slot_bytes, mmap.PROT_READ), fd
    except BaseException:
        os.close(fd)
        raise


def attach(greeting: bytes, fd: int) -> Ring:
    """For the source: the ring of a greeting. Raises BadPacket when it is none, or could vanish."""
    try:
        magic, slot_count, slot_bytes = _GREETING.unpack(greeting)
        sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        if magic != _MAGIC or not sealed or os.fstat(fd).st_size != slot_count * slot_bytes:
            raise BadPacket("not a ring")
        return Ring(fd, slot_count, slot_bytes, mmap.PROT_READ | mmap.PROT_WRITE)
    except (struct.error, OSError, ValueError, OverflowError) as error:
        raise BadPacket("not a ring") from error


def pack_message(header: bytes, slot: int = NO_SLOT) -> bytes:
    """slot: where the source put the payload."""
    return _WORD.pack(slot) + header


def pack_freed(slots: Collection[int]) -> bytes:
    """From the target: at least one slot that may be written again."""
    return b"".join(map(_WORD.pack, slots))


def unpack(packet: memoryview) -> tuple[int, memoryview]:
    """The first word and the rest. Raises BadPacket."""
    if not _WORD.size <= len(packet) <= PACKET_BYTES_MAX:
        raise BadPacket("no packet")
    return _WORD.unpack_from(packet)[0], packet[_WORD.size :]


def unpack_freed(packet: memoryview) -> list[int]:
    """Raises BadPacket."""
    if len(packet) % _WORD.size:
        raise BadPacket("not whole words")
    return [slot for (slot,) in _WORD.iter_unpack(packet)]
