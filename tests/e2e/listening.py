"""The listening sockets of processes, as the kernel lists them (proc(5)), and what each of them speaks."""

import ipaddress
import re
import socket
from dataclasses import dataclass
from pathlib import Path

LISTEN, ACCEPTS = "0A", 1 << 16
ANSWER_S = 10.0


@dataclass(frozen=True)
class Listener:
    """address: (host, port), the path of a Unix socket, or "@" and its name where it has no file."""

    pid: int
    address: tuple[str, int] | str
    kind: int = socket.SOCK_STREAM

    def connect(self):
        unix = isinstance(self.address, str)
        connection = socket.socket(socket.AF_UNIX if unix else socket.AF_INET, self.kind)
        connection.settimeout(ANSWER_S)
        nameless = unix and self.address.startswith("@")
        connection.connect("\0" + self.address[1:] if nameless else self.address)
        return connection

    def grpc_target(self):
        return f"unix:{self.address}" if isinstance(self.address, str) else "{}:{}".format(*self.address)

    def zmq_endpoint(self):
        return (
            f"ipc://{self.address}" if isinstance(self.address, str) else "tcp://{}:{}".format(*self.address)
        )

    def speaks(self):
        """ "shm", "zmq", "grpc" or "http", found by asking; a socket that takes no more connections raises."""
        with self.connect() as connection:
            if self.kind == socket.SOCK_SEQPACKET:
                assert connection.recv(64).startswith(b"crossdock shm")
                return "shm"
            connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
            answer = connection.recv(9)
        if answer[:1] == b"\xff":
            return "zmq"
        if answer[3:4] == b"\x04":
            return "grpc"
        assert answer.startswith(b"HTTP/1.1"), answer
        return "http"


def process_tree(pid):
    """The process and all below it."""
    found = [pid]
    for parent in found:
        for task in Path(f"/proc/{parent}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return found


def listeners(pids):
    return [listener for pid in pids for listener in _of(pid)]


def _of(pid):
    owned = {match[1] for fd in Path(f"/proc/{pid}/fd").iterdir() if (match := _socket(fd))}
    for name in ("tcp", "tcp6"):
        for _, local, _, state, *rest in _rows(pid, name):
            if state == LISTEN and rest[5] in owned:
                yield Listener(pid, _host_and_port(local))
    for _, _, _, flags, kind, _, inode, *path in _rows(pid, "unix"):
        if int(flags, 16) & ACCEPTS and inode in owned:
            yield Listener(pid, path[0] if path else "", int(kind, 16))


def _socket(fd):
    try:
        return re.fullmatch(r"socket:\[(\d+)\]", str(fd.readlink()))
    except FileNotFoundError:  # closed since it was listed
        return None


def _rows(pid, name):
    lines = Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]
    return [line.split() for line in lines]


def _host_and_port(local):
    """proc(5) writes an address as words in the machine's own byte order."""
    words, port = local.split(":")
    swapped = b"".join(bytes.fromhex(words[i : i + 8])[::-1] for i in range(0, len(words), 8))
    address = ipaddress.ip_address(swapped)
    return str(getattr(address, "ipv4_mapped", None) or address), int(port, 16)
