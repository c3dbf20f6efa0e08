"""What an answer must be, as clients of OpenAI and vLLM say it: response_format, structured_outputs, older guided_*.

`openai_schema` calls it. Types are checked here, sizes in validation.
"""

from collections.abc import Iterator

import orjson

from crossdock.v1.inference_pb2 import Guide
from gateway.json_fields import JsonFields
from service.guides import SCHEMA_DEPTH_MAX

_NOT_OFFERED = ("structural_tag", "whitespace_pattern")
_RULES = ("json", "json_object", "regex", "choice", "grammar")
_OFF = ("disable_any_whitespace", "disable_additional_properties", "disable_fallback")

_KNOWN = {*_RULES, *_NOT_OFFERED, *_OFF}


def guide_of(fields: JsonFields) -> Guide | None:
    """None where nothing is asked. What is wrong or said twice is noted in `fields`, and by which name it was asked."""
    wishes = [*_response_format(fields), *_structured_outputs(fields), *_rules(fields, "guided_")]
    if len(wishes) > 1:
        fields.wrong(wishes[1][0], f"not with {wishes[0][0]}: one rule on what the answer must be")
    if not wishes:
        return None
    fields.written["guide"], guide = wishes[0]
    return guide


def _response_format(fields: JsonFields) -> Iterator[tuple[str, Guide]]:
    if not (given := fields.mapping("response_format")):
        return
    inner = JsonFields(given)
    match kind := inner.text("type"):
        case "text":
            pass
        case "json_object":
            inner.neutral_only("schema", ())
            yield "response_format", Guide(json_object=True)
        case "json_schema":
            schema = JsonFields(inner.mapping("json_schema"))
            if schema.raw("schema") is None:
                schema.wrong("schema", "is required")
            if (guide := _schema(schema, "schema")) is not None:
                yield "response_format", guide
            inner.take("json_schema.", schema)
        case _:
            inner.wrong("type", "is not supported" if kind else "must be text, json_object or json_schema")
    fields.take("response_format.", inner)


def _structured_outputs(fields: JsonFields) -> Iterator[tuple[str, Guide]]:
    given = fields.mapping("structured_outputs")
    inner = JsonFields(given)
    for name in sorted(set(given) - _KNOWN):
        inner.wrong(name, f"is none of {', '.join(_RULES)}")
    for name in _NOT_OFFERED:
        inner.neutral_only(name, ())
    for name in _OFF:
        inner.neutral_only(name, (False,))
    for name, guide in _rules(inner, ""):
        yield f"structured_outputs.{name}", guide
    fields.take("structured_outputs.", inner)


def _rules(fields: JsonFields, prefix: str) -> Iterator[tuple[str, Guide]]:
    if (guide := _schema(fields, f"{prefix}json")) is not None:
        yield f"{prefix}json", guide
    if fields.flag(f"{prefix}json_object"):
        yield f"{prefix}json_object", Guide(json_object=True)
    if (regex := fields.text(f"{prefix}regex")) is not None:
        yield f"{prefix}regex", Guide(regex=regex)
    if fields.raw(f"{prefix}choice") is not None:
        strings = fields.texts(f"{prefix}choice")
        yield f"{prefix}choice", Guide(choice=Guide.Choices(strings=strings))
    if (grammar := fields.text(f"{prefix}grammar")) is not None:
        yield f"{prefix}grammar", Guide(grammar=grammar)


def _schema(fields: JsonFields, name: str) -> Guide | None:
    """A schema as JSON or as text; true and false are schemas too. None where there is none, or a wrong one."""
    schema = fields.raw(name)
    if isinstance(schema, str):
        return Guide(json_schema=schema)
    if isinstance(schema, dict | bool):
        try:
            return Guide(json_schema=orjson.dumps(schema).decode())
        except orjson.JSONEncodeError:
            fields.wrong(name, f"at most {SCHEMA_DEPTH_MAX} levels deep")
    elif schema is not None:
        fields.wrong(name, "must be an object or a string")
    return None
