"""What a worker tells a gateway about an attempt, and its translation to and from the wire.

Workers make reports on their step thread; `encode` packs the tokens of one step into one message. The gateway gets the
same reports back from `decode`, which trusts no peer. Knows no engine.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby
from typing import Any, NamedTuple, TypeAlias, cast

from crossdock.worker.v1 import worker_pb2 as pb
from service.load import WorkerLoad
from service.orders import AttemptKey
from service.scores import Scores

MEASURED_MS_MAX = 3_600_000.0
NOTHING_ALLOWED = "its guide allows no token here"


class BadReport(Exception):
    """A report that no worker of ours makes. The text names the field and the rule."""


class TokenEnd(Enum):
    """Why a token is the last one."""

    STOP = pb.END_REASON_STOP
    LENGTH = pb.END_REASON_LENGTH


class EndCause(Enum):
    """Why an attempt is over on a worker without its last token."""

    CANCELLED = pb.END_CAUSE_CANCELLED
    INVALID = pb.END_CAUSE_INVALID
    EXHAUSTED = pb.END_CAUSE_EXHAUSTED
    DRAINING = pb.END_CAUSE_DRAINING
    TRANSFER_FAILED = pb.END_CAUSE_TRANSFER_FAILED
    TICKET_REFUSED = pb.END_CAUSE_TICKET_REFUSED
    INTERNAL = pb.END_CAUSE_INTERNAL
    PREEMPTED = pb.END_CAUSE_PREEMPTED
    """Its blocks were needed. It can go on, here or elsewhere."""
    GUIDE_FAILED = pb.END_CAUSE_GUIDE_FAILED
    """No token can follow within its guide, as far as can be told."""


class TokenReport(NamedTuple):
    """position: in the answer, from 0. logprob and top: when asked for; top holds (token id, logprob). cached_tokens:
    with the first token, how many of the tokens before it were not computed, since they were cached."""

    key: AttemptKey
    position: int
    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]
    end: TokenEnd | None
    cached_tokens: int = 0
    choice: int = 0


class TokenReports(NamedTuple):
    """A token of each of some choices, column by column. more: by index, in order, the reports of those of which there
    is more to say."""

    request_ids: Sequence[str]
    attempts: Sequence[int]
    choices: Sequence[int]
    positions: Sequence[int]
    token_ids: Sequence[int]
    more: Mapping[int, TokenReport]

    @classmethod
    def of(cls, reports: Sequence[TokenReport]) -> "TokenReports":
        """At least one."""
        keys, positions, token_ids, _, _, _, _, choices = zip(*reports, strict=True)
        request_ids, attempts = zip(*keys, strict=True)
        more = {index: each for index, each in enumerate(reports) if each[3:7] != _NO_DETAIL}
        return cls(request_ids, attempts, choices, positions, token_ids, more)

    def each(self) -> list[TokenReport]:
        """One by one."""
        reports = [
            TokenReport(AttemptKey(request_id, attempt), position, token_id, *_NO_DETAIL, choice)
            for request_id, attempt, choice, position, token_id in zip(*self[:5], strict=True)
        ]
        for index, report in self.more.items():
            reports[index] = report
        return reports


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedReport:
    """detail: one line, without addresses or contents. preemptions: of one that was given up, how often that was."""

    key: AttemptKey
    cause: EndCause
    detail: str
    preemptions: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservedReport:
    """The target has room. blocks_held: blocks from the start that it already holds."""

    key: AttemptKey
    blocks_held: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AdoptedReport:
    """The target owns the sequence from now on."""

    key: AttemptKey


@dataclass(frozen=True, slots=True, kw_only=True)
class HandedOverReport:
    """The source has let the sequence go."""

    key: AttemptKey


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptReport:
    """How likely the prompt's tokens from `first_position` on are; at least one of them. All parts, in order, come
    before the first token of the answer."""

    key: AttemptKey
    first_position: int
    scores: Scores


_NO_DETAIL = (None, (), None, 0)
"""What is between the token_id and the choice of a TokenReport, of most of them."""

Report: TypeAlias = (
    TokenReport | EndedReport | ReservedReport | AdoptedReport | HandedOverReport | PromptReport
)
Told: TypeAlias = Report | TokenReports
"""What workers say. Gateways hear of tokens one by one."""
Response: TypeAlias = pb.PrefillServiceAttachResponse | pb.DecodeServiceAttachResponse


def encode(reports: Iterable[Told], step: int, response: Callable[..., Response]) -> list[Response]:
    """The reports of one step for one gateway, in order; tokens that follow each other share a message."""
    messages: list[Response] = []
    for of_tokens, run in groupby(reports, _of_tokens):
        if of_tokens:
            messages.append(response(outputs=_outputs(step, _joined([*run]))))
        else:
            messages += [response(**_field(cast(Report, report))) for report in run]
    return messages


def decode(message: Response) -> list[Report]:
    """The reports in a message; empty for messages that are about the worker as a whole. Raises BadReport."""
    match message.WhichOneof("message"):
        case "outputs":
            return [*_token_reports(message.outputs)]
        case "ended":
            ended = message.ended
            cause = _cause(ended.cause)
            told = EndedReport(
                key=_key(ended), cause=cause, detail=ended.detail, preemptions=ended.preemptions
            )
            return [told]
        case "reserved":
            assert isinstance(message, pb.DecodeServiceAttachResponse)
            return [ReservedReport(key=_key(message.reserved), blocks_held=message.reserved.blocks_held)]
        case "adopted":
            assert isinstance(message, pb.DecodeServiceAttachResponse)
            return [AdoptedReport(key=_key(message.adopted))]
        case "handed_over":
            assert isinstance(message, pb.PrefillServiceAttachResponse)
            return [HandedOverReport(key=_key(message.handed_over))]
        case "prompt_logprobs":
            return [_prompt_report(message.prompt_logprobs)]
    return []


def to_load_report(
    load: WorkerLoad, *, draining: bool, frozen: bool, counts: Mapping[str, int]
) -> pb.LoadReport:
    return pb.LoadReport(
        step=load.step,
        running_sequences=load.running_sequences,
        waiting_sequences=load.waiting_sequences,
        waiting_tokens=load.waiting_tokens,
        free_blocks=load.free_blocks,
        total_blocks=load.total_blocks,
        finished_sequences=load.finished_sequences,
        borrowed_core_ms=load.borrowed_core_ms,
        draining=draining,
        frozen=frozen,
        counts=counts,
        step_ms=load.step_ms,
        prompt_token_ms=load.prompt_token_ms,
        hand_off_token_ms=load.hand_off_token_ms,
    )


def from_load_report(report: pb.LoadReport) -> WorkerLoad:
    return WorkerLoad(
        step=report.step,
        running_sequences=report.running_sequences,
        waiting_sequences=report.waiting_sequences,
        waiting_tokens=report.waiting_tokens,
        free_blocks=report.free_blocks,
        total_blocks=report.total_blocks,
        finished_sequences=report.finished_sequences,
        borrowed_core_ms=report.borrowed_core_ms,
        step_ms=_measured(report.step_ms),
        prompt_token_ms=_measured(report.prompt_token_ms),
        hand_off_token_ms=_measured(report.hand_off_token_ms),
    )


def _measured(value: float) -> float:
    """What no clock can have measured is unknown."""
    return value if 0.0 < value <= MEASURED_MS_MAX else 0.0


def _field(
    report: Report,
) -> dict[str, pb.Ended | pb.Reserved | pb.Adopted | pb.HandedOver | pb.PromptLogprobs]:
    request_id, attempt = report.key.request_id, report.key.attempt
    match report:
        case EndedReport():
            ended = pb.Ended(
                request_id=request_id,
                attempt=attempt,
                detail=report.detail,
                preemptions=report.preemptions,
            )
            ended.cause = report.cause.value
            return {"ended": ended}
        case ReservedReport():
            held = report.blocks_held
            return {"reserved": pb.Reserved(request_id=request_id, attempt=attempt, blocks_held=held)}
        case AdoptedReport():
            return {"adopted": pb.Adopted(request_id=request_id, attempt=attempt)}
        case HandedOverReport():
            return {"handed_over": pb.HandedOver(request_id=request_id, attempt=attempt)}
        case PromptReport():
            return {"prompt_logprobs": _prompt_logprobs(report)}
    raise AssertionError(f"a token report is not a field of its own: {report}")


def _prompt_logprobs(report: PromptReport) -> pb.PromptLogprobs:
    scores = report.scores
    return pb.PromptLogprobs(
        request_id=report.key.request_id,
        attempt=report.key.attempt,
        first_position=report.first_position,
        token_logprobs=scores.logprobs,
        ranks=scores.ranks,
        top_count=scores.width,
        top_token_ids=scores.top_ids,
        top_logprobs=scores.top_logprobs,
    )


def _prompt_report(message: pb.PromptLogprobs) -> PromptReport:
    scores = Scores(
        logprobs=tuple(message.token_logprobs),
        ranks=tuple(message.ranks),
        width=message.top_count,
        top_ids=tuple(message.top_token_ids),
        top_logprobs=tuple(message.top_logprobs),
    )
    if not scores.logprobs or not scores.coherent():
        raise BadReport("prompt_logprobs: at least one token, and of each all that is said of one")
    return PromptReport(key=_key(message), first_position=message.first_position, scores=scores)


def _of_tokens(report: Told) -> bool:
    return isinstance(report, TokenReport | TokenReports)


def _joined(reports: Sequence[Any]) -> TokenReports:
    """All of these, which are of tokens."""
    if len(reports) == 1 and isinstance(reports[0], TokenReports):
        return reports[0]
    single = [each.each() if isinstance(each, TokenReports) else [each] for each in reports]
    return TokenReports.of([report for some in single for report in some])


def _outputs(step: int, tokens: TokenReports) -> pb.StepOutputs:
    """Most tokens are a name, a position and an id."""
    return pb.StepOutputs(
        step=step,
        request_ids=tokens.request_ids,
        attempts=tokens.attempts,
        choices=tokens.choices,
        positions=tokens.positions,
        token_ids=tokens.token_ids,
        details=[_detail(index, each) for index, each in tokens.more.items()],
    )


def _detail(index: int, report: TokenReport) -> pb.TokenDetail:
    """Fields that have their default are not set."""
    detail = pb.TokenDetail(index=index, logprob=report.logprob, cached_tokens=report.cached_tokens)
    if report.top:
        detail.top_token_ids.extend([token for token, _ in report.top])
        detail.top_logprobs.extend([each for _, each in report.top])
    if report.end is not None:
        detail.end_reason = report.end.value
    return detail


def _token_reports(outputs: pb.StepOutputs) -> list[TokenReport]:
    columns = (outputs.request_ids, outputs.attempts, outputs.choices, outputs.positions, outputs.token_ids)
    if len({len(column) for column in columns}) > 1:
        raise BadReport("outputs: of each token all that is said of one")
    reports = [
        TokenReport(AttemptKey(request_id, attempt), position, token_id, None, (), None, 0, choice)
        for request_id, attempt, choice, position, token_id in zip(*columns, strict=True)
    ]
    for detail in outputs.details:
        if detail.index >= len(reports):
            raise BadReport("details: of a token that is there")
        reports[detail.index] = reports[detail.index]._replace(
            logprob=detail.logprob if detail.HasField("logprob") else None,
            top=_top(detail),
            end=_token_end(detail.end_reason),
            cached_tokens=detail.cached_tokens,
        )
    return reports


def _top(detail: pb.TokenDetail) -> tuple[tuple[int, float], ...]:
    ids, logprobs = detail.top_token_ids, detail.top_logprobs
    if not ids and not logprobs:
        return ()
    if len(ids) != len(logprobs):
        raise BadReport("top_logprobs: one for each of top_token_ids")
    return tuple(zip(ids, logprobs, strict=True))


def _token_end(reason: pb.EndReason) -> TokenEnd | None:
    if reason == pb.END_REASON_UNSPECIFIED:
        return None
    try:
        return TokenEnd(reason)
    except ValueError:
        raise BadReport("end_reason: unknown") from None


def _key(
    message: pb.Ended | pb.Reserved | pb.Adopted | pb.HandedOver | pb.PromptLogprobs,
) -> AttemptKey:
    return AttemptKey(request_id=message.request_id, attempt=message.attempt)


def _cause(cause: pb.EndCause) -> EndCause:
    """An unset or unknown cause is a fault: over is over, whatever a newer worker calls it."""
    try:
        return EndCause(cause)
    except ValueError:
        return EndCause.INTERNAL
