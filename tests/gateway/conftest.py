"""A scripted source of tokens, and a frontend over it with the default model's own tokenizer."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from gateway.access import Access
from gateway.admission import Admission, Bounds
from gateway.frontend import Frontend
from gateway.openai_http import openai_app
from gateway.request import EndReason, ModelCard, Request, Token, TokenBatch
from gateway.tokenizer import Tokenizer, load_tokenizer
from service.config import DEFAULT_MODEL
from service.metrics import Metrics
from service.model_source import resolve_model
from service.scores import Scores
from tests.fakes.gguf_vocabularies import write_scored

GOLDEN = Path(__file__).parents[1] / "data" / "golden_smollm2_fp32.jsonl"

BODY_BYTES_MAX = 200_000

Step = TokenBatch | Exception | asyncio.Event


class ScriptedSource:
    """Plays its steps for each request: a batch is yielded, an exception raised, an event waited for."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps = steps
        self.requests: list[Request] = []
        self.started = asyncio.Event()
        self.closed = asyncio.Event()

    async def run(self, request: Request, unread: Collection[int]) -> AsyncGenerator[TokenBatch, None]:
        self.requests.append(request)
        self.unread = unread
        self.started.set()
        try:
            for step in self.steps:
                if isinstance(step, asyncio.Event):
                    await step.wait()
                elif isinstance(step, TokenBatch):
                    yield step
                else:
                    raise step
        finally:
            self.closed.set()


def make_batches(
    token_ids: Sequence[int],
    *,
    end: EndReason | None = EndReason.LENGTH,
    size: int = 1,
    first: int = 0,
    alternatives: int | None = None,
    cached_tokens: int = 0,
    scores: Scores | None = None,
) -> list[TokenBatch]:
    """An answer in batches of `size` tokens. alternatives: how many each token brings."""
    tokens = [
        Token(
            position=first + index,
            token_id=token_id,
            logprob=None if alternatives is None else -0.5,
            top=tuple((token_id + rank, -0.5 - rank) for rank in range(alternatives or 0)),
        )
        for index, token_id in enumerate(token_ids)
    ]
    starts = range(0, len(tokens), size)
    return [
        TokenBatch(
            tokens=tuple(tokens[start : start + size]),
            end=end if start + size >= len(tokens) else None,
            cached_tokens=cached_tokens,
            scores=scores if start == 0 else None,
        )
        for start in starts
    ]


@pytest.fixture(scope="session")
def model_file() -> Path:
    return resolve_model(DEFAULT_MODEL)


@pytest.fixture(scope="session")
def tokenizer(model_file: Path) -> Tokenizer:
    return load_tokenizer(model_file)


@pytest.fixture(scope="session")
def scored(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer like SentencePiece's, with a start token, of a few pieces and all bytes."""
    return load_tokenizer(write_scored(tmp_path_factory.mktemp("scored") / "scored.gguf"))


@pytest.fixture(scope="session")
def golden() -> list[dict[str, Any]]:
    return [json.loads(line) for line in GOLDEN.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="session")
def card(tokenizer: Tokenizer) -> ModelCard:
    return ModelCard(
        name="smol",
        vocab_size=tokenizer.vocab_size,
        max_model_len=512,
        eos_token_ids=tokenizer.eos_token_ids,
        digest="ab12",
        capacity_tokens=None,
    )


@pytest.fixture(scope="session")
def batches() -> Callable[..., list[TokenBatch]]:
    return make_batches


@pytest.fixture(scope="session")
def scripted() -> Callable[..., ScriptedSource]:
    return lambda *steps: ScriptedSource(steps)


def make_admission(**bounds: Any) -> Admission:
    return Admission(Bounds(**{"requests": 1000, **bounds}), clock=time.monotonic)


@pytest.fixture
def admission_of() -> Callable[..., Admission]:
    """Of these bounds."""
    return make_admission


@pytest.fixture(scope="session")
def frontend_over(card: ModelCard, tokenizer: Tokenizer) -> Callable[..., Frontend]:
    """A frontend over a source. Its clock reads 0, 1, 2, ..., its ids are "id-1", "id-2", ..., its seed is
    7."""

    def make(source: ScriptedSource, **changes: Any) -> Frontend:
        ids, ticks = count(1), count()
        given = {
            "card": lambda: card,
            "tokenizer": tokenizer,
            "source": source,
            "metrics": Metrics(),
            "new_id": lambda: f"id-{next(ids)}",
            "new_seed": lambda: 7,
            "monotonic": lambda: float(next(ticks)),
            "wall": lambda: datetime(2030, 1, 2, tzinfo=UTC),
            "ready": lambda: True,
            "admission": make_admission(),
        }
        return Frontend(**{**given, **changes})

    return make


@asynccontextmanager
async def open_client(frontend: Frontend) -> AsyncIterator[httpx.AsyncClient]:
    app = openai_app(frontend, Access(), body_bytes_max=BODY_BYTES_MAX)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        yield client


@pytest.fixture(scope="session")
def client_of() -> Callable[..., Any]:
    """An HTTP client of a frontend that takes bodies of at most 200,000 bytes."""
    return open_client


@pytest.fixture(scope="session")
def post(frontend_over: Callable[..., Frontend]) -> Callable[..., Any]:
    """Posts JSON, or bytes that are said to be, to a fresh application over a source. changes: of its frontend."""

    async def post(
        source: ScriptedSource, path: str, body: Any, *, changes: dict[str, Any] | None = None, **given: Any
    ) -> httpx.Response:
        content = body if isinstance(body, bytes) else orjson.dumps(body)
        async with open_client(frontend_over(source, **(changes or {}))) as client:
            headers = {"content-type": "application/json", **given.pop("headers", {})}
            return await client.post(path, content=content, headers=headers, **given)

    return post
