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

SLOTS_MAX = 4096
"""In one packet."""
PACKET_BYTES_MAX = HEADER_BYTES_MAX + 4 * (1 + SLOTS_MAX)

_WORD = struct.Struct("!I")
_GREETING = struct.Struct("!16sIQ")
_MAGIC = b"crossdock shm 2\0"


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


def pack(header: bytes, slots: Collection[int] = ()) -> bytes:
    """From the source: a message, and where its payloads are. From the target: a message, or an empty header
    and the slots that may be written again."""
    return struct.pack(f"!I{len(slots)}I", len(slots), *slots) + header


def unpack(packet: memoryview) -> tuple[tuple[int, ...], bytes]:
    """The slots and the header. Raises BadPacket."""
    if not _WORD.size <= len(packet) <= PACKET_BYTES_MAX:
        raise BadPacket("no packet")
    (count,) = _WORD.unpack_from(packet)
    header_at = _WORD.size * (1 + count)
    if count > SLOTS_MAX or header_at > len(packet):
        raise BadPacket("fewer slots than it says")
    return struct.unpack_from(f"!{count}I", packet, _WORD.size), bytes(packet[header_at:])
