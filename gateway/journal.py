"""What one choice of a request has been told so far: everything that is needed to go on with it on any worker.

Prompt, parameters and every token already emitted. A token is shown to the client only after it is in here; each
position once, without gap. Talks to nobody.
"""

from gateway.prompt_scores import PromptScores
from gateway.request import EndReason, Request, Token, TokenBatch
from gateway.request_prefix import RequestPrefix
from service.orders import PREEMPTIONS_MAX, AttemptKey, Choice, SequenceOrder
from service.reports import PromptReport, TokenEnd, TokenReport

_ENDS = {TokenEnd.STOP: EndReason.STOP, TokenEnd.LENGTH: EndReason.LENGTH}


class Divergence(Exception):
    """A worker sent another token for a position that is in the journal already, or one that cannot be."""


class Journal:
    """wire_id: the choice's name between our processes; the client's own id may not be unique. cache_scope: whose
    cached prefixes it may use. scores: of the prompt, shared with the request's other choices. prefix: names of what an
    attempt from here begins with and need not compute. ended: the answer is complete."""

    def __init__(
        self,
        request: Request,
        wire_id: str,
        cache_scope: bytes = b"",
        choice: int = 0,
        scores: PromptScores | None = None,
    ) -> None:
        self.request = request
        self._scores = scores or PromptScores(request)
        self.choice = choice
        self.ended = False
        self._cache_scope = cache_scope
        self._preemptions = 0
        self.prefix = RequestPrefix(cache_scope)
        self.wire_id = wire_id
        self._emitted: list[int] = []
        self._ahead: dict[int, TokenReport] = {}

    def __len__(self) -> int:
        """Tokens emitted."""
        return len(self._emitted)

    def length_limit(self) -> int:
        """Tokens in all, the prompt's among them, at which the answer is complete."""
        return len(self.request.prompt_token_ids) + self.request.stop.max_tokens

    def remaining(self) -> int:
        """Tokens that may still come."""
        return self.request.stop.max_tokens - len(self._emitted)

    def begin(self) -> None:
        """A new attempt: what older ones sent ahead of their turn is void."""
        self._ahead.clear()
        self.prefix.grow(() if self._scores.due() else self._known_tokens())

    def preempted(self, times: int) -> bool:
        """A worker gave the sequence up, for the so manieth time. False for one that had no right to."""
        if self._preemptions >= PREEMPTIONS_MAX:
            return False
        self._preemptions = min(max(times, self._preemptions + 1), PREEMPTIONS_MAX)
        return True

    def take(self, report: TokenReport) -> TokenBatch:
        """Enter a token; the batch holds what became consecutive by it, possibly nothing.

        Raises Divergence for a token that contradicts the journal or the request; then nothing is entered.
        """
        known = self._known(report.position)
        if known not in (None, report.token_id):
            raise Divergence(f"position {report.position}: another token than before")
        self._require_possible(report)
        if report.position >= len(self._emitted):
            self._ahead[report.position] = report
        return self._consecutive()

    def score(self, report: PromptReport) -> None:
        """Enter how likely a part of the prompt is. Raises Divergence for what cannot be."""
        if not self._scores.take(report):
            raise Divergence(
                f"{len(report.scores)} logprobs from token {report.first_position} of the prompt on"
            )

    def order(self, attempt: int) -> SequenceOrder:
        """What a worker needs to go on from here."""
        request = self.request
        return SequenceOrder(
            key=AttemptKey(request_id=self.wire_id, attempt=attempt),
            choices=(Choice(index=self.choice, seed=request.seed_of(self.choice)),),
            token_ids=self._known_tokens(),
            prompt_tokens=len(request.prompt_token_ids),
            max_tokens=request.stop.max_tokens,
            min_tokens=request.stop.min_tokens,
            stop_token_ids=request.stop.token_ids,
            temperature=request.sampling.temperature,
            top_p=request.sampling.top_p,
            top_k=request.sampling.top_k,
            min_p=request.sampling.min_p,
            logprobs=request.needed_logprobs(),
            cache_scope=self._cache_scope,
            beam=request.beam,
            guide=request.guide,
            preemptions=self._preemptions,
            priority=request.priority,
            prompt_logprobs=request.prompt_logprobs if self._scores.due() else None,
            presence_penalty=request.sampling.presence_penalty,
            frequency_penalty=request.sampling.frequency_penalty,
            repetition_penalty=request.sampling.repetition_penalty,
            logit_bias=request.sampling.logit_bias,
        )

    def _known_tokens(self) -> tuple[int, ...]:
        return (*self.request.prompt_token_ids, *self._emitted)

    def _known(self, position: int) -> int | None:
        """The token at this position, emitted or ahead of its turn."""
        if position < len(self._emitted):
            return self._emitted[position]
        ahead = self._ahead.get(position)
        return ahead.token_id if ahead is not None else None

    def _require_possible(self, report: TokenReport) -> None:
        """An answer ends at its last position or with a stop token, and says so. What is wanted of the prompt comes
        before its first token; what another worker says of later ones may overtake both."""
        if report.position == 0 and self._scores.due():
            raise Divergence("position 0: before all logprobs of the prompt")
        stop, position = self.request.stop, report.position
        if position >= stop.max_tokens:
            raise Divergence(f"position {position}: the answer ends at {stop.max_tokens}")
        if report.end is TokenEnd.STOP and not stop.ends(report.token_id):
            raise Divergence(f"position {position}: no stop token")
        if report.end is not TokenEnd.STOP and (report.end is not None) != (position == stop.max_tokens - 1):
            raise Divergence(f"position {position}: of {stop.max_tokens}, and the end is {report.end}")

    def _consecutive(self) -> TokenBatch:
        tokens, end, cached = [], None, 0
        while end is None and (report := self._ahead.pop(len(self._emitted), None)) is not None:
            self._emitted.append(report.token_id)
            tokens.append(_token(report))
            if report.position == 0:
                cached = report.cached_tokens
            end = _ENDS[report.end] if report.end else None
        self.ended = self.ended or end is not None
        scores = self._scores.all() if tokens and tokens[0].position == 0 else None
        return TokenBatch(
            tokens=tuple(tokens), end=end, cached_tokens=cached, choice=self.choice, scores=scores
        )


def _token(report: TokenReport) -> Token:
    return Token(position=report.position, token_id=report.token_id, logprob=report.logprob, top=report.top)
