"""The gateway's end of the stream to one worker: dial, greet, read, dial again.

Owns the channels and what waits to be sent. Knows the messages of both roles by their class only; what they mean is
the worker pool's business. A stream that breaks is reported once, and everything still unsent is dropped: whoever
sent it learns that the worker is lost. A worker that talks nonsense is a broken stream.
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
from service.reports import BadReport, Response
from service.worker_rim import PROTOCOL_VERSION

OUTBOX_MESSAGES_MAX = 65_536
REDIAL_FIRST_S = 0.05
REDIAL_MAX_S = 0.25

Stream: TypeAlias = grpc.aio.StreamStreamCall[Any, Any]
Metadata = tuple[tuple[str, str], ...]
Request: TypeAlias = pb.PrefillServiceAttachRequest | pb.DecodeServiceAttachRequest


class Listener(Protocol):
    """Who wants to know what happens on the stream. Called on the event loop, never waited for."""

    def on_message(self, message: Response) -> None:
        """Raises BadReport."""
        ...

    def on_broken(self, detail: str) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """How one role is spoken to, and over what. credential: metadata that each stream begins with."""

    request: Callable[..., Request]
    open_stream: Callable[[grpc.aio.Channel, AsyncIterator[Any], Metadata], Stream]
    open_channel: Callable[[str], grpc.aio.Channel] = open_channel
    credential: Metadata = ()


PREFILL = Dialect(
    request=pb.PrefillServiceAttachRequest,
    open_stream=lambda channel, requests, metadata: PrefillServiceStub(channel).Attach(
        requests, metadata=metadata
    ),
)
DECODE = Dialect(
    request=pb.DecodeServiceAttachRequest,
    open_stream=lambda channel, requests, metadata: DecodeServiceStub(channel).Attach(
        requests, metadata=metadata
    ),
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
        self._call: Stream | None = None

    def send(self, message: Request) -> None:
        """Queue a message on the current stream; without one it is dropped, and the listener has been told. A worker
        that does not take what waits for it is cut off."""
        if self._outbox is None or self._call is None:
            return
        self._outbox.put(message)
        if self._outbox.closed:
            self._call.cancel()

    async def run(self) -> None:
        """Keep a stream open until cancelled."""
        pause_s = REDIAL_FIRST_S
        while True:
            detail, spoke = await self._dial()
            self._listener.on_broken(detail)
            pause_s = REDIAL_FIRST_S if spoke else min(2 * pause_s, REDIAL_MAX_S)
            await asyncio.sleep(pause_s)

    async def _dial(self) -> tuple[str, bool]:
        """One stream over a channel of its own: certificates may have been replaced since the last one."""
        try:
            channel = self._dialect.open_channel(self._address)
        except OSError as error:
            return f"certificates cannot be read: {error.strerror}", False
        try:
            return await self._converse(channel)
        finally:
            await channel.close()

    async def _converse(self, channel: grpc.aio.Channel) -> tuple[str, bool]:
        """One stream from hello to its end: why it ended, and whether the worker ever spoke on it."""
        outbox: Outbox[Request] = Outbox(OUTBOX_MESSAGES_MAX)
        outbox.put(self._dialect.request(hello=self._hello))
        spoke = False
        call = self._dialect.open_stream(channel, outbox.drain(), self._dialect.credential)
        self._outbox, self._call = outbox, call
        try:
            async for message in call:
                spoke = True
                self._listener.on_message(message)
        except grpc.aio.AioRpcError as error:
            return error.code().name, spoke
        except BadReport as nonsense:
            return str(nonsense), False
        except asyncio.CancelledError:
            if _asked_to_end():
                raise
            return "the stream was cut on this side", spoke
        finally:
            call.cancel()
            outbox.close()
            self._outbox = self._call = None
        return "the worker ended the stream", spoke


def _asked_to_end() -> bool:
    """gRPC ends a call that failed on our side with a cancellation that nobody asked for."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def make_hello(gateway_id: str, gateway_epoch: int) -> pb.Hello:
    return pb.Hello(protocol_version=PROTOCOL_VERSION, gateway_id=gateway_id, gateway_epoch=gateway_epoch)
