"""What the gRPC and the HTTP face share: one way from a client's words to an answer, and its measurement.

Servicer and HTTP routes call it and translate; the process builds it. It knows no wire: no statuses, no JSON,
no streams but its own deltas.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from datetime import datetime

from crossdock.v1 import inference_pb2
from gateway import prompt, validation
from gateway.admission import Admission, Held
from gateway.cost import ONE, TOKEN_BYTES, Cost, cost_of, least_of, most_of, total
from gateway.generation import Delta, TokenSource, generate
from gateway.guide_check import refuse_guides
from gateway.reading import Reading
from gateway.request import ModelCard, Request
from gateway.tokenizer import Tokenizer
from service.errors import ServiceError
from service.guides import Guide
from service.metrics import Metrics
from service.timeline import Instant, Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Frontend:
    """card: the served model as it is known now. ready: whether new work is welcome. monotonic: seconds;
    wall: for dates that people read. admission: where each call holds a place. reading: where what is long is read.
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
    admission: Admission
    reading: Reading = field(default_factory=Reading)
    require_guide: Callable[[Guide, str], Awaitable[None]] = refuse_guides

    @contextmanager
    def hold(self, tenant: str, message_bytes: int = 0) -> Iterator[Held]:
        """A place for a call, from before anything of it is read until all of its answer is with the client. tenant:
        who asks, as the credential says. Raises Exhausted. A call that is refused before its requests are accepted is
        counted here, once; how each of these ends `generate` counts."""
        held = None
        try:
            with self.admission.hold(tenant, message_bytes=message_bytes) as held:
                yield held
        except ServiceError as error:
            if held is None or not held.settled:
                self.metrics.count_refusal(error)
            raise

    def claim(
        self,
        held: Held,
        specs: Sequence[inference_pb2.GenerationSpec],
        time_left_s: float | None,
        *,
        message_bytes: int | None = None,
    ) -> None:
        """A call asks for all of these: its place is for what they may cost at most, before they are read closely.
        message_bytes: as held.claim has it. Raises Exhausted."""
        card = self.card()
        held.claim(total(most_of(spec, card) for spec in specs), message_bytes=message_bytes)
        if time_left_s is not None:
            held.require_time(total(least_of(spec, card) for spec in specs), time_left_s)

    def settle(self, held: Held, requests: Iterable[Request]) -> None:
        """These have come of what it asked for. Raises Exhausted."""
        held.claim(total(map(cost_of, requests)))
        held.settled = True

    async def accept(
        self,
        spec: inference_pb2.GenerationSpec,
        time_left_s: float | None,
        *,
        held: Held,
        streamed: bool = False,
        sharing: int = 1,
    ) -> Request:
        """One of those that the place is for. Raises as validation.accept. Long texts are read on another thread."""
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
                tenant=held.tenant,
                streamed=streamed,
                sharing=sharing,
            )

        size = 0 if spec.HasField("token_ids") else spec.ByteSize()
        request = await self.reading.run(work, tenant=held.tenant, size_bytes=size)
        if request.guide is not None:
            await self.require_guide(request.guide, held.tenant)
        return request

    async def generate(self, request: Request) -> AsyncGenerator[Delta, None]:
        """The answer to what was accepted, while its place is held. Raises ServiceError; closing it cancels the work.
        Every end is counted once."""
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

    async def tokenize(self, asked: inference_pb2.TokenizeRequest, *, held: Held) -> tuple[int, ...]:
        """Raises Exhausted, ModelNotFound or InvalidRequest. An empty text has no tokens, unless the model starts with
        one."""
        card, today, size = self.card(), self.wall(), asked.ByteSize()
        held.claim(ONE + Cost(bytes=TOKEN_BYTES * size))

        def work() -> tuple[int, ...]:
            validation.check_tokenize(asked, card, self.tokenizer)
            tokens_max = card.max_model_len
            if asked.WhichOneof("input") == "chat":
                return prompt.encode_chat(asked.chat, self.tokenizer, tokens_max=tokens_max, today=today)
            special = not asked.HasField("add_special_tokens") or asked.add_special_tokens
            return tuple(self.tokenizer.encode(asked.text, add_special=special))

        return await self.reading.run(work, tenant=held.tenant, size_bytes=size)

    async def detokenize(self, asked: inference_pb2.DetokenizeRequest, *, held: Held) -> str:
        """Raises Exhausted, ModelNotFound or InvalidRequest."""
        card, size = self.card(), TOKEN_BYTES * len(asked.token_ids)
        held.claim(ONE + Cost(bytes=size))

        def work() -> str:
            validation.check_detokenize(asked, card)
            return self.tokenizer.decode(asked.token_ids, include_special=asked.include_special_tokens)

        return await self.reading.run(work, tenant=held.tenant, size_bytes=size)

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
