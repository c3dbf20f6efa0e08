"""Every way in which the backend launches kernels, on small tensors: what is to be compiled. Needs torch and triton.

Shapes are those that decide what is compiled: dtypes, head sizes, tiles, what there is beside the weights. Nothing here
computes.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import TypeAlias

import torch

from benchmarks.gpu_checks import INTEGERS, quantized_weight
from benchmarks.gpu_scene import LAYER, Geometry, Scene
from engine.kernels.backend import CODE_MAX, dtype_name, scale_elements
from engine.kernels.composed import Angles
from engine.kernels.triton import blocks, heads, rows, sampling
from engine.kernels.triton.attention import attention
from engine.kernels.triton.linear import CHUNK, PackedFloats, float_linear
from engine.kernels.triton.quantized import pack_integers, quantized_linear
from engine.kernels.triton.tiles import LINEAR, QUANTIZED, AttentionTile, LinearTile, attention_tile
from engine.sequence import SamplingParams

HOST = torch.device("cpu")
DTYPES = (torch.bfloat16, torch.float32)
DIMS = (64, 128, 256)
WINDOW = 300

Tiles: TypeAlias = tuple[LinearTile, ...]


@dataclass(frozen=True, kw_only=True)
class Call:
    """Something that launches kernels, as the backend does. stands_for_all: it is compiled by the tests too."""

    shape: str
    run: Callable[[], object]
    tile: AttentionTile | LinearTile | None = None
    stands_for_all: bool = False

    def name(self) -> str:
        return self.shape if self.tile is None else f"{self.shape}, {self.tile}"


def calls() -> Iterator[Call]:
    yield from attention_calls()
    yield from product_calls()
    yield from other_calls()


_STANDING = {
    (torch.bfloat16, 64, None),
    (torch.bfloat16, 128, None),
    (torch.bfloat16, 128, WINDOW),
    (torch.bfloat16, 256, None),
    (torch.float32, 128, WINDOW),
    (torch.float32, 256, None),
    (torch.int8, 128, None),
    (torch.float8_e4m3fn, 128, None),
    (torch.float8_e4m3fn, 256, WINDOW),
}
"""Of attention: the sizes of most models, and those that take most registers."""

_GROUP = 4
_OTHERS = ((80, _GROUP), (96, _GROUP), (128, 1), (128, 8))
"""Of attention: sizes of heads, and query heads of a key head, that are looked at with a window alone, which takes
more."""


def attention_calls() -> Iterator[Call]:
    """Prompts and single rows."""
    for dtype, dim, window in product((*DTYPES, *CODE_MAX), DIMS, (None, WINDOW)):
        yield from _attention(dtype, dim, _GROUP, window)
    for dtype, (dim, group) in product((torch.bfloat16, *CODE_MAX), _OTHERS):
        yield from _attention(dtype, dim, group, WINDOW)


def _attention(dtype: torch.dtype, dim: int, group: int, window: int | None) -> Iterator[Call]:
    geometry = Geometry(kv_heads=2, group=group, dim=dim, block_size=16, dtype=dtype, window=window)
    scene = Scene([20, 9], geometry, HOST)
    grouped = "" if group == _GROUP else f", groups of {group}"
    for runs in ([(0, 0, 20), (1, 0, 9)], [(0, 19, 20), (1, 8, 9)]):
        arguments = (scene.rows(runs), scene.cache, LAYER, scene.meta(runs), dim**-0.5, window)
        yield Call(
            shape=f"{dtype_name(dtype)}, d = {dim}{grouped}{', window' if window else ''}",
            run=partial(attention, *arguments),
            tile=attention_tile(dtype, dim),
            stands_for_all=(dtype, dim, window) in _STANDING and group == _GROUP,
        )


def product_calls() -> Iterator[Call]:
    outputs, inputs = 256, 2 * CHUNK
    x, bias = torch.zeros(17, inputs), torch.zeros(outputs)
    for dtype in DTYPES:
        weight = torch.zeros(outputs, inputs, dtype=dtype)
        ways = {
            name: partial(float_linear, x, PackedFloats(weight=weight, bias=each))
            for name, each in ((", biased", bias), ("", None))
        }
        standing = ", biased" if dtype == torch.bfloat16 else ""
        yield from _tiled(dtype_name(dtype), LINEAR[dtype.itemsize], ways, standing)
        odd = PackedFloats(weight=torch.zeros(outputs + 1, inputs, dtype=dtype), bias=None)
        ways = {"": partial(float_linear, x, odd)}
        yield from _tiled(f"{dtype_name(dtype)}, odd columns", LINEAR[dtype.itemsize][:1], ways, None)
    for dtype, (bits, offsets) in product(DTYPES, INTEGERS):
        integers = quantized_weight(outputs, inputs, bits, offsets)
        ways = {
            name: partial(quantized_linear, x, pack_integers(integers, each, HOST), dtype=dtype)
            for name, each in ((", biased", bias), ("", None))
        }
        stands = ", biased" if dtype == torch.bfloat16 or (bits, offsets) == (4, "zeros") else None
        name = f"int{bits}, {offsets}, x {dtype_name(dtype)}"
        yield from _tiled(name, QUANTIZED[dtype.itemsize], ways, stands)


def _tiled(
    name: str, tiles: Tiles, ways: Mapping[str, Callable[..., object]], standing: str | None
) -> Iterator[Call]:
    """The first tile, which is used, in all ways; the others as a benchmark has them, without a bias. Not split, and
    split. standing: the way that stands for all."""
    for tile, (biased, multiply), split in product(tiles, ways.items(), (False, True)):
        if tile is tiles[0] or not biased:
            run = partial(multiply, tile=tile, split=split)
            stands = tile is tiles[0] and biased == standing
            yield Call(shape=f"{name}{biased}", run=run, tile=tile, stands_for_all=stands)


def other_calls() -> Iterator[Call]:
    q, k, v = torch.split(torch.zeros(3, 48, 128), [32, 8, 8], dim=1)
    places, slots = torch.zeros(3, dtype=torch.int32), torch.zeros(3, dtype=torch.int64)
    angles = torch.zeros(32, 64)
    made: list[tuple[str, Callable[[], object]]] = []
    for dtype in (*DTYPES, *CODE_MAX):
        cache = torch.zeros(2, 2, 2, 16, 8, 128 + scale_elements(dtype), dtype=dtype)
        run = partial(heads.rotate_and_write, q, k, v, Angles(places, angles, angles), cache, 0, slots)
        made.append((f"heads of 128, {dtype_name(dtype)}", run))
    made.append(("n = 128 of a head", partial(rows.rms_norm, q, torch.zeros(128), 1e-5)))
    made.append(("n = 4096", partial(rows.rms_norm, torch.zeros(3, 4096), torch.zeros(4096), 1e-5)))
    for width in (4096, 8192):
        x = torch.zeros(3, width)
        add = partial(rows.add_rms_norm, x, x.clone(), torch.zeros(width), 1e-5)
        made.append((f"n = {width}, residual", add))
    made.append(("n = 4096, gate", partial(rows.silu_mul, torch.zeros(3, 8192))))
    made.append(("blocks", partial(blocks.gather_blocks, cache, torch.zeros(1, dtype=torch.int64))))
    for vocab in (4096, 4099):
        logits, wishes = torch.zeros(2, vocab), ([SamplingParams()] * 2, [0, 0])
        ways = (logits, logits[1].expand(2, -1))  # a token of each row, and two of one
        made += [(f"rows of {vocab}", partial(sampling.draw, each, [0, 1], *wishes)) for each in ways]
    alike = {"heads of 128, float32", "n = 4096"}
    yield from (Call(shape=name, run=run, stands_for_all=name not in alike) for name, run in made)
