"""Streams completions from one server and notes when what came. Understands nothing while it measures: bytes and their
times are kept, and read when the load is over."""

import asyncio
import json
import time
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any, Self

import aiohttp

from benchmarks.serving.figures import Answer, Chunk
from benchmarks.serving.prompts import Prompt

clock = time.perf_counter
TIMEOUT_S = 900.0


class Server:
    """url: without /v1. model: None for the first that it lists. key: for its Authorization header."""

    def __init__(self, url: str, model: str | None = None, key: str | None = None) -> None:
        self.url = url.rstrip("/")
        self.model = model
        self._headers = {"authorization": f"Bearer {key}"} if key else {}

    async def __aenter__(self) -> Self:
        self._http = aiohttp.ClientSession(
            headers=self._headers,
            # One connection per request, as many clients would have, and no limit of our own.
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
        )
        if self.model is None:
            async with self._http.get(f"{self.url}/v1/models") as response:
                self.model = (await response.json())["data"][0]["id"]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.close()

    async def tokenize(self, text: str) -> list[int]:
        """Raises SystemExit where there is no such route."""
        asked = {"model": self.model, "prompt": text, "add_special_tokens": False}
        async with self._http.post(f"{self.url}/tokenize", json=asked) as response:
            if response.status != 200:
                raise SystemExit(f"{self.url} has no /tokenize: give its tokenizer.json with --tokenizer")
            tokens: list[int] = (await response.json())["tokens"]
            return tokens

    async def stream(self, prompt: Prompt, answer: Answer) -> None:
        """One request to its end. Every failure is noted in the answer; that it was cancelled is, and goes on up."""
        body = json.dumps(self._body(prompt, answer.max_tokens)).encode()
        headers = {"content-type": "application/json"}
        answer.sent = clock()
        try:
            async with self._http.post(f"{self.url}/v1/completions", data=body, headers=headers) as response:
                if response.status != 200:
                    answer.failure = f"http {response.status}: {(await response.text())[:200]}"
                    return
                async for data in response.content.iter_any():
                    answer.parts.append((clock(), data))
        except asyncio.CancelledError:
            answer.failure = "cut"
            raise
        except (aiohttp.ClientError, TimeoutError) as error:
            answer.failure = f"{type(error).__name__}: {error}"[:200]

    def _body(self, prompt: Prompt, max_tokens: int) -> dict[str, Any]:
        return {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }


def read(answer: Answer) -> None:
    """Make an answer's chunks of the server-sent events that came. Tokens of a chunk: by the running count of the usage
    in it, or one for each chunk with text; what the last usage counts beyond the chunks came with the last of them."""
    counted = total = 0
    for at, event in _events(answer.parts):
        if event.get("error"):
            answer.failure = str(event["error"])[:200]
            continue
        usage = event.get("usage") or {}
        answer.prompt_seen = usage.get("prompt_tokens", answer.prompt_seen)
        total = usage.get("completion_tokens", total)
        choices = event.get("choices")
        if not choices:
            continue
        tokens = total - counted if "completion_tokens" in usage else int(bool(choices[0].get("text")))
        if tokens > 0:
            answer.chunks.append(Chunk(at, tokens))
            counted += tokens
    if answer.chunks and total > counted:
        last = answer.chunks[-1]
        answer.chunks[-1] = Chunk(last.at, last.tokens + total - counted)
    answer.parts.clear()


def _events(parts: Iterable[tuple[float, bytes]]) -> Iterator[tuple[float, dict[str, Any]]]:
    """The JSON of each event, with the time at which its last byte came."""
    waiting = b""
    for at, data in parts:
        *events, waiting = (waiting + data).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            for line in event.split(b"\n"):
                text = line.removeprefix(b"data:").strip()
                if line.startswith(b"data:") and text != b"[DONE]":
                    yield at, json.loads(text)
