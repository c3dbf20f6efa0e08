"""The public HTTP face: OpenAI's paths over the frontend, streamed as server-sent events or whole.

The process mounts `openai_app` in its HTTP server. Routes translate, delegate and translate back; limits are
validation's, statuses service.status's. Nothing is sent before the first token is there, so that a refusal
still has its own status.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, AsyncExitStack, aclosing
from functools import partial
from importlib.metadata import version
from typing import TypeVar

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from gateway.access import Access
from gateway.admission import Held
from gateway.cost import SCORE_BYTES, answer_bytes
from gateway.disconnect import CancelOnDisconnect
from gateway.event_stream import EventStream
from gateway.frontend import Frontend
from gateway.generation import Delta
from gateway.http_access import TENANT, HttpAccess
from gateway.http_request_id import REQUEST_ID, REQUEST_ID_KEY, HttpRequestId
from gateway.json_fields import JsonObject
from gateway.merge import merge
from gateway.openai_answers import Answer
from gateway.openai_dialects import ChatDialect, CompletionDialect, Dialect
from gateway.openai_errors import JSON_TYPE, error_response, plain_error
from gateway.openai_names import USUAL_NAMES
from gateway.openai_schema import (
    CHOICES_OF_A_CALL_MAX,
    Call,
    chat_call,
    completion_call,
    detokenize_request,
    tokenize_request,
)
from gateway.request import ModelCard
from gateway.request import Request as Accepted
from gateway.validation import REQUEST_ID_CHARACTERS_MAX, check_model
from service.errors import (
    FieldViolation,
    InternalFault,
    InvalidRequest,
    ServiceError,
    TooLarge,
    Unavailable,
)
from service.metrics import CONTENT_TYPE

# Room for the number of the prompt that each request of a call has behind its id.
_GIVEN_ID_CHARACTERS_MAX = REQUEST_ID_CHARACTERS_MAX - len(f"-{CHOICES_OF_A_CALL_MAX}")
_INLINE_BYTES_MAX = 65_536

T = TypeVar("T")


def openai_app(frontend: Frontend, access: Access, *, body_bytes_max: int) -> Starlette:
    """The ASGI application. access: who may ask what. body_bytes_max: of one request."""
    face = _Face(frontend, body_bytes_max)
    app = Starlette(
        routes=[
            Route("/v1/completions", face.completions, methods=["POST"]),
            Route("/v1/chat/completions", face.chat_completions, methods=["POST"]),
            Route("/v1/models", face.models),
            Route("/v1/models/{name:path}", face.model),
            Route("/tokenize", face.tokenize, methods=["POST"]),
            Route("/detokenize", face.detokenize, methods=["POST"]),
            Route("/tokenizer_info", face.tokenizer_info),
            Route("/health", face.health),
            Route("/ping", face.health),
            Route("/metrics", face.metrics),
            Route("/version", face.version),
        ],
        middleware=[
            Middleware(HttpRequestId, new_id=face.new_id, characters_max=_GIVEN_ID_CHARACTERS_MAX),
            Middleware(HttpAccess, access=access),
            Middleware(CancelOnDisconnect),
        ],
        exception_handlers={
            ServiceError: _on_refusal,
            HTTPException: _on_http_error,
            Exception: _on_fault,
        },
    )
    app.router.redirect_slashes = False  # to wherever the client's own Host header says
    return app


class _Face:
    """The routes."""

    def __init__(self, frontend: Frontend, body_bytes_max: int) -> None:
        self._frontend = frontend
        self._body_bytes_max = body_bytes_max

    def new_id(self) -> str:
        return self._frontend.new_id()

    async def completions(self, request: Request) -> Response:
        return await self._answer(request, completion_call, CompletionDialect())

    async def chat_completions(self, request: Request) -> Response:
        return await self._answer(request, chat_call, ChatDialect())

    async def models(self, request: Request) -> Response:
        return _json({"object": "list", "data": [self._about(self._frontend.card())]})

    async def model(self, request: Request) -> Response:
        card, name = self._frontend.card(), request.path_params["name"]
        if not name:
            raise HTTPException(404)
        check_model(name, card)
        return _json(self._about(card))

    async def tokenize(self, request: Request) -> Response:
        with self._hold(request) as held:
            asked = await self._read(request, held, tokenize_request)
            token_ids = await self._frontend.tokenize(asked, held=held)
        length = self._frontend.card().tokens_max()
        return _json({"tokens": token_ids, "count": len(token_ids), "max_model_len": length})

    async def detokenize(self, request: Request) -> Response:
        with self._hold(request) as held:
            asked = await self._read(request, held, detokenize_request)
            return _json({"prompt": await self._frontend.detokenize(asked, held=held)})

    async def tokenizer_info(self, request: Request) -> Response:
        """As vLLM has it: what lm-eval needs to split texts by /tokenize instead of by files of its own."""
        tokenizer = self._frontend.tokenizer
        about = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": self._frontend.card().tokens_max(),
            "chat_template": tokenizer.chat_template,
            "eos_token": None,
            **tokenizer.special_tokens,
        }
        return _json(about)

    async def health(self, request: Request) -> Response:
        if not self._frontend.ready():
            raise Unavailable("not ready for requests")
        return _json({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        return Response(self._frontend.metrics.render(), headers={"content-type": CONTENT_TYPE})

    async def version(self, request: Request) -> Response:
        return _json({"version": version("crossdock")})

    async def _answer(
        self, request: Request, read: Callable[[JsonObject, str], Call], dialect: Dialect
    ) -> Response:
        """All prompts of a call share its place, and each takes its own turn."""
        request_id = getattr(request.state, REQUEST_ID)
        async with AsyncExitStack() as stack:
            held = stack.enter_context(self._hold(request))
            call = await self._read(request, held, lambda body: read(body, request_id))
            accepted = await self._accept(request, held, call)
            created = int(self._frontend.wall().timestamp())
            answer = Answer(call, accepted, self._frontend.tokenizer, dialect, id=request_id, created=created)
            deltas = merge([self._frontend.generate(each) for each in accepted])
            await stack.enter_async_context(aclosing(deltas))
            if call.stream:
                first = await anext(deltas)
                return EventStream(answer, first, deltas, until_sent=stack.pop_all())
            size = 0
            async for index, delta in deltas:
                answer.keep(index, delta)
                size += _size(delta)
            body = await self._frontend.reading.run(
                lambda: orjson.dumps(answer.whole()), tenant=held.tenant, size_bytes=size
            )
            return _WholeAnswer(body, until_sent=stack.pop_all())
        raise AssertionError("a call ends with an answer or a refusal")

    async def _accept(self, request: Request, held: Held, call: Call) -> list[Accepted]:
        """request: is told how the client names the fields of what is looked at."""
        request.state.names = call.names[0]
        size = sum(spec.ByteSize() for spec in call.specs)
        self._frontend.claim(held, call.specs, None, message_bytes=size)
        accept = partial(self._frontend.accept, held=held, streamed=call.stream, sharing=len(call.specs))
        accepted = []
        for spec, names in zip(call.specs, call.names, strict=True):
            request.state.names = names
            accepted.append(await accept(spec, None))
        self._frontend.settle(held, accepted)
        return accepted

    def _hold(self, request: Request) -> AbstractContextManager[Held]:
        return self._frontend.hold(getattr(request.state, TENANT))

    def _about(self, card: ModelCard) -> JsonObject:
        return {
            "id": card.name,
            "object": "model",
            "created": int(self._frontend.wall().timestamp()),
            "owned_by": "crossdock",
            "root": card.name,
            "max_model_len": card.tokens_max(),
        }

    async def _read(self, request: Request, held: Held, translate: Callable[[JsonObject], T]) -> T:
        """The translated body, which counts as it comes. A large one is read on another thread.

        Only what says that it is JSON is read: pages in a browser may send anything else to any server.
        """
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != JSON_TYPE:
            raise HTTPException(415, f"content-type: must be {JSON_TYPE}")
        if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
            raise HTTPException(415, "content-encoding: must be identity", {"accept-encoding": "identity"})
        self._require_size(int(request.headers.get("content-length", "0")))
        body = bytearray()
        async for part in request.stream():
            body += part
            self._require_size(len(body))
            held.claim(message_bytes=len(body))
        return await self._frontend.reading.run(
            lambda: translate(_object(body)),
            tenant=held.tenant,
            size_bytes=len(body),
            inline_bytes_max=_INLINE_BYTES_MAX,
        )

    def _require_size(self, body_bytes: int) -> None:
        if body_bytes > self._body_bytes_max:
            raise TooLarge(FieldViolation(field="body", description=f"at most {self._body_bytes_max} bytes"))


class _WholeAnswer(Response):
    """until_sent: what is let go of then."""

    media_type = JSON_TYPE

    def __init__(self, body: bytes, *, until_sent: AsyncExitStack) -> None:
        super().__init__(body)
        self._until_sent = until_sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._until_sent:
            await super().__call__(scope, receive, send)


def _size(delta: Delta) -> int:
    """Bytes that are looked at when it is written."""
    scores = 0 if delta.scores is None else len(delta.scores.logprobs) * (1 + delta.scores.width)
    return SCORE_BYTES * scores + sum(answer_bytes(1, len(token.top)) for token in delta.tokens)


def _object(body: bytearray) -> JsonObject:
    try:
        content = orjson.loads(body)
    except orjson.JSONDecodeError:
        raise _wrong_body("must be JSON in UTF-8") from None
    if not isinstance(content, dict):
        raise _wrong_body("must be a JSON object")
    return content


def _json(content: JsonObject) -> Response:
    return Response(orjson.dumps(content), media_type=JSON_TYPE)


def _wrong_body(rule: str) -> InvalidRequest:
    return InvalidRequest(FieldViolation(field="body", description=rule))


async def _on_refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, ServiceError)
    return error_response(error, getattr(request.state, "names", USUAL_NAMES))


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = error.detail.partition(":")[0].lower().replace(" ", "_")
    return plain_error(error.status_code, error.detail, code, error.headers)


async def _on_fault(request: Request, error: Exception) -> Response:
    """The server logs it, and answers outside all middleware."""
    response = error_response(InternalFault("internal error"))
    response.headers[REQUEST_ID_KEY] = getattr(request.state, REQUEST_ID)
    return response
