"""What was measured of requests, and the arithmetic on it. Seconds inside, milliseconds in results. No I/O.

time to first token: from sending to the first chunk that carries a token. gap (inter-token latency): between two chunks
of one request that carry tokens, the pause a reader sees. time per output token: from the first chunk to the last, for
each token that came after the first chunk; one figure per request.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

Figures: TypeAlias = dict[str, Any]
PERCENTILES = (50, 95, 99)


class Chunk(NamedTuple):
    """at: seconds on the client's clock. tokens: that it carries."""

    at: float
    tokens: int


@dataclass(slots=True, kw_only=True, eq=False)
class Answer:
    """One request, as the client saw it. due: when it was to be sent; failure: why it has no whole answer; prompt_seen:
    prompt tokens as the server counts them; parts: bytes as they came, with their times, until they are read."""

    prompt_tokens: int
    max_tokens: int
    due: float
    sent: float = 0.0
    chunks: list[Chunk] = field(default_factory=list)
    prompt_seen: int | None = None
    failure: str | None = None
    parts: list[tuple[float, bytes]] = field(default_factory=list)

    @property
    def whole(self) -> bool:
        return self.failure is None and bool(self.chunks)

    @property
    def first_token_s(self) -> float:
        return self.chunks[0].at - self.sent

    @property
    def output_tokens(self) -> int:
        return sum(chunk.tokens for chunk in self.chunks)

    @property
    def per_token_s(self) -> float | None:
        """None for an answer that came at once."""
        later = self.output_tokens - self.chunks[0].tokens
        return (self.chunks[-1].at - self.chunks[0].at) / later if later else None

    def gaps(self) -> list[tuple[float, float]]:
        """(begin, end) of each."""
        return [(one.at, two.at) for one, two in zip(self.chunks, self.chunks[1:], strict=False)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a request must keep to be good, in milliseconds."""

    first_token_ms: float
    per_token_ms: float

    def kept_by(self, answer: Answer) -> bool:
        return answer.first_token_s * 1e3 <= self.first_token_ms and (
            answer.per_token_s is None or answer.per_token_s * 1e3 <= self.per_token_ms
        )


def percentile(values: Sequence[float], percent: float) -> float:
    """Between the two nearest ranks where it falls between two. At least one value."""
    ranked = sorted(values)
    place = (len(ranked) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ranked) - 1)
    return ranked[below] + (ranked[above] - ranked[below]) * (place - below)


def spread_ms(seconds: Iterable[float | None]) -> Figures | None:
    """None when there is nothing."""
    values = [value * 1e3 for value in seconds if value is not None]
    if not values:
        return None
    spread = {f"p{percent}": round(percentile(values, percent), 2) for percent in PERCENTILES}
    return {
        "count": len(values),
        "mean": round(sum(values) / len(values), 2),
        **spread,
        "max": round(max(values), 2),
    }


def summary(answers: Sequence[Answer], limits: Limits) -> Figures:
    """Rates are over the time from the first request's sending to the last token."""
    whole = [answer for answer in answers if answer.whole]
    failed = Counter(answer.failure or "no token came" for answer in answers if not answer.whole)
    figures: Figures = {"requests": len(answers), "failures": dict(failed)}
    if not whole:
        return figures
    wall = max(answer.chunks[-1].at for answer in whole) - min(answer.sent for answer in answers)
    good = [answer for answer in whole if limits.kept_by(answer)]
    return figures | {
        "seconds": round(wall, 3),
        "requests_per_s": round(len(whole) / wall, 3),
        "output_tokens_per_s": round(sum(answer.output_tokens for answer in whole) / wall, 2),
        "prompt_tokens_per_s": round(sum(answer.prompt_tokens for answer in whole) / wall, 2),
        "ttft_ms": spread_ms(answer.first_token_s for answer in whole),
        "tpot_ms": spread_ms(answer.per_token_s for answer in whole),
        "itl_ms": spread_ms(end - begin for answer in whole for begin, end in answer.gaps()),
        "good_share": round(len(good) / len(answers), 4),
        "goodput_requests_per_s": round(len(good) / wall, 3),
        "tokens_per_chunk": round(
            sum(answer.output_tokens for answer in whole) / sum(len(answer.chunks) for answer in whole), 3
        ),
        "short_answers": sum(answer.output_tokens < answer.max_tokens for answer in whole),
        "prompts_counted_otherwise": sum(
            answer.prompt_seen not in {None, answer.prompt_tokens} for answer in whole
        ),
        "sent_late_ms": round(max(answer.sent - answer.due for answer in answers) * 1e3, 2),
    }


def window(answers: Iterable[Answer], begin: float, end: float, *, overlapping: bool) -> Figures:
    """Gaps and tokens of running streams in a time. overlapping: gaps that reach into it count, else those that lie in
    it."""
    streams = list(answers)
    counts: Callable[[float, float], bool] = (
        (lambda first, last: last > begin and first < end)
        if overlapping
        else (lambda first, last: first >= begin and last <= end)
    )
    tokens = sum(chunk.tokens for one in streams for chunk in one.chunks if begin <= chunk.at < end)
    return {
        "itl_ms": spread_ms(
            last - first for one in streams for first, last in one.gaps() if counts(first, last)
        ),
        "output_tokens_per_s": round(tokens / (end - begin), 2) if end > begin else None,
    }


def flat(figures: Figures, before: str = "") -> dict[str, float]:
    """The numbers, with dots in their names."""
    found: dict[str, float] = {}
    for name, value in figures.items():
        if isinstance(value, dict):
            found |= flat(value, f"{before}{name}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found[before + name] = value
    return found
