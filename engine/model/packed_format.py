"""How a folder's weights are packed into whole numbers: the quantization_config of config.json.

Read when a configuration is read, so that what is not served is refused before any weight is opened. Knows the two
formats by their fields; never sees a tensor.
"""

from dataclasses import dataclass
from enum import StrEnum

from engine.errors import ModelError
from engine.model.fields import Fields


class Method(StrEnum):
    AWQ = "awq"
    GPTQ = "gptq"


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedFormat:
    """bits: of a code, 4 or 8. group_size: inputs that share a scale, None for all of them.

    zeros_less_one: zeros are stored as one less than they are. in_order: inputs belong to groups in their order.
    """

    method: Method
    bits: int
    group_size: int | None
    zeros_less_one: bool
    in_order: bool


def read_packed_format(config: Fields) -> PackedFormat | None:
    """None where weights are floats. Raises ModelError for what is not served, naming the field."""
    if not config.has("quantization_config"):
        return None
    fields = config.section("quantization_config")
    method = Method(fields.choice("quant_method", tuple(Method)))
    return _awq(fields) if method is Method.AWQ else _gptq(fields)


def _awq(fields: Fields) -> PackedFormat:
    for key in ("version", "format", "checkpoint_format"):
        fields.choice(key, ("gemm",), "gemm")
    if fields.text("backend", "auto").lower() == "llm-awq":
        raise ModelError(
            "quantization_config.backend 'llm-awq' is not served; served is AutoAWQ's layout, gemm"
        )
    if not fields.flag("zero_point", True):
        raise ModelError("quantization_config.zero_point is false; served is true")
    return PackedFormat(
        method=Method.AWQ,
        bits=_bits(fields, (4,)),
        group_size=_group_size(fields),
        zeros_less_one=False,
        in_order=True,
    )


def _gptq(fields: Fields) -> PackedFormat:
    key = "checkpoint_format" if fields.has("checkpoint_format") else "format"
    layout = fields.choice(key, ("gptq", "gptq_v2"), "gptq")
    fields.choice("pack_dtype", ("int32",), "int32")
    if fields.flag("is_marlin_format", False):
        raise ModelError("quantization_config.is_marlin_format is true; served is false")
    for pattern in fields.section("dynamic").sections():
        if not pattern.startswith("-:"):  # whatever those match stays floats, and the tensors say so
            raise ModelError(
                f"quantization_config.dynamic has {pattern[:60]!r}; served are patterns after -:"
            )
    return PackedFormat(
        method=Method.GPTQ,
        bits=_bits(fields, (4, 8)),
        group_size=_group_size(fields),
        zeros_less_one=layout == "gptq",
        in_order=not fields.flag("desc_act", False),
    )


def _bits(fields: Fields, served: tuple[int, ...]) -> int:
    bits = fields.integer("bits")
    if bits not in served:
        raise ModelError(f"quantization_config.bits is {bits}; served are {', '.join(map(str, served))}")
    return bits


def _group_size(fields: Fields) -> int | None:
    size = fields.integer("group_size", low=-1)
    if size == 0:
        raise ModelError("quantization_config.group_size is 0, wanted -1 or an integer >= 1")
    return None if size == -1 else size
