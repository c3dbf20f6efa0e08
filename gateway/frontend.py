"""What the gRPC and the HTTP face share: one way from a client's words to an answer, and its measurement.

Servicer and HTTP routes call it and translate; the process builds it. It knows no wire: no statuses, no JSON,
no streams but its own deltas.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from datetime import datetime
from typing import TypeVar

from crossdock.v1 import inference_pb2
from gateway import prompt, validation
from gateway.generation import Delta, TokenSource, generate
from gateway.guide_check import refuse_guides
from gateway.request import ModelCard, Request
from gateway.tokenizer import Tokenizer
from service.errors import ServiceError
from service.guides import Guide
from service.metrics import Metrics
from service.timeline import Instant, Timeline

# Up to here, tokenising costs the event loop less than the way to another thread and back.
_INLINE_BYTES_MAX = 2048

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Frontend:
    """card: the served model as it is known now. ready: whether new work is welcome. monotonic: seconds;
    wall: for dates that people read. require_room: raises Exhausted when nothing of a tenant would be taken.
    require_guide: raises InvalidRequest for a guide that cannot be followed, Exhausted when it cannot be told now."""

    card: Callable[[], ModelCard]
    tokenizer: Tokenizer
    source: TokenSource
    metrics: Metrics
    new_id: Callable[[], str]
    new_seed: Callable[[], int]
    monotonic: Callable[[], float]
    wall: Callable[[], datetime]
    ready: Callable[[], bool]
    require_room: Callable[[str], None]
    require_guide: Callable[[Guide, str], Awaitable[None]] = refuse_guides

    async def accept(
        self,
        spec: inference_pb2.GenerationSpec,
        time_left_s: float | None,
        *,
        tenant: str,
        streamed: bool = False,
    ) -> Request:
        """tenant: who asks, as the credential says. Raises Exhausted, or as validation.accept. Long texts are
        tokenised on another thread."""
        self.require_room(tenant)
        card, now, today = self.card(), self.monotonic(), self.wall()

        def work() -> Request:
            return validation.accept(
                spec,
                card,
                self.tokenizer,
                new_id=self.new_id,
                new_seed=self.new_seed,
                now=now,
                today=today,
                time_left_s=time_left_s,
                tenant=tenant,
                streamed=streamed,
            )

        request = await off_loop(work, 0 if spec.HasField("token_ids") else spec.ByteSize())
        if request.guide is not None:
            await self.require_guide(request.guide, tenant)
        return request

    async def generate(self, request: Request) -> AsyncGenerator[Delta, None]:
        """The answer. Raises ServiceError; closing it cancels the work. Every end is counted once."""
        timeline = Timeline()
        timeline.mark(Instant.ACCEPTED, self.monotonic())
        outcome, generated = "cancelled", 0
        last: float | None = None
        try:
            async with aclosing(generate(request, self.source, self.tokenizer)) as deltas:
                async for delta in deltas:
                    if delta.tokens:
                        now = self.monotonic()
                        if last is None:
                            timeline.mark(Instant.FIRST_TOKEN, now)
                        else:
                            self.metrics.observe_gap(now - last)
                        last = now
                    generated += len(delta.tokens) + delta.unseen_tokens
                    if delta.finish is not None:
                        outcome = delta.finish.reason.name.lower()
                        timeline.mark(Instant.FINISHED, self.monotonic())
                    yield delta
        except ServiceError as error:
            outcome = error.reason.lower()
            raise
        except Exception:
            outcome = "internal"
            raise
        finally:
            self._measure(request, timeline, outcome, generated)

    async def tokenize(self, asked: inference_pb2.TokenizeRequest) -> tuple[int, ...]:
        """Raises ModelNotFound or InvalidRequest. An empty text has no tokens, unless the model starts with
        one."""
        card = self.card()
        validation.check_tokenize(asked, card, self.tokenizer)
        tokens_max, today = card.max_model_len, self.wall()

        def work() -> tuple[int, ...]:
            if asked.WhichOneof("input") == "chat":
                return prompt.encode_chat(asked.chat, self.tokenizer, tokens_max=tokens_max, today=today)
            special = not asked.HasField("add_special_tokens") or asked.add_special_tokens
            return tuple(self.tokenizer.encode(asked.text, add_special=special))

        return await off_loop(work, asked.ByteSize())

    def detokenize(self, asked: inference_pb2.DetokenizeRequest) -> str:
        """Raises ModelNotFound or InvalidRequest."""
        validation.check_detokenize(asked, self.card())
        return self.tokenizer.decode(asked.token_ids, include_special=asked.include_special_tokens)

    def _measure(self, request: Request, timeline: Timeline, outcome: str, generated: int) -> None:
        self.metrics.count_request(outcome)
        self.metrics.count_tokens("gateway", prompt=len(request.prompt_token_ids), generated=generated)
        first = timeline.time_to_first_token()
        each = timeline.time_per_output_token(generated // request.best_of)
        if first is not None:
            self.metrics.observe_first_token("gateway", first)
        if each is not None:
            self.metrics.observe_per_token("gateway", each)
        whole = timeline.between(Instant.ACCEPTED, Instant.FINISHED)
        if whole is not None:
            self.metrics.observe_whole("gateway", whole)


async def off_loop(work: Callable[[], T], size_bytes: int) -> T:
    """What work makes. size_bytes: of what it looks at; what is large is not looked at on the event loop."""
    return work() if size_bytes <= _INLINE_BYTES_MAX else await asyncio.to_thread(work)
