"""Caches and weights of more elements than 31 bits count: what lies behind that border is read and written as what lies
before it. Needs torch and triton alone.

A few pages of each are ever touched. In the interpreter they are mapped and no more, with as much room before them: an
offset that is cut to 32 bits finds zeros there, and ends no process. Of a product only the last columns are computed.
"""

import math
import mmap
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch

from benchmarks.gpu_place import Check, Place, differ
from benchmarks.gpu_scene import LAYER, Geometry, Run, Scene
from engine.kernels.backend import AttentionMeta
from engine.kernels.composed import Angles
from engine.kernels.triton import blocks, heads
from engine.kernels.triton.attention import attention
from engine.kernels.triton.launch import interpreted
from engine.kernels.triton.linear import PackedFloats, float_linear
from engine.kernels.triton.quantized import PackedIntegers, quantized_linear
from engine.kernels.triton.tiles import linear_tile, quantized_tile

BORDER = 2**31

FREE_BYTES = 32 << 30
"""Of a GPU's memory, for all of these at once: each of them takes from two to nine GiB."""

_MAP_NORESERVE = 0x4000  # which mmap has no name for; Linux


def far_checks(place: Place) -> Iterator[Check]:
    if place.device.type == "cuda" and (free := torch.cuda.mem_get_info(place.device)[0]) < FREE_BYTES:
        had = f"{FREE_BYTES >> 30} GiB are needed, and {free >> 30} are free"
        print(f"left out: what lies beyond 2^31 elements; {had}", file=sys.stderr)
        return
    ways: dict[str, Callable[[Place], float]] = {
        "attention of many rows": partial(_attention_differs, runs=((0, 5, 40), (1, 0, 9))),
        "attention of single rows": partial(_attention_differs, runs=((0, 39, 40), (1, 8, 9))),
        "keys and values written": _written_differ,
        "blocks gathered and put back": _gathered_differ,
        "product with floats": partial(_float_product_differs, split=False),
        "product with floats, split": partial(_float_product_differs, split=True),
        "product with int8": partial(_integer_product_differs, split=False),
        "product with int8, split": partial(_integer_product_differs, split=True),
    }
    for name, run in ways.items():
        yield Check(name=f"beyond 2^31 elements: {name}", run=partial(run, place))


def _vast(place: Place, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Of at least BORDER elements, whatever they are."""
    count = math.prod(shape)
    assert count > BORDER, shape
    if place.device.type == "cuda":
        return torch.empty(shape, dtype=dtype, device=place.device)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    memory = mmap.mmap(-1, (BORDER + count) * dtype.itemsize, flags=flags)
    return torch.frombuffer(memory, dtype=dtype)[BORDER:].view(shape)


def _far_cache(place: Place, near: torch.Tensor) -> tuple[torch.Tensor, int]:
    """A cache whose last blocks are these, and the number of the first of them, which begins behind the border."""
    first = BORDER // near[0].numel() + 1
    far = _vast(place, (first + len(near), *near.shape[1:]), near.dtype)
    far[first:] = near
    return far, first


def _scene(place: Place) -> Scene:
    kv_heads, dim = (8, 128) if place.large else (2, 16)
    geometry = Geometry(kv_heads=kv_heads, group=2, dim=dim, block_size=16, dtype=torch.int8)
    return Scene([40, 9], geometry, place.device)


def _attention_differs(place: Place, runs: tuple[Run, ...]) -> float:
    scene = _scene(place)
    far, first = _far_cache(place, scene.cache)
    meta, queries, scale = scene.meta(runs), scene.rows(runs), scene.geometry.dim**-0.5
    there = AttentionMeta(
        positions=meta.positions,
        slots=meta.slots,
        query_starts=meta.query_starts,
        context_lengths=meta.context_lengths,
        block_tables=meta.block_tables + first,
    )
    wanted = attention(queries, scene.cache, LAYER, meta, scale, None)
    return differ(attention(queries, far, LAYER, there, scale, None), wanted)


def _written_differ(place: Place) -> float:
    scene = _scene(place)
    near, dim = torch.zeros_like(scene.cache), scene.geometry.dim
    far, first = _far_cache(place, near)
    slots = torch.tensor([13, 2, 39], device=place.device)
    angle = place.random(40, dim // 2)
    angles = Angles(
        torch.tensor([0, 7, 30], dtype=torch.int32, device=place.device), angle.cos(), angle.sin()
    )
    for cache, places in ((near, slots), (far, slots + first * scene.geometry.block_size)):
        q, k, v = (place.random(3, count, dim, seed=count) for count in (4, *[scene.geometry.kv_heads] * 2))
        heads.rotate_and_write(q, k, v, angles, cache, LAYER, places)
    return differ(far[first:], near) if near.any() else math.inf


def _gathered_differ(place: Place) -> float:
    """Of elements that are as long as the words in which they are moved."""
    near = place.random(3, 2, 2, 16, 2, 16)
    far, first = _far_cache(place, near)
    chosen = torch.tensor([first + 2, first], device=place.device)
    gathered = blocks.gather_blocks(far, chosen)
    blocks.scatter_blocks(far, chosen, near[:2])
    return max(differ(gathered, near[[2, 0]]), differ(far[[first + 2, first]], near[:2]))


_LAST = 256
"""Columns that are compared: a multiple of every tile's."""


def _sizes(place: Place) -> tuple[int, int]:
    """(inputs, columns): of more than a chunk, and so many that the last inputs of the first column are far too."""
    inputs = 4096 if place.large else 1056
    return inputs, (BORDER // (inputs - 16) // _LAST + 2) * _LAST


def _float_product_differs(place: Place, *, split: bool) -> float:
    dtype = torch.bfloat16 if place.large else torch.float16
    inputs, columns = _sizes(place)
    near, x = place.random(_LAST, inputs).to(dtype), place.random(3, inputs, seed=1)
    far = _vast(place, (columns, inputs), dtype)
    far[-_LAST:] = near
    multiply = partial(float_linear, x, tile=linear_tile(dtype), split=split)
    return _last_differ(multiply, PackedFloats(weight=far, bias=None), PackedFloats(weight=near, bias=None))


def _integer_product_differs(place: Place, *, split: bool) -> float:
    dtype = torch.bfloat16 if place.large else torch.float16
    inputs, columns = _sizes(place)
    x, codes, scales = (
        place.random(3, inputs, seed=1),
        _bytes(place, inputs),
        place.random(inputs // 32, _LAST),
    )
    far_codes = _vast(place, (inputs, columns), torch.uint8)
    far_scales = torch.empty(inputs // 32, columns, dtype=torch.float16, device=place.device)
    far_codes[:, -_LAST:], far_scales[:, -_LAST:] = codes, scales
    near, far = (
        PackedIntegers(
            codes=each, scales=its, least=None, zeros=None, bits=8, zero=128, in_features=inputs, bias=None
        )
        for each, its in ((codes, scales.half()), (far_codes, far_scales))
    )
    multiply = partial(quantized_linear, x, tile=quantized_tile(dtype), dtype=dtype, split=split)
    return _last_differ(multiply, far, near)


def _bytes(place: Place, inputs: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(2)
    return torch.randint(256, (inputs, _LAST), dtype=torch.uint8, generator=random).to(place.device)


def _last_differ(multiply: Callable[..., torch.Tensor], far: object, near: object) -> float:
    """In its last columns, which the other weight has alone. The last programs that the interpreter runs have not all
    of them."""
    with _few_programs():
        found, wanted = multiply(far), multiply(near)
    columns = 64 if interpreted() else _LAST
    return differ(found[:, -columns:], wanted[:, -columns:])


def _few_programs() -> AbstractContextManager[None]:
    if not interpreted():
        return nullcontext()
    from benchmarks.gpu_interpreter import last_programs

    return last_programs()
