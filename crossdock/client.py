"""Client of the public API, for asyncio (`AsyncClient`) and for plain code (`Client`).

What comes back are frozen values, never protobuf messages. It needs grpcio and protobuf; where the google.rpc
types are importable as well, errors carry their reason and the fields they are about. A call that the server could not
take up is tried again, on another server where there are several; one whose answer has begun never is.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, TypeVar

import grpc

from crossdock import wire
from crossdock.credentials import NOBODY, Credentials
from crossdock.retries import Retries
from crossdock.seeds import choice_seed
from crossdock.targets import Target
from crossdock.v1 import inference_pb2 as pb
from crossdock.v1 import inference_pb2_grpc as pb_grpc
from crossdock.values import (
    Answer,
    Choice,
    Delta,
    FinishReason,
    Generation,
    Message,
    Model,
    Prompt,
    RequestError,
    TokenLogprob,
    Usage,
    Violation,
)
from crossdock.wire import request_error

__all__ = [
    "DEFAULT_TARGET",
    "Answer",
    "AsyncClient",
    "Choice",
    "Client",
    "Credentials",
    "Delta",
    "FinishReason",
    "Generation",
    "Message",
    "Model",
    "Prompt",
    "RequestError",
    "TokenLogprob",
    "Usage",
    "Violation",
    "choice_seed",
    "request_error",
]

DEFAULT_TARGET = "127.0.0.1:50051"

T = TypeVar("T")


class Client:
    """Blocking client. Safe to use from several threads. target: as in `crossdock.targets`. channel: one of your own
    instead, which is closed as well."""

    def __init__(
        self,
        target: Target = DEFAULT_TARGET,
        *,
        credentials: Credentials = NOBODY,
        channel: grpc.Channel | None = None,
    ) -> None:
        self._channel = channel or credentials.channel(target)
        self._metadata = credentials.metadata()
        self._retries = Retries()
        self._stub = pb_grpc.InferenceServiceStub(self._channel)

    def __enter__(self) -> "Client":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._channel.close()

    def generate(self, prompt: Prompt, how: Generation | None = None) -> Answer:
        """The whole answer at once. Raises RequestError, as every method here."""
        how = how or Generation()
        request = pb.GenerateRequest(spec=wire.spec(prompt, how))
        return wire.answer(self._call(self._stub.Generate, request, how.timeout_s))

    def stream(self, prompt: Prompt, how: Generation | None = None) -> Iterator[Delta]:
        """Deltas as they are computed. Closing the iterator cancels the request."""
        how = how or Generation()
        request = pb.GenerateStreamRequest(spec=wire.spec(prompt, how))
        tries = self._retries.begin(wire.seconds(how.timeout_s))
        while True:
            call = self._stub.GenerateStream(request, timeout=tries.left_s(), metadata=self._metadata)
            try:
                for response in call:
                    tries.begun()
                    yield from wire.deltas(response)
                tries.succeeded()
                return
            except grpc.RpcError as error:
                pause = tries.pause_s(error)
            finally:
                call.cancel()
            time.sleep(pause)

    def tokenize(self, prompt: str | Sequence[Message], *, model: str = "") -> tuple[int, ...]:
        request = wire.tokenize_request(prompt, model)
        return tuple(self._call(self._stub.Tokenize, request).token_ids)

    def detokenize(
        self, token_ids: Sequence[int], *, model: str = "", include_special_tokens: bool = False
    ) -> str:
        request = pb.DetokenizeRequest(
            model=model, token_ids=token_ids, include_special_tokens=include_special_tokens
        )
        return str(self._call(self._stub.Detokenize, request).text)

    def models(self) -> tuple[Model, ...]:
        return wire.models(self._call(self._stub.ListModels, pb.ListModelsRequest()))

    def _call(self, method: Callable[..., T], request: Any, timeout_s: float | None = None) -> T:
        tries = self._retries.begin(wire.seconds(timeout_s))
        while True:
            try:
                answer = method(request, timeout=tries.left_s(), metadata=self._metadata)
            except grpc.RpcError as error:
                pause = tries.pause_s(error)
            else:
                tries.succeeded()
                return answer
            time.sleep(pause)


class AsyncClient:
    """Client for asyncio. To be made and used in one event loop. target: as in `crossdock.targets`."""

    def __init__(
        self,
        target: Target = DEFAULT_TARGET,
        *,
        credentials: Credentials = NOBODY,
        channel: grpc.aio.Channel | None = None,
    ) -> None:
        self._channel = channel or credentials.aio_channel(target)
        self._metadata = credentials.metadata()
        self._retries = Retries()
        self._stub = pb_grpc.InferenceServiceStub(self._channel)

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._channel.close()

    async def generate(self, prompt: Prompt, how: Generation | None = None) -> Answer:
        """The whole answer at once. Raises RequestError, as every method here."""
        how = how or Generation()
        request = pb.GenerateRequest(spec=wire.spec(prompt, how))
        return wire.answer(await self._call(self._stub.Generate, request, how.timeout_s))

    async def stream(self, prompt: Prompt, how: Generation | None = None) -> AsyncIterator[Delta]:
        """Deltas as they are computed. Closing the iterator cancels the request."""
        how = how or Generation()
        request = pb.GenerateStreamRequest(spec=wire.spec(prompt, how))
        tries = self._retries.begin(wire.seconds(how.timeout_s))
        while True:
            call = self._stub.GenerateStream(request, timeout=tries.left_s(), metadata=self._metadata)
            try:
                async for response in call:
                    tries.begun()
                    for delta in wire.deltas(response):
                        yield delta
                tries.succeeded()
                return
            except grpc.RpcError as error:
                pause = tries.pause_s(error)
            finally:
                call.cancel()
            await asyncio.sleep(pause)

    async def tokenize(self, prompt: str | Sequence[Message], *, model: str = "") -> tuple[int, ...]:
        request = wire.tokenize_request(prompt, model)
        return tuple((await self._call(self._stub.Tokenize, request)).token_ids)

    async def detokenize(
        self, token_ids: Sequence[int], *, model: str = "", include_special_tokens: bool = False
    ) -> str:
        request = pb.DetokenizeRequest(
            model=model, token_ids=token_ids, include_special_tokens=include_special_tokens
        )
        return str((await self._call(self._stub.Detokenize, request)).text)

    async def models(self) -> tuple[Model, ...]:
        return wire.models(await self._call(self._stub.ListModels, pb.ListModelsRequest()))

    async def _call(
        self, method: Callable[..., Awaitable[T]], request: Any, timeout_s: float | None = None
    ) -> T:
        tries = self._retries.begin(wire.seconds(timeout_s))
        while True:
            try:
                answer = await method(request, timeout=tries.left_s(), metadata=self._metadata)
            except grpc.RpcError as error:
                pause = tries.pause_s(error)
            else:
                tries.succeeded()
                return answer
            await asyncio.sleep(pause)
