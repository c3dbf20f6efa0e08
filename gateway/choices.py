"""How many answers a client wants, and whether a search finds them: which of these wishes go together.

Validation calls it. Pure: it sees one message, and single ranges are checked there.
"""

from collections.abc import Iterator

from crossdock.v1 import inference_pb2
from service.errors import FieldViolation
from service.orders import Beam

_NOT_WITH_BEAM = {
    "temperature": 0,
    "top_k": 0,
    "top_p": 1,
    "min_p": 0,
    "best_of": 0,
}
"""What says nothing in each of these fields."""


def violations(spec: inference_pb2.GenerationSpec, *, streamed: bool) -> Iterator[FieldViolation]:
    """Every rule between two fields that is broken."""
    sampling = spec.sampling
    if sampling.HasField("beam_width"):
        yield from _not_with_beam(spec)
        return
    if best_of(sampling) < number(sampling):
        yield FieldViolation(field="sampling.best_of", description=f"must be at least n, {number(sampling)}")
    elif streamed and best_of(sampling) > number(sampling):
        rule = "what is the best is known at the end: more than n cannot be streamed"
        yield FieldViolation(field="sampling.best_of", description=rule)
    for field in ("length_penalty", "early_stopping"):
        if sampling.HasField(field):
            yield FieldViolation(field=f"sampling.{field}", description="needs beam_width")


def number(sampling: inference_pb2.SamplingParams) -> int:
    """Answers that are returned."""
    return sampling.n if sampling.HasField("n") else 1


def best_of(sampling: inference_pb2.SamplingParams) -> int:
    """Answers that are generated."""
    return sampling.best_of if sampling.HasField("best_of") else number(sampling)


def beam(sampling: inference_pb2.SamplingParams) -> Beam | None:
    if not sampling.HasField("beam_width"):
        return None
    return Beam(
        width=sampling.beam_width,
        length_penalty=sampling.length_penalty if sampling.HasField("length_penalty") else 1.0,
        early_stopping=sampling.early_stopping,
    )


def _not_with_beam(spec: inference_pb2.GenerationSpec) -> Iterator[FieldViolation]:
    """A search takes what is likeliest of all: nothing is drawn, and no text ends it."""
    sampling = spec.sampling
    if number(sampling) > sampling.beam_width > 1:
        rule = f"must be at most the beam width, {sampling.beam_width}"
        yield FieldViolation(field="sampling.n", description=rule)
    given = [
        field
        for field, nothing in _NOT_WITH_BEAM.items()
        if sampling.HasField(field) and getattr(sampling, field) != nothing
    ]
    for field in given:
        yield FieldViolation(field=f"sampling.{field}", description="not with beam search")
    if spec.stop.strings:
        yield FieldViolation(field="stop.strings", description="not with beam search")
    if spec.output.HasField("prompt_logprobs"):
        yield FieldViolation(field="output.prompt_logprobs", description="not with beam search")
