"""Which keys may connect: answers libzmq's question about each new connection (ZAP, ZeroMQ RFC 27).

One for each context, asked by libzmq itself over an inproc socket, before any message of the peer is
delivered. Knows keys and their names; never sees a message.
"""

from collections.abc import Mapping
from typing import Any

import zmq
from zmq.utils import z85

from kvtransfer.zmq_socket import ZAP_DOMAIN, Socket

NAME_PROPERTY = "User-Id"
"""Under this name libzmq shows the key's name with every message of the connection."""


class AllowList:
    """trusted: name -> public key. Everything but CURVE with one of these keys is refused."""

    def __init__(self, context: "zmq.Context[Any]", trusted: Mapping[str, bytes]) -> None:
        self._names = {key: name for name, key in trusted.items()}
        self.socket: Socket = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind("inproc://zeromq.zap.01")

    def answer(self) -> None:
        """Answer what was asked by now."""
        while True:
            try:
                version, request_id, domain, _, _, mechanism, *credentials = self.socket.recv_multipart(
                    zmq.NOBLOCK
                )
            except zmq.Again:
                return
            name = self._name(domain, mechanism, credentials)
            status, text = (b"400", b"refused") if name is None else (b"200", b"OK")
            self.socket.send_multipart((version, request_id, status, text, (name or "").encode(), b""))

    def close(self) -> None:
        self.socket.close(0)

    def _name(self, domain: bytes, mechanism: bytes, credentials: list[bytes]) -> str | None:
        if (domain, mechanism, len(credentials)) != (ZAP_DOMAIN, b"CURVE", 1):
            return None
        return self._names.get(z85.encode(credentials[0]))
