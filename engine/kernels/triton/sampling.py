"""Tokens drawn on the device from rows of logits: those that `engine.distribution` defines, to the bit.

Weights are integers, so that no sum depends on its order, and each is made by additions and multiplications that are
rounded one by one. Nothing is sorted: the borders of top_k and top_p are searched for, eight probes in a pass over the
row. One program per row: a row's token depends on that row and its wishes alone. Called by the sampler of a device;
only tokens, and what their logprobs are made of, go to the host.
"""

from collections.abc import Sequence
from math import ceil
from struct import Struct

import numpy as np
import torch
import triton
import triton.language as tl

from engine.device_sampler import DrawnToken
from engine.distribution import BROKEN, LOG2_E, VOCAB_MAX, WEIGHT_BITS, log_total
from engine.kernels.triton.copy_lane import CudaMark
from engine.kernels.triton.launch import EXACT
from engine.sequence import SamplingParams

TILE = 1024
"""Tokens that a program looks at at once."""

_WISH = Struct("=qQQqqqdd")
"""What one row wants, eight bytes each: its place among the logits, seed, position, top_k (0: off), least weight,
whether the total is wanted, base-2 logarithms per logit (0: the likeliest token), top_p."""

_SEED_MASK = (1 << 64) - 1


def draw(
    logits: torch.Tensor, places: Sequence[int], params: Sequence[SamplingParams], positions: Sequence[int]
) -> "_Drawing":
    """See engine.device_sampler.DeviceDraw. Rows are contiguous in themselves."""
    vocab = logits.shape[1]
    assert logits.stride(1) == 1 and vocab < VOCAB_MAX, (logits.shape, logits.stride())
    every = zip(places, params, positions, strict=True)
    packed = np.frombuffer(b"".join([_packed(vocab, *each) for each in every]), np.int64)
    wishes = torch.from_numpy(packed.copy())
    if logits.is_cuda:
        wishes = wishes.pin_memory().to(logits.device, non_blocking=True)
    out = torch.empty((len(params), 4), dtype=torch.int64, device=logits.device)
    if params:
        sample[(len(params),)](
            out, logits, wishes, vocab, logits.stride(0),
            TILE=TILE, num_warps=8, **EXACT,
        )  # fmt: skip
    return _Drawing(params, out)


def settle(logits: torch.Tensor) -> None:
    """See engine.device_sampler.DeviceSampler. For the thread that begins steps."""
    if logits.is_cuda:
        CudaMark(torch.cuda.current_stream(logits.device)).wait()


class _Drawing:
    """See engine.device_sampler.DeviceDrawing. out: see `sample`."""

    def __init__(self, params: Sequence[SamplingParams], out: torch.Tensor) -> None:
        self.tokens = out[:, 0]
        self._params = params
        self._out = out
        self._copied: CudaMark | None = None
        if out.is_cuda:
            self._out = torch.empty(out.shape, dtype=out.dtype, pin_memory=True)
            self._out.copy_(out, non_blocking=True)
            self._copied = CudaMark(torch.cuda.current_stream(out.device))

    def read(self) -> list[DrawnToken]:
        if self._copied is not None:
            self._copied.wait()
        return [_drawn(one, *each) for one, each in zip(self._params, self._out.tolist(), strict=True)]


def _packed(vocab: int, place: int, params: SamplingParams, position: int) -> bytes:
    scale = 0.0 if params.temperature == 0.0 else min(LOG2_E / params.temperature, 1e300)
    top_k = params.top_k if 0 < params.top_k < vocab else 0
    least = ceil(params.min_p * 2.0**WEIGHT_BITS)
    asked = params.logprobs is not None
    return _WISH.pack(place, params.seed & _SEED_MASK, position, top_k, least, asked, scale, params.top_p)


def _drawn(params: SamplingParams, token: int, total: int, greatest: int, logit: int) -> DrawnToken:
    """total: BROKEN for a row that has no token. greatest, logit: bits of a float32."""
    if total == BROKEN:
        return DrawnToken(BROKEN, None)
    if params.logprobs is None:
        return DrawnToken(token, None)
    highest, own = np.array([greatest, logit], np.int32).view(np.float32).tolist()
    return DrawnToken(token, own - log_total(total, highest))


@triton.jit(do_not_specialize=["stride"], do_not_specialize_on_alignment=["logits"])
def sample(
    out: tl.tensor,
    logits: tl.tensor,
    wishes: tl.tensor,
    vocab: tl.tensor,
    stride: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    """Not specialized on where rows are, which may be one row for several draws.

    Grid: (n,). wishes: int64 [n, 8], see `_WISH`. out: int64 [n, 4]: the token, 0 where there is none; the sum of all
    weights at temperature 1 if it is wanted, BROKEN where there is no token; and the bits of the largest logit and of
    the token's."""
    wish = wishes + tl.program_id(0) * 8
    row = logits + tl.load(wish) * stride
    top_k, least, asked = tl.load(wish + 3), tl.load(wish + 4), tl.load(wish + 5)
    scale = tl.load(wish + 6).to(tl.float64, bitcast=True)
    top_p = tl.load(wish + 7).to(tl.float64, bitcast=True)
    most, likeliest, broken = _likeliest(row, vocab, TILE)
    token, total = likeliest, tl.full([], 0, tl.int64)
    if broken:
        token, total = tl.full([], 0, tl.int64), tl.full([], -1, tl.int64)
    else:
        if asked > 0:
            total = _sum(row, vocab, most, tl.full([], 1.4426950408889634, tl.float64), TILE)
        if scale > 0.0:
            key, equal_keys = tl.full([], -0x80000000, tl.int64), tl.full([], 0, tl.int64)
            if top_k > 0:
                high = _key(most).to(tl.int64) + 1
                key, above = _border(row, vocab, most, scale, top_k, key, high, key, equal_keys, False, TILE)
                equal_keys = top_k - above
            weight, equal_weights = tl.full([], -1, tl.int64), tl.full([], 0, tl.int64)
            if top_p < 1.0:
                all_kept = _kept_sum(row, vocab, most, scale, key, equal_keys, TILE)
                share = tl.ceil(top_p * all_kept.to(tl.float64)).to(tl.int64)
                wanted = tl.minimum(all_kept, share)
                low, high = tl.full([], 0, tl.int64), tl.full([], (1 << 42) + 1, tl.int64)
                weight, above = _border(
                    row, vocab, most, scale, wanted, low, high, key, equal_keys, True, TILE
                )
                equal_weights = (wanted - above + weight - 1) // weight
            noise = _noise(tl.load(wish + 1), tl.load(wish + 2))
            token = _pick(row, vocab, most, scale, noise, key, equal_keys, weight, equal_weights, least, TILE)
    result = out + tl.program_id(0) * 4
    tl.store(result, token)
    tl.store(result + 1, total)
    tl.store(result + 2, most.to(tl.int32, bitcast=True).to(tl.int64))
    own = tl.load(row + token)
    tl.store(result + 3, own.to(tl.int32, bitcast=True).to(tl.int64))


@triton.jit
def _tile(row: tl.tensor, vocab: tl.tensor, first: tl.tensor, TILE: tl.constexpr) -> tl.tensor:
    ids = first + tl.arange(0, TILE)
    return tl.load(row + ids, mask=ids < vocab, other=float("-inf"))


@triton.jit
def _likeliest(row: tl.tensor, vocab: tl.tensor, TILE: tl.constexpr) -> tl.tensor:
    """(the largest logit, the lowest id that has it, whether there is nothing to be drawn)."""
    most, at, nan = float("-inf"), tl.full([], 0, tl.int64), tl.full([], 0, tl.int32)
    for first in range(0, vocab, TILE):
        values = _tile(row, vocab, first, TILE)
        is_nan = ((values.to(tl.int32, bitcast=True) & 0x7FFFFFFF) > 0x7F800000).to(tl.int32)
        nan = tl.maximum(nan, tl.max(is_nan, 0))
        here = tl.max(values, 0)
        place = tl.min(tl.where(values == here, tl.arange(0, TILE), TILE), 0)
        at = tl.where(here > most, first + place, at).to(tl.int64)
        most = tl.maximum(most, here)
    return most, at, (nan > 0) | (tl.abs(most) == float("inf"))


@triton.jit
def _key(values: tl.tensor) -> tl.tensor:
    """int32 in the order of the float32; both zeros are one."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _weight(values: tl.tensor, most: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """See engine.distribution.weights_of. Whole numbers are the low bits of what is added to 1.5 * 2^52."""
    power = tl.maximum((values.to(tl.float64) - most.to(tl.float64)) * scale, -64.0)
    whole = power + 6755399441055744.0
    rest = power - (whole - 6755399441055744.0)
    raised = rest * 7.070977866508138e-09 + 1.0205905413765595e-07
    raised = raised * rest + 1.3215451633221434e-06
    raised = raised * rest + 1.5252672924850737e-05
    raised = raised * rest + 0.00015403530424776529
    raised = raised * rest + 0.0013333558200794592
    raised = raised * rest + 0.009618129107618665
    raised = raised * rest + 0.05550410866465167
    raised = raised * rest + 0.24022650695910075
    raised = raised * rest + 0.6931471805599462
    raised = raised * rest + 1.0
    bits = raised.to(tl.int64, bitcast=True) + ((whole.to(tl.int64, bitcast=True) + 42) << 52)
    return ((bits.to(tl.float64, bitcast=True) + 6755399441055744.0) - 6755399441055744.0).to(tl.int64)


@triton.jit
def _sum(
    row: tl.tensor, vocab: tl.tensor, most: tl.tensor, scale: tl.tensor, TILE: tl.constexpr
) -> tl.tensor:
    """Of all weights."""
    total = tl.full([], 0, tl.int64)
    for first in range(0, vocab, TILE):
        total += tl.sum(_weight(_tile(row, vocab, first, TILE), most, scale), 0)
    return total


@triton.jit
def _equals_weight(most: tl.tensor, scale: tl.tensor, key: tl.tensor) -> tl.tensor:
    """Of each token that has this key."""
    bits = key.to(tl.int32)
    value = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return _weight(tl.where(key > -0x7F800001, value, float("-inf")), most, scale)


@triton.jit
def _kept_sum(
    row: tl.tensor,
    vocab: tl.tensor,
    most: tl.tensor,
    scale: tl.tensor,
    key: tl.tensor,
    equal_keys: tl.tensor,
    TILE: tl.constexpr,
) -> tl.tensor:
    """Of the weights of tokens above the key, and so many that have it."""
    total = equal_keys * _equals_weight(most, scale, key)
    for first in range(0, vocab, TILE):
        values = _tile(row, vocab, first, TILE)
        total += tl.sum(tl.where(_key(values) > key, _weight(values, most, scale), 0), 0)
    return total


@triton.jit
def _border(
    row: tl.tensor,
    vocab: tl.tensor,
    most: tl.tensor,
    scale: tl.tensor,
    wanted: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    key: tl.tensor,
    equal_keys: tl.tensor,
    BY_WEIGHT: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """(the largest value such that tokens from it on have as much as is wanted, what those above it have). Values are
    weights, of which there is as much as they weigh, among tokens above `key` and so many that have it; or keys, which
    count one each, among all. It is in [low, high)."""
    steps = (tl.arange(0, 8) + 1).to(tl.int64)
    equals_weight = _equals_weight(most, scale, key)
    while high - low > 1:
        probes = low + (high - low) * steps // 9
        reached = tl.where(probes <= equals_weight, equal_keys * equals_weight, 0)
        if not BY_WEIGHT:
            reached = tl.zeros([8], tl.int64)
        lowest, highest = high, low
        for first in range(0, vocab, TILE):
            values = _tile(row, vocab, first, TILE)
            keys = _key(values).to(tl.int64)
            marks, mass, there = keys, tl.full([TILE], 1, tl.int64), keys >= low
            if BY_WEIGHT:
                marks = _weight(values, most, scale)
                mass, there = tl.where(keys > key, marks, 0), (keys >= key) & (marks >= low)
            reached += tl.sum(tl.where(marks[:, None] >= probes[None, :], mass[:, None], 0), 0)
            there = there & (marks < high)
            lowest = tl.minimum(lowest, tl.min(tl.where(there, marks, high), 0))
            highest = tl.maximum(highest, tl.max(tl.where(there, marks, low), 0))
        # It is the value of a token: none of what lies between two of them need be looked at.
        enough = reached >= wanted
        low = tl.maximum(lowest, tl.max(tl.where(enough, probes, low), 0))
        high = tl.minimum(highest + 1, tl.min(tl.where(enough, high, probes), 0))
    above = tl.full([], 0, tl.int64)
    if BY_WEIGHT:
        above = tl.where(equals_weight > low, equal_keys * equals_weight, above)
    for first in range(0, vocab, TILE):
        values = _tile(row, vocab, first, TILE)
        keys = _key(values).to(tl.int64)
        if BY_WEIGHT:
            marks = _weight(values, most, scale)
            above += tl.sum(tl.where((keys > key) & (marks > low), marks, 0), 0)
        else:
            above += tl.sum((keys > low).to(tl.int64), 0)
    return low, above


@triton.jit
def _noise(seed: tl.tensor, position: tl.tensor) -> tl.tensor:
    """See engine.noise."""
    low, high = (position & 0xFFFFFFFF).to(tl.uint32), ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    nothing = low * 0
    first, second, _, _ = tl.philox(seed, low, high, nothing, nothing)
    both = (first.to(tl.uint64) << 32) | second.to(tl.uint64)
    return ((both >> 12) << 1) | 1


@triton.jit
def _kept(
    values: tl.tensor,
    most: tl.tensor,
    scale: tl.tensor,
    key: tl.tensor,
    equal_keys: tl.tensor,
    weight: tl.tensor,
    equal_weights: tl.tensor,
    least: tl.tensor,
) -> tl.tensor:
    """(the weights of one tile, 0 for what is not kept; how many tokens with the keys, and with the weight, of the
    borders are still to be kept)."""
    keys, weights = _key(values).to(tl.int64), _weight(values, most, scale)
    at_key = keys == key
    kept = (keys > key) | (at_key & (tl.cumsum(at_key.to(tl.int64), 0) <= equal_keys))
    at_weight = kept & (weights == weight)
    kept = kept & ((weights > weight) | (at_weight & (tl.cumsum(at_weight.to(tl.int64), 0) <= equal_weights)))
    equal_keys = tl.maximum(equal_keys - tl.sum(at_key.to(tl.int64), 0), 0)
    equal_weights = tl.maximum(equal_weights - tl.sum(at_weight.to(tl.int64), 0), 0)
    return tl.where(kept & (weights >= least), weights, 0), equal_keys, equal_weights


@triton.jit
def _pick(
    row: tl.tensor,
    vocab: tl.tensor,
    most: tl.tensor,
    scale: tl.tensor,
    noise: tl.tensor,
    key: tl.tensor,
    equal_keys: tl.tensor,
    weight: tl.tensor,
    equal_weights: tl.tensor,
    least: tl.tensor,
    TILE: tl.constexpr,
) -> tl.tensor:
    """The first token at which the weights of those that are kept come to more than noise / 2^53 of their sum."""
    total, keys_left, weights_left = tl.full([], 0, tl.int64), equal_keys, equal_weights
    for first in range(0, vocab, TILE):
        values = _tile(row, vocab, first, TILE)
        weights, keys_left, weights_left = _kept(
            values, most, scale, key, keys_left, weight, weights_left, least
        )
        total += tl.sum(weights, 0)
    target = _scaled(noise, total.to(tl.uint64))
    token, keys_left, weights_left = tl.full([], -1, tl.int64), equal_keys, equal_weights
    first = tl.full([], 0, tl.int32)
    while token < 0:
        values = _tile(row, vocab, first, TILE)
        weights, keys_left, weights_left = _kept(
            values, most, scale, key, keys_left, weight, weights_left, least
        )
        here = tl.sum(weights, 0)
        place = tl.sum((tl.cumsum(weights, 0) <= target).to(tl.int32), 0)
        token = tl.where(target < here, first + place, token).to(tl.int64)
        target -= here
        first += TILE
    return token


@triton.jit
def _scaled(noise: tl.tensor, total: tl.tensor) -> tl.tensor:
    """noise * total >> 53 of unsigned numbers, the product of which has more than 64 bits."""
    noise_high, noise_low = noise >> 32, noise & 0xFFFFFFFF
    total_high, total_low = total >> 32, total & 0xFFFFFFFF
    middle = noise_high * total_low + noise_low * total_high + ((noise_low * total_low) >> 32)
    return (((noise_high * total_high) << 11) + (middle >> 21)).to(tl.int64)
