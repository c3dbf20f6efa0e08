"""What places heads in the cache and moves whole blocks, against the reference. Needs torch and triton alone."""

import math
import warnings
from collections.abc import Iterator
from functools import partial
from queue import Queue

import torch

from benchmarks.gpu_place import ROW_BOUND, Check, Place, differ, worst
from engine.cache.copying import Copying, nothing
from engine.cache.layout import KVLayout
from engine.cache.staged_cache import StagedKVCache
from engine.kernels.backend import CODE_MAX, dtype_name, scale_elements
from engine.kernels.composed import Angles
from engine.kernels.reference import ReferenceBackend, cached, cached_values
from engine.kernels.triton import blocks
from engine.kernels.triton.backend import TritonBackend
from engine.kernels.triton.copy_lane import CudaCopyLane
from engine.kernels.triton.launch import interpreted

COPIED_S = 60
"""Given to a copy; who fails, says so at once."""


def cache_checks(place: Place) -> Iterator[Check]:
    for dim in (16, 40) if not place.large else (64, 80, 128):
        yield Check(name=f"rotation: heads of {dim}", run=partial(_rotation_error, place, dim))
        for dtype in place.cache_dtypes():
            name = f"heads of {dim}, {dtype_name(dtype)}"
            yield Check(name=f"keys and values written: {name}", run=partial(_write_error, place, dim, dtype))
    for dtype in CODE_MAX:
        name = f"numbers of any size rounded: {dtype_name(dtype)}"
        yield Check(name=name, run=partial(_codes_differ, place, dtype))
    yield Check(name="blocks gathered and put back", run=partial(_gathers_differ, place))
    if place.device.type == "cuda":
        yield Check(name="blocks to the host and back, waited for", run=partial(_staged_differ, place))
        yield Check(name="blocks to the host and back beside steps", run=partial(_beside_differ, place))


def _heads(place: Place, dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(q, k, v) as slices of one projection, 3 query and 2 key heads; positions."""
    fused = place.random(4, 7, dim)
    q, k, v = torch.split(fused, [3, 2, 2], dim=1)
    return q, k, v, torch.tensor([0, 1, 77, 30], dtype=torch.int32, device=place.device)


def _angles(place: Place, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.outer(torch.arange(80.0), torch.logspace(0, -3, dim // 2)).to(place.device)
    return angles.cos(), angles.sin()


_SLOTS = (13, 2, 19, 8)


def _placed(place: Place, dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(queries, the cache they were placed in, what the reference makes of it), on the host."""
    made = []
    for device, operations in (
        (place.device, TritonBackend(torch.float32, place.device)),
        (torch.device("cpu"), ReferenceBackend(torch.float32)),
    ):
        q, k, v, positions = (x.to(device) for x in _heads(place, dim))
        cos, sin = (x.to(device) for x in _angles(place, dim))
        cache = torch.zeros((4, 2, 2, 5, 2, dim + scale_elements(dtype)), dtype=dtype, device=device)
        slots = torch.tensor(_SLOTS, device=device)
        operations.rotate_and_write(q, k, v, Angles(positions, cos, sin), cache, 1, slots)
        made += [q.cpu(), cache.cpu()]
    return made[0], made[1], made[3]


def _rotation_error(place: Place, dim: int) -> float:
    q, _, _, positions = _heads(place, dim)
    c, s = (x[positions.long()].unsqueeze(1).double() for x in _angles(place, dim))
    first, second = q.double().chunk(2, dim=-1)
    exact = torch.cat((first * c - second * s, second * c + first * s), dim=-1)
    allowed = ROW_BOUND * (first.abs() + second.abs()).repeat(1, 1, 2) + 1e-12
    return worst(_placed(place, dim, torch.float32)[0], exact.cpu(), allowed.cpu())


def _write_error(place: Place, dim: int, dtype: torch.dtype) -> float:
    """As the reference writes, to the bit, but that the interpreter cuts to 16 bits; and nothing else."""
    _, got, wanted = _placed(place, dim, dtype)
    if interpreted() and dtype.itemsize == 2:
        room = torch.finfo(dtype).eps * wanted.double().abs() + torch.finfo(dtype).smallest_normal
        return worst(got, wanted.double(), room)
    return differ(got.view(torch.uint8), wanted.view(torch.uint8))


def _codes_differ(place: Place, dtype: torch.dtype) -> float:
    """Heads whose numbers are of all sizes, zero and broken ones among them."""
    dim, sizes = 64, torch.logspace(-12, 1, 64)
    x = place.random(9, 2, dim).cpu() * sizes
    x[0], x[1, 0, 3], x[2, 1, 5], x[3] = 0.0, torch.nan, torch.inf, x[3] * 1e-38
    x[4] = (torch.arange(dim) - 31.5) * 14.0
    x = x.to(place.device)
    cache = torch.zeros((9, 1, 2, 1, 2, dim + scale_elements(dtype)), dtype=dtype, device=place.device)
    still = torch.ones(1, dim // 2, device=place.device)
    positions = torch.zeros(9, dtype=torch.int32, device=place.device)
    angles = Angles(positions, still, torch.zeros_like(still))
    slots = torch.arange(9, device=place.device)
    with warnings.catch_warnings():  # in the interpreter: numpy's, of numbers that are not finite
        warnings.simplefilter("ignore", RuntimeWarning)
        TritonBackend(torch.float32, place.device).rotate_and_write(x.clone(), x, x, angles, cache, 0, slots)
    got, wanted = cache[:, 0, 1, 0].cpu(), cached(x.cpu(), dtype)
    # Which NaN a scale is, is nobody's concern.
    same = (got.view(torch.uint8) == wanted.view(torch.uint8)).all(-1)
    broken = cached_values(wanted).isnan().all(-1) & cached_values(got).isnan().all(-1)
    return 0.0 if bool((same | broken).all()) else math.inf


def _gathers_differ(place: Place) -> float:
    cache = place.random(9, 2, 2, 3, 1, 8).to(torch.float16)
    chosen = torch.tensor([4, 0, 8], device=place.device)
    gathered = blocks.gather_blocks(cache, chosen)
    target, wanted = torch.zeros_like(cache), torch.zeros_like(cache)
    wanted[chosen] = cache[chosen]
    blocks.scatter_blocks(target, chosen, gathered)
    return max(differ(gathered, cache[chosen]), differ(target, wanted))


def _staged(place: Place) -> StagedKVCache:
    """64 blocks, and stages that hold only a few."""
    layout = KVLayout(model_digest="", layers=8, kv_heads=8, head_dim=128, block_size=16, dtype=torch.float16)
    return StagedKVCache(layout, 64, CudaCopyLane(place.device), staged_bytes=5 * layout.block_bytes())


def _staged_differ(place: Place) -> float:
    """Blocks that are still being computed go to host memory, and come back before the next step reads them."""
    cache = _staged(place)
    for turn in range(3):
        torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]
        cache.tensor.fill_(turn + 1.0)
        chosen = torch.randperm(64)[:33].tolist()
        cache.to_host(chosen, nothing, nothing)
        cache.tensor.zero_()
        cache.from_host(chosen, nothing)
        sums = cache.tensor.double().sum((1, 2, 3, 4, 5)).cpu()
        there = torch.zeros(64, dtype=torch.float64)
        there[chosen] = (turn + 1.0) * cache.tensor[0].numel()
        if not torch.equal(sums, there):
            return math.inf
    return 0.0


def _beside_differ(place: Place) -> float:
    """The same by a thread of its own: steps go on in other blocks, and nobody reads before it is told."""
    cache, told = _staged(place), Queue[object]()
    copying = Copying(told.put, told.put)
    cache.copy_beside(copying.begin)
    copying.start()
    sent, received, others = slice(0, 21), slice(21, 42), slice(42, 64)
    worst_found = 0.0
    for turn in range(3):
        torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]
        cache.tensor[sent] = turn + 1.0
        cache.to_host(range(21), nothing, nothing)
        for _ in range(50):
            cache.tensor[others] += 1.0
        worst_found = worst_found if told.get(timeout=COPIED_S) is nothing else math.inf
        for block in range(21):
            cache.block_view(21 + block)[:] = cache.block_view(block)
        cache.from_host(range(21, 42), nothing)
        for _ in range(50):
            cache.tensor[others] += 1.0
        worst_found = worst_found if told.get(timeout=COPIED_S) is nothing else math.inf
        same = bool((cache.tensor[received] == turn + 1.0).all())
        left_alone = bool((cache.tensor[others] == 100.0 * (turn + 1)).all())
        worst_found = worst_found if same and left_alone else math.inf
    copying.stop()
    return worst_found
