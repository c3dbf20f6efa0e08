"""Every GPU kernel against float64, and every promise of equal bits. Needs torch, triton and numpy alone.

The same checks run in Triton's interpreter, on small shapes, and on a GPU, on the shapes of models. A check answers
with its worst error as a share of what is allowed; two results that must be equal to the bit answer 0 or infinity.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise, product
from typing import TypeAlias

import torch

from benchmarks.gpu_cache_checks import cache_checks
from benchmarks.gpu_decoder import SMALL, random_decoder
from benchmarks.gpu_far_checks import far_checks
from benchmarks.gpu_place import ROW_BOUND, Check, Place, differ, worst
from benchmarks.gpu_ranks import gathered_error, moved_error
from benchmarks.gpu_sampling_checks import sampling_checks
from benchmarks.gpu_scene import LAYER, Geometry, Run, Scene
from benchmarks.gpu_step_checks import step_checks
from engine.kernels.backend import CODE_MAX, GROUP, Decoder, PackedLinear, QuantizedWeight
from engine.kernels.reference import ReferenceBackend
from engine.kernels.triton import rows
from engine.kernels.triton.attention import attention
from engine.kernels.triton.backend import TritonBackend
from engine.kernels.triton.launch import interpreted
from engine.kernels.triton.linear import PackedFloats, float_linear
from engine.kernels.triton.quantized import pack_integers, quantized_linear
from engine.kernels.triton.tiles import linear_tile, quantized_tile

__all__ = ["INTEGERS", "Place", "checks", "quantized_weight"]

ATTENTION_BOUNDS = {torch.float32: 5e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}
"""Absolute, on values of unit variance, by what softmax weights are rounded to."""

PRODUCT_BOUND = 2.0**-18
"""Of the sum of the absolute products, whose factors are rounded beforehand: float32 sums."""

INTEGERS = ((8, "one zero"), (8, "zeros"), (4, "one zero"), (4, "least"), (4, "zeros"))
"""Bits, and what groups have beside their scales, of the weights that model files have."""


Shape: TypeAlias = tuple[int, int, int, int, int | None]
"""Key heads, query heads of each, head dim, block size, window."""


def checks(place: Place) -> Iterator[Check]:
    yield from attention_checks(place)
    yield from product_checks(place)
    yield from row_checks(place)
    yield from cache_checks(place)
    yield from far_checks(place)
    yield from sampling_checks(place)
    for bits in (None, 8, 4) if place.large else (4,):
        name = "floats" if bits is None else f"int{bits}"
        yield Check(name=f"a stack of layers, {name}, float32", run=partial(_stack_error, place, bits))
    yield from step_checks(place)
    gpus = torch.cuda.device_count() if place.device.type == "cuda" else 1
    if gpus > 1:
        yield Check(name=f"{gpus} ranks gather over NCCL", run=partial(gathered_error, "cuda", gpus))
        yield Check(name="a pair moves blocks over NCCL", run=partial(moved_error, "cuda"))


def attention_checks(place: Place) -> Iterator[Check]:
    for geometry in _geometries(place):
        yield Check(name=f"attention is close: {geometry}", run=partial(_attention_error, place, geometry))
    shapes: list[Shape] = [(1, 3, 16, 8, None), (2, 1, 16, 5, 150)]
    if place.large:
        shapes = [(8, 4, 128, 16, None), (8, 4, 128, 16, 900)]
    for geometry in _of_all_dtypes(place, shapes, coded=shapes[1:]):
        yield Check(
            name=f"attention in any chunks is equal: {geometry}", run=partial(_chunks_differ, place, geometry)
        )
        yield Check(
            name=f"attention in any batch is equal: {geometry}", run=partial(_batches_differ, place, geometry)
        )


def product_checks(place: Place) -> Iterator[Check]:
    for dtype, (count, outputs, inputs) in product(place.dtypes, _products(place)):
        name = f"{count} rows x [{outputs}, {inputs}], {str(dtype)[6:]}"
        yield Check(
            name=f"product: {name}", run=partial(_product_error, place, dtype, count, outputs, inputs)
        )
    for dtype, shape, (bits, offsets) in product(place.dtypes, _products(place), INTEGERS):
        count, outputs, inputs = shape
        name = f"{count} rows x [{outputs}, {inputs}], int{bits} with {offsets}, {str(dtype)[6:]}"
        yield Check(
            name=f"product: {name}",
            run=partial(_quantized_error, place, dtype, *shape, bits=bits, offsets=offsets),
        )


def _products(place: Place) -> tuple[tuple[int, int, int], ...]:
    """(rows, outputs, inputs): inputs that are more than a chunk, and an odd number of groups."""
    return ((70, 1000, 576), (300, 4096, 4096)) if place.large else ((5, 70, 96), (2, 9, 1056))


def row_checks(place: Place) -> Iterator[Check]:
    for width in (16, 100, 576) if not place.large else (128, 576, 4096, 14336):
        yield Check(name=f"rms norm of {width}", run=partial(_norm_error, place, width))
        yield Check(name=f"rms norm of {width} with a residual", run=partial(_added_norm_error, place, width))
        yield Check(name=f"gate of {width}", run=partial(_gate_error, place, width))


def _geometries(place: Place) -> Iterator[Geometry]:
    shapes: list[Shape] = [(1, 1, 16, 4, None), (2, 3, 24, 16, None), (1, 4, 40, 7, 20), (1, 2, 16, 16, 1)]
    if place.large:
        shapes = [(8, 4, 128, 16, None), (8, 4, 128, 16, 500), (3, 3, 64, 16, None), (1, 8, 256, 32, None)]
    return _of_all_dtypes(place, shapes, coded=shapes[1:3])


def _of_all_dtypes(place: Place, shapes: list[Shape], coded: list[Shape]) -> Iterator[Geometry]:
    """coded: those that the interpreter, which is slow, tries on caches of bytes."""
    for dtype in place.cache_dtypes():
        for kv_heads, group, dim, size, window in coded if interpreted() and dtype in CODE_MAX else shapes:
            yield Geometry(
                kv_heads=kv_heads, group=group, dim=dim, block_size=size, dtype=dtype, window=window
            )


def _attend(scene: Scene, runs: list[Run]) -> list[torch.Tensor]:
    geometry = scene.geometry
    scale = geometry.dim**-0.5
    out = attention(scene.rows(runs), scene.cache, LAYER, scene.meta(runs), scale, geometry.window)
    return list(torch.split(out, [end - first for _, first, end in runs]))


def _attention_error(place: Place, geometry: Geometry) -> float:
    """Whole prompts, the end of a long one, and single rows."""
    long = 3000 if place.large else 300
    scene = Scene([37, 1, long], geometry, place.device)
    several: list[Run] = [(0, 0, 37), (1, 0, 1), (2, long - 5, long)]
    single: list[Run] = [(2, long - 1, long), (0, 20, 21), (1, 0, 1)]
    bound = ATTENTION_BOUNDS[geometry.factors(place.device)]
    return max(
        worst(got.cpu(), scene.exact(run), bound)
        for runs in (several, single)
        for run, got in zip(runs, _attend(scene, runs), strict=True)
    )


def _chunks_differ(place: Place, geometry: Geometry) -> float:
    """The last rows of a long sequence, taken whole, in uneven chunks and one by one."""
    end, count = (5000, 300) if place.large else (530, 5)
    scene = Scene([end], geometry, place.device)
    first = end - count
    (whole,) = _attend(scene, [(0, first, end)])
    faults = 0.0
    for step in (1, 64, 100) if place.large else (1, 3):
        cuts = pairwise([*range(first, end, step), end])
        faults = max(faults, differ(torch.cat([_attend(scene, [(0, a, b)])[0] for a, b in cuts]), whole))
    return faults


def _batches_differ(place: Place, geometry: Geometry) -> float:
    """Rows of one sequence alone, and among others, in both kinds of call."""
    lengths = [700, 3, 5000, 64] if place.large else [20, 3, 290, 33]
    scene = Scene(lengths, geometry, place.device)
    few: list[Run] = [(s, max(0, length - 4), length) for s, length in enumerate(lengths)]
    single: list[Run] = [(s, length - 1, length) for s, length in enumerate(lengths)]
    return max(
        differ(_attend(scene, [run])[0], got)
        for runs in (few, single)
        for run, got in zip(runs, _attend(scene, runs), strict=True)
    )


def _product_error(place: Place, dtype: torch.dtype, count: int, outputs: int, inputs: int) -> float:
    x, bias = place.random(count, inputs), place.random(outputs, seed=1)
    weight = (place.random(outputs, inputs, seed=2) / inputs**0.5).to(dtype)
    packed = PackedFloats(weight=weight, bias=bias)
    multiply = partial(float_linear, packed=packed, tile=linear_tile(dtype))
    return max(
        _rows_differ(x, multiply), _against_exact(x, dtype, weight.double(), weight.double(), bias, multiply)
    )


def _quantized_error(
    place: Place, dtype: torch.dtype, count: int, outputs: int, inputs: int, *, bits: int, offsets: str
) -> float:
    x, bias = place.random(count, inputs), place.random(outputs, seed=1)
    weight = quantized_weight(outputs, inputs, bits, offsets)
    packed = pack_integers(weight, bias, place.device)
    multiply = partial(quantized_linear, packed=packed, tile=quantized_tile(dtype), dtype=dtype)
    values = weight.values().double().to(place.device)
    summed = values.abs() + (1 << bits) * weight.scales.double().repeat_interleave(GROUP, 1).to(place.device)
    return max(_rows_differ(x, multiply), _against_exact(x, dtype, values, summed, bias, multiply))


def quantized_weight(outputs: int, inputs: int, bits: int, offsets: str) -> QuantizedWeight:
    """Random, of values near one."""
    random = torch.Generator().manual_seed(3)
    groups = (outputs, inputs // GROUP)
    scales = (torch.rand(groups, generator=random) / (1 << bits)).half()
    zeros = torch.randint(0, 1 << bits, groups, dtype=torch.uint8, generator=random)
    return QuantizedWeight(
        codes=torch.randint(0, 1 << bits, (outputs, inputs), dtype=torch.uint8, generator=random),
        scales=scales,
        least=(scales.float() * -(1 << (bits - 1))).half() if offsets == "least" else None,
        bits=bits,
        zero=1 << (bits - 1) if offsets == "one zero" else 0,
        zeros=zeros if offsets == "zeros" else None,
    )


def _against_exact(
    x: torch.Tensor,
    dtype: torch.dtype,
    values: torch.Tensor,
    summed: torch.Tensor,
    bias: torch.Tensor,
    multiply: Callable[..., torch.Tensor],
) -> float:
    rounded = x.to(torch.float32 if interpreted() and dtype == torch.bfloat16 else dtype).double()
    allowed = PRODUCT_BOUND * (rounded.abs() @ summed.abs().T + bias.double().abs())
    return worst(multiply(x, split=False), rounded @ values.T + bias.double(), allowed)


def _rows_differ(x: torch.Tensor, multiply: Callable[..., torch.Tensor]) -> float:
    """All rows at once, the last alone, some, and each of them split over more programs."""
    whole = multiply(x, split=False)
    last = slice(len(x) - 1, None)
    ways = ((slice(None), True), (last, False), (last, True))
    return max(differ(multiply(x[part], split=split), whole[part]) for part, split in ways)


def _norm_error(place: Place, width: int) -> float:
    wide, weight = place.random(6, 3 * width), place.random(width, seed=1)
    x = wide.view(6, 3, width)[:, 1:]
    exact = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
    return worst(rows.rms_norm(x, weight, 1e-5), exact, ROW_BOUND * exact.abs() + 1e-12)


def _added_norm_error(place: Place, width: int) -> float:
    x, residual, weight = (
        place.random(6, width) if seed == 0 else place.random(6, width, seed=seed) for seed in range(3)
    )
    summed = x + residual
    exact = (
        summed.double()
        * (summed.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        * weight[0].double()
    )
    got = rows.add_rms_norm(x, residual, weight[0].contiguous(), 1e-5)
    return max(differ(residual, summed), worst(got, exact, ROW_BOUND * exact.abs() + 1e-12))


def _gate_error(place: Place, width: int) -> float:
    x = place.random(3, 2 * width) * 4
    gate, up = x.double().chunk(2, dim=1)
    exact = gate * gate.sigmoid() * up
    return worst(rows.silu_mul(x), exact, ROW_BOUND * exact.abs() + 1e-12)


class _Exact(ReferenceBackend):
    """Inputs of quantized weights are not rounded."""

    def pack_quantized(self, weight: QuantizedWeight, bias: torch.Tensor | None = None) -> PackedLinear:
        return self.pack(weight.values(), bias)


def _stack_error(place: Place, bits: int | None) -> float:
    """Two prompts, one in chunks, then a row each: as by the reference, and equal however they are cut."""
    tested, exact = TritonBackend(torch.float32, place.device), _Exact(torch.float32)
    batches: tuple[list[list[Run]], ...] = (
        [[(0, 0, 13), (1, 0, 4)], [(1, 4, 8)], [(0, 13, 14), (1, 8, 9)]],
        [[(0, 0, 14), (1, 0, 9)]],
    )
    host = torch.device("cpu")
    decoder = random_decoder(SMALL, tested, bits, host)
    chunked, whole = (_logits(decoder, tested.device, each) for each in batches)
    wanted = _logits(random_decoder(SMALL, exact, bits, host), exact.device, batches[1])
    return max(differ(chunked, whole), worst(whole, wanted.double(), 2e-4))


def _logits(decoder: Decoder, device: torch.device, batches: list[list[Run]]) -> torch.Tensor:
    """Of both sequences, in order, on the host."""
    geometry = Geometry(kv_heads=SMALL.kv_heads, group=2, dim=SMALL.dim, block_size=4, dtype=torch.float32)
    scene = Scene([14, 9], geometry, device)
    tokens = [torch.arange(length) * 37 % SMALL.vocab for length in (14, 9)]
    found: list[list[torch.Tensor]] = [[], []]
    for runs in batches:
        token_ids = torch.cat([tokens[sequence][first:end] for sequence, first, end in runs]).to(device)
        every = torch.arange(len(token_ids), device=device)
        logits = decoder.forward(token_ids, scene.cache, scene.meta(runs), every).cpu()
        for run, part in zip(runs, torch.split(logits, [end - first for _, first, end in runs]), strict=True):
            found[run[0]].append(part)
    return torch.cat([part for parts in found for part in parts])
