"""What a client says an answer must be, as a guide; which of such wishes are too large or go with no others.

Validation calls it. Pure: whether a guide can be followed is found out elsewhere.
"""

from collections.abc import Iterator

from crossdock.v1 import inference_pb2
from service import guides
from service.errors import FieldViolation
from service.guides import Guide, GuideKind


def violations(spec: inference_pb2.GenerationSpec, *, too_large: bool) -> Iterator[FieldViolation]:
    """Every rule on a guide's form or company that is broken. too_large: its range is, which was said already."""
    if not spec.HasField("guide"):
        return
    if spec.sampling.HasField("beam_width"):
        yield FieldViolation(field="guide", description="not with beam search")
    wanted = guide(spec)
    if wanted is None:
        rule = "one of json_schema, json_object, regex, choice and grammar is required"
        yield FieldViolation(field="guide", description=rule)
    elif wanted.kind is GuideKind.JSON_OBJECT and not spec.guide.json_object:
        yield FieldViolation(field="guide.json_object", description="must be true")
    elif not too_large and (broken := wanted.violation()) is not None:
        yield FieldViolation(field=f"guide.{wanted.field()}", description=broken)


def guide(spec: inference_pb2.GenerationSpec) -> Guide | None:
    """What is asked of the answer, None for nothing."""
    asked = spec.guide
    match asked.WhichOneof("kind"):
        case "json_schema":
            return Guide(kind=GuideKind.JSON_SCHEMA, text=asked.json_schema)
        case "json_object":
            return Guide(kind=GuideKind.JSON_OBJECT, text="")
        case "regex":
            return Guide(kind=GuideKind.REGEX, text=asked.regex)
        case "choice":
            return guides.choice(asked.choice.strings)
        case "grammar":
            return Guide(kind=GuideKind.GRAMMAR, text=asked.grammar)
    return None
