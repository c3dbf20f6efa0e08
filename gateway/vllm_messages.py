"""vllm.grpc.engine's messages as ours and back: what routers say to engines, and what they hear.

`vllm_engine` calls it. Pure translation: ranges are validation's, and only counts are looked at before a message is
copied. Where a number that is 0 means nothing was said, as
proto3 has it, nothing is passed on.
"""

from collections.abc import Iterator, Sequence

from smg_grpc_proto import vllm_engine_pb2 as pb

from crossdock.v1 import inference_pb2
from gateway import prompt
from gateway.generation import Delta, Finish, StopString, StopToken
from gateway.request import EndReason, Request, Token
from gateway.utilization import EngineLoad
from service.errors import Excess, FieldViolation, InvalidRequest
from service.ranges import range_of
from service.scores import Scores

_REASONS = {EndReason.STOP: "stop", EndReason.LENGTH: "length"}
_NOT_OFFERED = (
    "kv_transfer_params",
    "kv_transfer_params_json",
    "mm_inputs",
    "media_refs",
    "data_parallel_rank",
)
_PLAIN = ("min_p", "frequency_penalty", "presence_penalty", "min_tokens")
"""0 is what validation takes for nothing, too."""
_SAID = ("top_p", "top_k", "repetition_penalty", "n")
"""0 is nothing, and no value."""
_OPTIONAL = ("temperature", "max_tokens", "seed")


def violations(asked: pb.GenerateRequest) -> Iterator[FieldViolation]:
    """What is asked that is not done here, and what there is too much of to be copied."""
    given = [name for name in _NOT_OFFERED if asked.HasField(name)]
    if asked.extra_mm_inputs:
        given.append("extra_mm_inputs")
    if asked.sampling_params.HasField("structural_tag"):
        given.append("sampling_params.structural_tag")
    for field in given:
        yield FieldViolation(field=field, description="is not supported")
    params = asked.sampling_params
    for field, count, holder, name in (
        ("logit_bias", len(params.logit_bias), inference_pb2.SamplingParams, "logit_bias"),
        ("stop", len(params.stop), inference_pb2.StopConditions, "strings"),
        ("stop_token_ids", len(params.stop_token_ids), inference_pb2.StopConditions, "token_ids"),
        ("choice", len(params.choice.choices), inference_pb2.Guide.Choices, "strings"),
    ):
        most = range_of(holder, name, "count").most()
        if count > most:
            rule = f"at most {most}; {count} were given"
            yield FieldViolation(field=f"sampling_params.{field}", description=rule)


def too_long(asked: pb.GenerateRequest, tokens_max: int) -> Iterator[FieldViolation]:
    """tokens_max: of a prompt that is taken whole."""
    count = len(asked.tokenized.input_ids)
    given_max = prompt.given_max(asked.sampling_params, tokens_max)
    if count > given_max:
        rule = f"at most {given_max} tokens; {count} were given"
        excess = Excess(most=given_max, got=count, unit="token")
        yield FieldViolation(field="tokenized.input_ids", description=rule, excess=excess)


def spec_of(asked: pb.GenerateRequest, request_id: str) -> inference_pb2.GenerationSpec:
    """What has no `violations` and is not `too_long`. Raises InvalidRequest for numbers that no field of ours can
    hold."""
    try:
        return _spec(asked, request_id)
    except ValueError:
        rule = "a number is negative, or larger than 32 bits with a sign"
        raise InvalidRequest(FieldViolation(field="sampling_params", description=rule)) from None


def chunk(request: Request, delta: Delta, *, first: bool) -> pb.GenerateResponse:
    """New tokens of one choice. first: of that choice."""
    return pb.GenerateResponse(
        chunk=pb.GenerateStreamChunk(
            token_ids=[token.token_id for token in delta.tokens],
            prompt_tokens=len(request.prompt_token_ids),
            completion_tokens=len(delta.tokens),
            cached_tokens=delta.cached_tokens,
            output_logprobs=_output_logprobs(request, delta.tokens),
            input_logprobs=_input_logprobs(request, delta.scores) if first else None,
            index=delta.choice,
        )
    )


def complete(request: Request, deltas: Sequence[Delta]) -> pb.GenerateResponse:
    """The end of one choice, with the tokens of these deltas: all of them, or the last one where it was streamed.
    Without a finish it was aborted."""
    last, tokens = deltas[-1], [token for delta in deltas for token in delta.tokens]
    scores = next((delta.scores for delta in deltas if delta.scores is not None), None)
    told = pb.GenerateComplete(
        output_ids=[token.token_id for token in tokens],
        finish_reason="abort" if last.finish is None else _REASONS[last.finish.reason],
        prompt_tokens=len(request.prompt_token_ids),
        completion_tokens=len(tokens),
        cached_tokens=max(delta.cached_tokens for delta in deltas),
        output_logprobs=_output_logprobs(request, tokens),
        input_logprobs=_input_logprobs(request, scores),
        index=last.choice,
    )
    _say_matched(told, last.finish)
    return pb.GenerateResponse(complete=told)


def scheduler_load(load: EngineLoad) -> pb.SchedulerLoad:
    return pb.SchedulerLoad(
        num_running_reqs=load.running,
        num_waiting_reqs=load.waiting,
        num_total_reqs=load.running + load.waiting,
        num_used_tokens=load.used_tokens,
        max_total_num_tokens=load.tokens,
        token_usage=load.used_tokens / max(1, load.tokens),
        gen_throughput=load.tokens_per_s,
        cache_hit_rate=load.hit_rate,
        utilization=load.utilization,
        max_running_requests=load.seats,
        num_waiting_uncached_tokens=load.waiting_tokens,
    )


def _spec(asked: pb.GenerateRequest, request_id: str) -> inference_pb2.GenerationSpec:
    params = asked.sampling_params
    spec = inference_pb2.GenerationSpec(
        request_id=request_id,
        sampling=_sampling(params),
        stop=inference_pb2.StopConditions(
            strings=params.stop,
            token_ids=params.stop_token_ids,
            ignore_eos=params.ignore_eos,
            include_stop_string=params.include_stop_str_in_output,
        ),
        guide=_guide(params),
    )
    if asked.HasField("tokenized"):
        spec.token_ids.ids.extend(asked.tokenized.input_ids)
        spec.token_ids.SetInParent()
    elif asked.HasField("text"):
        spec.text = asked.text
    if params.HasField("truncate_prompt_tokens"):
        spec.truncate_prompt_tokens = params.truncate_prompt_tokens
    for name in ("logprobs", "prompt_logprobs"):
        if params.HasField(name):
            setattr(spec.output, name, getattr(params, name))
    return spec


def _sampling(params: pb.SamplingParams) -> inference_pb2.SamplingParams:
    sampling = inference_pb2.SamplingParams()
    for name in _OPTIONAL:
        if params.HasField(name):
            setattr(sampling, name, getattr(params, name))
    for name in _PLAIN:
        setattr(sampling, name, getattr(params, name))
    for name in _SAID:
        if value := getattr(params, name):
            setattr(sampling, name, value)
    for token, bias in params.logit_bias.items():
        sampling.logit_bias[token] = bias
    return sampling


def _guide(params: pb.SamplingParams) -> inference_pb2.Guide | None:
    kind = params.WhichOneof("constraint")
    if kind is None:
        return None
    if kind == "choice":
        choices = inference_pb2.Guide.Choices(strings=params.choice.choices)
        return inference_pb2.Guide(choice=choices)
    return inference_pb2.Guide(**{kind: getattr(params, kind)})


def _say_matched(told: pb.GenerateComplete, finish: Finish | None) -> None:
    """As vLLM: nothing for the model's own end."""
    match finish.matched if finish else None:
        case StopToken(token_id=token_id):
            told.matched_token_id = token_id
        case StopString(text=text):
            told.matched_stop_str = text


def _output_logprobs(request: Request, tokens: Sequence[Token]) -> pb.OutputLogProbs | None:
    count = request.sampling.logprobs
    if count is None or not tokens:
        return None
    return pb.OutputLogProbs(
        token_logprobs=[token.logprob or 0.0 for token in tokens],
        token_ids=[token.token_id for token in tokens],
        top_logprobs=[_top(token.top) for token in tokens] if count else (),
    )


def _input_logprobs(request: Request, scores: Scores | None) -> pb.InputLogProbs | None:
    """The first token of a prompt has none."""
    if scores is None:
        return None
    told = pb.InputLogProbs(token_ids=request.prompt_token_ids)
    told.token_logprobs.add()
    told.top_logprobs.add()
    for index, logprob in enumerate(scores.logprobs):
        told.token_logprobs.add(value=logprob)
        told.top_logprobs.append(_top(scores[index].top))
    return told


def _top(alternatives: Sequence[tuple[int, float]]) -> pb.TopLogProbs:
    return pb.TopLogProbs(
        values=[logprob for _, logprob in alternatives], token_ids=[token for token, _ in alternatives]
    )
