"""What the kernels take on a GPU, on the shapes of Llama 3 8B, each beside its floor.

A floor is the larger of bytes / the card's memory bandwidth and operations / its rate of dense bfloat16 products.
Times are medians with a cold L2 cache, except those of whole steps.
"""

from collections.abc import Callable
from functools import partial
from itertools import product

import torch
import triton

from benchmarks.gpu_checks import quantized_weight
from benchmarks.gpu_decoder import LLAMA_8B, random_decoder
from engine.cache.copying import nothing
from engine.cache.layout import KVLayout
from engine.cache.staged_cache import StagedKVCache
from engine.kernels.backend import CODE_MAX, AttentionMeta, dtype_name
from engine.kernels.composed import Angles
from engine.kernels.reference import cached
from engine.kernels.triton import rows
from engine.kernels.triton.attention import attention
from engine.kernels.triton.backend import TritonBackend
from engine.kernels.triton.blocks import gather_blocks, scatter_blocks
from engine.kernels.triton.copy_lane import CudaCopyLane
from engine.kernels.triton.heads import rotate_and_write
from engine.kernels.triton.linear import CHUNK, PackedFloats, float_linear
from engine.kernels.triton.quantized import pack_integers, quantized_linear
from engine.kernels.triton.sampling import draw
from engine.kernels.triton.tiles import LINEAR, QUANTIZED, LinearTile
from engine.sequence import SamplingParams

CARDS = {"H200": (4.8e12, 989e12), "H100": (3.35e12, 989e12), "A100": (2.04e12, 312e12)}
"""Bytes and dense bfloat16 operations a second, by what is in the card's name. H100 is the SXM card."""

BLOCK_SIZE = 16
SIZES = LLAMA_8B


class Report:
    """Prints a line per measurement."""

    def __init__(self, card: str) -> None:
        self._limits = next((limits for name, limits in CARDS.items() if name in card), None)
        if self._limits is None:
            print(f"no floors: the limits of {card} are not known here")

    def time(self, name: str, run: Callable[[], object], moved: float, operations: float = 0.0) -> None:
        self.line(
            name, triton.testing.do_bench(run, warmup=10, rep=40, return_mode="median"), moved, operations
        )

    def line(self, name: str, milliseconds: float, moved: float, operations: float = 0.0) -> None:
        rate = f"{moved / milliseconds / 1e6:7.0f} GB/s {operations / milliseconds / 1e9:7.1f} Tflop/s"
        floor = ""
        if self._limits is not None:
            lowest = max(moved / self._limits[0], operations / self._limits[1]) * 1e3
            floor = f"floor {lowest:9.4f} ms = {lowest / milliseconds:4.0%}"
        print(f"{name:58} {milliseconds:9.4f} ms {rate} {floor}", flush=True)


def measure(device: torch.device) -> None:
    """All of it: under five minutes on an H100, compilation included."""
    report = Report(torch.cuda.get_device_name(device))
    measure_attention(report, device)
    measure_products(report, device)
    measure_rows(report, device)
    measure_heads(report, device)
    measure_blocks(report, device)
    measure_sampling(report, device)
    for bits in (None, 8, 4):
        measure_step(report, device, bits)


def measure_attention(report: Report, device: torch.device) -> None:
    heads, kv_heads, dim = SIZES.heads, SIZES.kv_heads, SIZES.dim
    for count, context in ((1, 1024), (4, 1024), (1, 8192)):
        kv, meta = paged([context] * count, context, device, layers=1)
        q = torch.randn(count * context, heads, dim, device=device)
        moved = 4 * 2 * q.numel() + 2 * count * context * 2 * kv_heads * dim
        run = partial(attention, q, kv, 0, meta, dim**-0.5, None)
        report.time(
            f"attention, {count} prompts of {context}", run, moved, 2 * count * context**2 * heads * dim
        )
    shapes = ((1, 512), (1, 32768), (8, 4096), (64, 512), (64, 4096))
    for dtype, (count, context) in product((torch.bfloat16, *CODE_MAX), shapes):
        kv, meta = paged([1] * count, context, device, layers=1, dtype=dtype)
        q = torch.randn(count, heads, dim, device=device)
        moved = 2 * count * context * kv_heads * kv.shape[-1] * dtype.itemsize
        run = partial(attention, q, kv, 0, meta, dim**-0.5, None)
        name = f"attention, {dtype_name(dtype)}, {count} rows over {context}"
        report.time(name, run, moved, 4 * count * context * heads * dim)


def measure_products(report: Report, device: torch.device) -> None:
    """Every tile; those that are not used say whether they would give the same bits."""
    programs = torch.cuda.get_device_properties(device).multi_processor_count
    for outputs, inputs in (SIZES.products()["output"], SIZES.products()["gate_up"]):
        weight = torch.randn(outputs, inputs, device=device, dtype=torch.bfloat16) / inputs**0.5
        packed = PackedFloats(weight=weight, bias=None)
        integers = {
            bits: pack_integers(quantized_weight(outputs, inputs, bits, offsets), None, device)
            for bits, offsets in ((8, "one zero"), (4, "least"))
        }
        for count in (1, 16, 64, 256, 4096):
            x = torch.randn(count, inputs, device=device)
            shape, operations = f"{count} x [{outputs}, {inputs}]", 2.0 * count * outputs * inputs
            around = 4 * count * (inputs + outputs)
            rounded = x.to(torch.bfloat16)
            report.time(
                f"cuBLAS, bf16, {shape}",
                partial(torch.mm, rounded, weight.T),
                around + 2 * weight.numel(),
                operations,
            )
            ways = [
                (f"bf16 {_named(tile)}", partial(float_linear, x, packed, tile), 2.0) for tile in LINEAR[2]
            ]
            ways += [
                (
                    f"int{bits} {_named(tile)}",
                    partial(quantized_linear, x, packed, tile, torch.bfloat16),
                    bits / 8 + 1 / 8,
                )
                for bits, packed in integers.items()
                for tile in QUANTIZED[2]
            ]
            used: dict[str, torch.Tensor] = {}
            for name, run, size in ways:
                kind = name.split()[0]
                tiles = -(-count // 64) * -(-outputs // 128)
                split = tiles < programs and inputs > CHUNK
                got = run(split=split)
                same = torch.equal(used.setdefault(kind, got), got)
                note = "" if same else ", OTHER BITS than the first"
                moved = around + size * weight.numel()
                report.time(f"{name}, {shape}{note}", partial(run, split=split), moved, operations)


def measure_rows(report: Report, device: torch.device) -> None:
    for count in (64, 4096):
        x, residual = torch.randn(2, count, SIZES.hidden, device=device)
        weight = torch.ones(SIZES.hidden, device=device)
        report.time(
            f"norm and residual, {count}",
            partial(rows.add_rms_norm, x, residual, weight, 1e-5),
            16 * x.numel(),
        )
        gates = torch.randn(count, 2 * SIZES.ffn, device=device)
        report.time(f"gate, {count}", partial(rows.silu_mul, gates), 6 * gates.numel())


def measure_heads(report: Report, device: torch.device) -> None:
    for dtype, count in product((torch.bfloat16, *CODE_MAX), (64, 4096)):
        kv, meta = paged([count], count, device, layers=1, dtype=dtype)
        every = [SIZES.heads, SIZES.kv_heads, SIZES.kv_heads]
        q, k, v = torch.randn(count, sum(every), SIZES.dim, device=device).split(every, dim=1)
        angles = Angles(meta.positions, *torch.rand(2, count, SIZES.dim // 2, device=device))
        run = partial(rotate_and_write, q, k, v, angles, kv, 0, meta.slots)
        moved = 4 * (2 * q.numel() + k.numel() + v.numel()) + count * kv[0].nbytes // BLOCK_SIZE
        report.time(f"heads placed, {dtype_name(dtype)}, {count}", run, moved)


def measure_blocks(report: Report, device: torch.device) -> None:
    """A prompt's blocks, gathered and scattered, and brought to host memory and back by the lane. All layers."""
    layout = KVLayout(
        model_digest="",
        layers=SIZES.layers,
        kv_heads=SIZES.kv_heads,
        head_dim=SIZES.dim,
        block_size=BLOCK_SIZE,
        dtype=torch.bfloat16,
    )
    cache = StagedKVCache(layout, 4096 // BLOCK_SIZE, CudaCopyLane(device))
    kv, chosen = cache.tensor.normal_(), torch.randperm(cache.num_blocks, device=device)
    gathered, blocks = gather_blocks(kv, chosen), chosen.tolist()
    report.time("gather of 4096 positions", partial(gather_blocks, kv, chosen), 2 * gathered.nbytes)
    report.time(
        "scatter of 4096 positions", partial(scatter_blocks, kv, chosen, gathered), 2 * gathered.nbytes
    )
    report.time(
        "device to host, 4096 positions", partial(cache.to_host, blocks, nothing, nothing), gathered.nbytes
    )
    report.time("host to device, 4096 positions", partial(cache.from_host, blocks, nothing), gathered.nbytes)


def measure_sampling(report: Report, device: torch.device) -> None:
    """Tokens drawn, and brought to the host. The floor is that of reading the logits once."""
    wishes = {
        "greedy": SamplingParams(),
        "temperature": SamplingParams(temperature=0.8),
        "top_p": SamplingParams(temperature=0.8, top_p=0.95),
        "top_k and top_p": SamplingParams(temperature=0.8, top_k=50, top_p=0.95),
    }
    for count, (name, params) in product((1, 64), wishes.items()):
        logits = 3 * torch.randn(count, SIZES.vocab, device=device)
        run = partial(draw, logits, range(count), [params] * count, range(count))
        report.time(f"tokens drawn, {name}, {count}", run, logits.nbytes)


def measure_step(report: Report, device: torch.device, bits: int | None) -> None:
    """One token for each of some sequences, launched one by one and as a CUDA graph."""
    decoder = random_decoder(SIZES, TritonBackend(torch.bfloat16, device), bits, device)
    name = "bf16" if bits is None else f"int{bits}"
    for count, context in ((1, 512), (64, 512), (64, 2048)):
        kv, meta = paged([1] * count, context, device, layers=SIZES.layers)
        tokens, every = torch.arange(count, device=device), torch.arange(count, device=device)
        moved = SIZES.weight_bytes(torch.bfloat16, bits) + count * context * kv[0].nbytes / BLOCK_SIZE
        step = partial(decoder.forward, tokens, kv, meta, every)
        step()
        for way, run in (
            ("launched", step),
            ("as a graph", captured(step)),
        ):
            report.line(f"step, {name}, {count} sequences over {context}, {way}", _median_ms(run), moved)
        del kv, step, run
        torch.cuda.empty_cache()


def captured(step: Callable[[], object]) -> Callable[[], None]:
    """Replays it."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def paged(
    counts: list[int],
    context: int,
    device: torch.device,
    *,
    layers: int,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[torch.Tensor, AttentionMeta]:
    """A cache of random values, and the last `counts` rows of sequences of `context` positions in it."""
    width = -(-context // BLOCK_SIZE)
    tables = torch.randperm(width * len(counts)).view(len(counts), width)
    shape = (width * len(counts), layers, 2, BLOCK_SIZE, SIZES.kv_heads, SIZES.dim)
    kv = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_()
    if dtype in CODE_MAX:
        kv = cached(kv.float(), dtype)
    positions = torch.cat([torch.arange(context - count, context) for count in counts])
    sequence = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    slots = tables[sequence, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    meta = AttentionMeta(
        positions=positions.int().to(device),
        slots=slots.to(device),
        query_starts=torch.tensor([0, *counts]).cumsum(0).int().to(device),
        context_lengths=torch.full((len(counts),), context, dtype=torch.int32, device=device),
        block_tables=tables.int().to(device),
    )
    return kv, meta


def _median_ms(run: Callable[[], object], times: int = 20) -> float:
    run()
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(times)
    ]
    for start, end in events:
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return sorted(start.elapsed_time(end) for start, end in events)[times // 2]


def _named(tile: LinearTile) -> str:
    return f"{tile.rows} x {tile.columns} by {tile.warps} warps"
