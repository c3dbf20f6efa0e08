"""Client of the public API, for asyncio (`AsyncClient`) and for plain code (`Client`).

What comes back are frozen values, never protobuf messages. It needs grpcio and protobuf; where the google.rpc
types are importable as well, errors carry their reason and the fields they are about. A call that the server could not
take up is tried again, on another server where there are several; one whose answer has begun never is.
"""

from collections.abc import AsyncIterator, Iterator, Sequence
from types import TracebackType

import grpc

from crossdock import wire
from crossdock.credentials import NOBODY, Credentials
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
        try:
            return wire.answer(
                self._stub.Generate(request, timeout=wire.seconds(how.timeout_s), metadata=self._metadata)
            )
        except grpc.RpcError as error:
            raise request_error(error) from None

    def stream(self, prompt: Prompt, how: Generation | None = None) -> Iterator[Delta]:
        """Deltas as they are computed. Closing the iterator cancels the request."""
        how = how or Generation()
        call = self._stub.GenerateStream(
            pb.GenerateStreamRequest(spec=wire.spec(prompt, how)),
            timeout=wire.seconds(how.timeout_s),
            metadata=self._metadata,
        )
        try:
            for response in call:
                yield from wire.deltas(response)
        except grpc.RpcError as error:
            raise request_error(error) from None
        finally:
            call.cancel()

    def tokenize(self, prompt: str | Sequence[Message], *, model: str = "") -> tuple[int, ...]:
        try:
            return tuple(
                self._stub.Tokenize(wire.tokenize_request(prompt, model), metadata=self._metadata).token_ids
            )
        except grpc.RpcError as error:
            raise request_error(error) from None

    def detokenize(
        self, token_ids: Sequence[int], *, model: str = "", include_special_tokens: bool = False
    ) -> str:
        request = pb.DetokenizeRequest(
            model=model, token_ids=token_ids, include_special_tokens=include_special_tokens
        )
        try:
            return str(self._stub.Detokenize(request, metadata=self._metadata).text)
        except grpc.RpcError as error:
            raise request_error(error) from None

    def models(self) -> tuple[Model, ...]:
        try:
            return wire.models(self._stub.ListModels(pb.ListModelsRequest(), metadata=self._metadata))
        except grpc.RpcError as error:
            raise request_error(error) from None


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
        try:
            return wire.answer(
                await self._stub.Generate(
                    request, timeout=wire.seconds(how.timeout_s), metadata=self._metadata
                )
            )
        except grpc.RpcError as error:
            raise request_error(error) from None

    async def stream(self, prompt: Prompt, how: Generation | None = None) -> AsyncIterator[Delta]:
        """Deltas as they are computed. Closing the iterator cancels the request."""
        how = how or Generation()
        call = self._stub.GenerateStream(
            pb.GenerateStreamRequest(spec=wire.spec(prompt, how)),
            timeout=wire.seconds(how.timeout_s),
            metadata=self._metadata,
        )
        try:
            async for response in call:
                for delta in wire.deltas(response):
                    yield delta
        except grpc.RpcError as error:
            raise request_error(error) from None
        finally:
            call.cancel()

    async def tokenize(self, prompt: str | Sequence[Message], *, model: str = "") -> tuple[int, ...]:
        try:
            return tuple(
                (
                    await self._stub.Tokenize(wire.tokenize_request(prompt, model), metadata=self._metadata)
                ).token_ids
            )
        except grpc.RpcError as error:
            raise request_error(error) from None

    async def detokenize(
        self, token_ids: Sequence[int], *, model: str = "", include_special_tokens: bool = False
    ) -> str:
        request = pb.DetokenizeRequest(
            model=model, token_ids=token_ids, include_special_tokens=include_special_tokens
        )
        try:
            return str((await self._stub.Detokenize(request, metadata=self._metadata)).text)
        except grpc.RpcError as error:
            raise request_error(error) from None

    async def models(self) -> tuple[Model, ...]:
        try:
            return wire.models(await self._stub.ListModels(pb.ListModelsRequest(), metadata=self._metadata))
        except grpc.RpcError as error:
            raise request_error(error) from None
