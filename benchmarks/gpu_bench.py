"""What the kernels take on a GPU, on the shapes of Llama 3 8B, each beside its floor (`gpu_floors`), and what it costs
that all rows have one tile.

Times are medians with a cold L2 cache, except those of whole steps.
"""

from collections.abc import Callable
from functools import partial
from itertools import product

import torch
import triton
from torch.nn.functional import scaled_dot_product_attention

from benchmarks import gpu_floors as floors
from benchmarks.gpu_checks import quantized_weight
from benchmarks.gpu_decoder import random_decoder
from benchmarks.gpu_floors import CARDS, SIZES, Cost
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
from engine.kernels.triton.quantized import PackedIntegers, pack_integers, quantized_linear
from engine.kernels.triton.sampling import draw
from engine.kernels.triton.tiles import LINEAR, QUANTIZED
from engine.sequence import SamplingParams

BLOCK_SIZE = 16


class Report:
    """Prints a line per measurement."""

    def __init__(self, card: str) -> None:
        self._card = next((known for name, known in CARDS.items() if name in card), None)
        if self._card is None:
            print(f"no floors: the limits of {card} are not known here")

    def time(self, name: str, run: Callable[[], object], cost: Cost) -> float:
        """Milliseconds."""
        milliseconds = triton.testing.do_bench(run, warmup=10, rep=40, return_mode="median")
        self.line(name, milliseconds, cost)
        return float(milliseconds)

    def line(self, name: str, milliseconds: float, cost: Cost) -> None:
        rate = (
            f"{cost.moved / milliseconds / 1e6:7.0f} GB/s {cost.operations / milliseconds / 1e9:7.1f} Tflop/s"
        )
        floor = ""
        if self._card is not None:
            lowest = cost.floor_s(self._card) * 1e3
            floor = f"floor {lowest:9.4f} ms = {lowest / milliseconds:4.0%}"
        print(f"{name:58} {milliseconds:9.4f} ms {rate} {floor}", flush=True)

    def cost_of_one_tile(self, name: str, used: float, others: dict[str, float]) -> None:
        """others: what could be used instead, were rows of other batches allowed other bits, in milliseconds."""
        best = min(others, key=others.__getitem__)
        print(
            f"{name:58} costs {used / min(used, others[best]) - 1:+.0%} beside the best: {best}", flush=True
        )


def measure(device: torch.device) -> None:
    """All of it: meant to take less than five minutes, compilation included, of which nobody knows yet."""
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
        run = partial(attention, q, kv, 0, meta, dim**-0.5, None)
        cost = floors.prompt_attention_cost(count, context)
        used = report.time(f"attention, {count} prompts of {context}", run, cost)
        q, k, v = (
            torch.randn(count, each, context, dim, device=device).to(kv.dtype)
            for each in (heads, kv_heads, kv_heads)
        )
        run = partial(scaled_dot_product_attention, q, k, v, is_causal=True, enable_gqa=True)
        other = report.time(f"torch's, not paged, {count} prompts of {context}", run, cost)
        report.cost_of_one_tile(f"attention, {count} prompts of {context}", used, {"torch's": other})
    shapes = ((1, 512), (1, 32768), (8, 4096), (64, 512), (64, 4096))
    for dtype, (count, context) in product((torch.bfloat16, *CODE_MAX), shapes):
        kv, meta = paged([1] * count, context, device, layers=1, dtype=dtype)
        q = torch.randn(count, heads, dim, device=device)
        run = partial(attention, q, kv, 0, meta, dim**-0.5, None)
        name = f"attention, {dtype_name(dtype)}, {count} rows over {context}"
        report.time(name, run, floors.attention_cost(count, context, dtype))


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
            _measure_product(report, torch.randn(count, inputs, device=device), packed, integers, programs)


def _measure_product(
    report: Report,
    x: torch.Tensor,
    floats: PackedFloats,
    integers: dict[int, PackedIntegers],
    programs: int,
) -> None:
    (count, inputs), outputs = x.shape, floats.out_features
    shape = f"{count} x [{outputs}, {inputs}]"
    cost = partial(floors.product_cost, count, outputs, inputs)
    library = partial(torch.mm, x.to(torch.bfloat16), floats.weight.T)
    times = {"bf16": {"cuBLAS": report.time(f"cuBLAS, bf16, {shape}", library, cost(2.0))}}
    ways = [("bf16", tile, partial(float_linear, x, floats, tile), 2.0) for tile in LINEAR[2]]
    ways += [
        (f"int{bits}", tile, partial(quantized_linear, x, packed, tile, torch.bfloat16), bits / 8 + 1 / 8)
        for bits, packed in integers.items()
        for tile in QUANTIZED[2]
    ]
    used: dict[str, tuple[float, torch.Tensor]] = {}
    for kind, tile, run, size in ways:
        tiles = -(-count // tile.rows) * -(-outputs // tile.columns)
        split = tiles < programs and inputs > CHUNK
        got = run(split=split)
        note = "" if kind not in used or torch.equal(used[kind][1], got) else ", OTHER BITS than the first"
        took = report.time(f"{kind} {tile}, {shape}{note}", partial(run, split=split), cost(size))
        used.setdefault(kind, (took, got))
        times.setdefault(kind, {})[f"{tile}{note}"] = took
    for kind, (took, _) in used.items():
        report.cost_of_one_tile(f"{kind}, {shape}", took, times[kind])


def measure_rows(report: Report, device: torch.device) -> None:
    for count in (64, 4096):
        x, residual = torch.randn(2, count, SIZES.hidden, device=device)
        weight = torch.ones(SIZES.hidden, device=device)
        report.time(
            f"norm and residual, {count}",
            partial(rows.add_rms_norm, x, residual, weight, 1e-5),
            floors.norm_cost(count),
        )
        gates = torch.randn(count, 2 * SIZES.ffn, device=device)
        report.time(f"gate, {count}", partial(rows.silu_mul, gates), floors.gate_cost(count))


def measure_heads(report: Report, device: torch.device) -> None:
    for dtype, count in product((torch.bfloat16, *CODE_MAX), (64, 4096)):
        kv, meta = paged([count], count, device, layers=1, dtype=dtype)
        every = [SIZES.heads, SIZES.kv_heads, SIZES.kv_heads]
        q, k, v = torch.split(torch.randn(count, sum(every), SIZES.dim, device=device), every, dim=1)
        angles = Angles(meta.positions, *torch.rand(2, count, SIZES.dim // 2, device=device))
        run = partial(rotate_and_write, q, k, v, angles, kv, 0, meta.slots)
        report.time(f"heads placed, {dtype_name(dtype)}, {count}", run, floors.heads_cost(count, dtype))


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
    report.time("gather of 4096 positions", partial(gather_blocks, kv, chosen), Cost(2 * gathered.nbytes))
    report.time(
        "scatter of 4096 positions", partial(scatter_blocks, kv, chosen, gathered), Cost(2 * gathered.nbytes)
    )
    to_host, from_host = (
        partial(cache.to_host, blocks, nothing, nothing),
        partial(cache.from_host, blocks, nothing),
    )
    report.time("device to host, 4096 positions", to_host, Cost(gathered.nbytes))
    report.time("host to device, 4096 positions", from_host, Cost(gathered.nbytes))


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
        report.time(f"tokens drawn, {name}, {count}", run, floors.tokens_cost(count))


def measure_step(report: Report, device: torch.device, bits: int | None) -> None:
    """One token for each of some sequences, launched one by one and as a CUDA graph."""
    decoder = random_decoder(SIZES, TritonBackend(torch.bfloat16, device), bits, device)
    name = "bf16" if bits is None else f"int{bits}"
    for count, context in ((1, 512), (64, 512), (64, 2048)):
        kv, meta = paged([1] * count, context, device, layers=SIZES.layers)
        tokens, every = torch.arange(count, device=device), torch.arange(count, device=device)
        cost = floors.step_cost(count, context, bits)
        step = partial(decoder.forward, tokens, kv, meta, every)
        step()
        for way, run in (
            ("launched", step),
            ("as a graph", captured(step)),
        ):
            report.line(f"step, {name}, {count} sequences over {context}, {way}", _median_ms(run), cost)
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
    events = [(_event(), _event()) for _ in range(times)]
    for start, end in events:
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return float(sorted(start.elapsed_time(end) for start, end in events)[times // 2])


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
