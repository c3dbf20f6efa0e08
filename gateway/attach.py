"""The gateway's end of the stream to one worker: dial, greet, read, dial again.

Owns the channel and what waits to be sent. Knows the messages of both roles by their class only; what they mean is
the worker pool's business. A stream that breaks is reported once, and everything still unsent is dropped: whoever
sent it learns that the worker is lost.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import grpc

from crossdock.worker.v1 import worker_pb2 as pb
from crossdock.worker.v1.worker_pb2_grpc import DecodeServiceStub, PrefillServiceStub
from service.channel import open_channel
from service.outbox import Outbox
from service.reports import Response
from service.worker_rim import PROTOCOL_VERSION

OUTBOX_MESSAGES_MAX = 65_536
REDIAL_FIRST_S = 0.05
REDIAL_MAX_S = 0.25

Request: TypeAlias = pb.PrefillServiceAttachRequest | pb.DecodeServiceAttachRequest


class Listener(Protocol):
    """Who wants to know what happens on the stream. Called on the event loop, never waited for."""

    def on_message(self, message: Response) -> None: ...
    def on_broken(self, detail: str) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """How one role is spoken to."""

    request: Callable[..., Request]
    open_stream: Callable[[grpc.aio.Channel, AsyncIterator[Any]], AsyncIterator[Response]]


PREFILL = Dialect(
    request=pb.PrefillServiceAttachRequest,
    open_stream=lambda channel, requests: PrefillServiceStub(channel).Attach(requests),
)
DECODE = Dialect(
    request=pb.DecodeServiceAttachRequest,
    open_stream=lambda channel, requests: DecodeServiceStub(channel).Attach(requests),
)


class Attachment:
    """hello: how this gateway introduces itself, at each new stream."""

    def __init__(
        self,
        address: str,
        dialect: Dialect,
        hello: pb.Hello,
        listener: Listener,
    ) -> None:
        self._address = address
        self._dialect = dialect
        self._hello = hello
        self._listener = listener
        self._outbox: Outbox[Request] | None = None

    def send(self, message: Request) -> None:
        """Queue a message on the current stream; without one it is dropped, and the listener has been told."""
        if self._outbox is not None:
            self._outbox.put(message)

    async def run(self) -> None:
        """Keep a stream open until cancelled."""
        channel = open_channel(self._address)
        pause_s = REDIAL_FIRST_S
        try:
            while True:
                detail, spoke = await self._converse(channel)
                self._listener.on_broken(detail)
                pause_s = REDIAL_FIRST_S if spoke else min(2 * pause_s, REDIAL_MAX_S)
                await asyncio.sleep(pause_s)
        finally:
            await channel.close()

    async def _converse(self, channel: grpc.aio.Channel) -> tuple[str, bool]:
        """One stream from hello to its end: why it ended, and whether the worker ever spoke on it."""
        outbox: Outbox[Request] = Outbox(OUTBOX_MESSAGES_MAX)
        outbox.put(self._dialect.request(hello=self._hello))
        self._outbox = outbox
        spoke = False
        try:
            async for message in self._dialect.open_stream(channel, outbox.drain()):
                spoke = True
                self._listener.on_message(message)
        except grpc.aio.AioRpcError as error:
            return error.code().name, spoke
        finally:
            outbox.close()
            self._outbox = None
        return "the worker ended the stream", spoke


def make_hello(gateway_id: str, gateway_epoch: int) -> pb.Hello:
    return pb.Hello(protocol_version=PROTOCOL_VERSION, gateway_id=gateway_id, gateway_epoch=gateway_epoch)
