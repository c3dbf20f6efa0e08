"""How fast the GPU kernels can be at best, and what a step is expected to take: arithmetic, which needs no GPU.

A floor is the larger of bytes / the card's memory bandwidth and operations / its rate of dense bfloat16 products: both
from its data sheet, no more. An expectation adds what is known of the kernels to what is assumed of the chip. Shapes
are those of Llama 3 8B. Prints the tables of docs/gpu.md. Needs torch alone.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.gpu_decoder import LLAMA_8B
from engine.kernels.backend import GROUP, dtype_name, scale_elements
from engine.kernels.triton.tiles import attention_tile, linear_tile, quantized_tile

SIZES = LLAMA_8B
BEGIN, END = "<!-- made by benchmarks/gpu_floors.py -->", "<!-- end of floors -->"


class Card(NamedTuple):
    """memory: bytes a second; products: dense bfloat16 operations a second."""

    memory: float
    products: float


CARDS = {"H200": Card(4.8e12, 989e12), "H100": Card(3.35e12, 989e12), "A100": Card(2.04e12, 312e12)}
"""By what is in the card's name. H100 is the SXM card."""

HOST_BYTES_S = 55e9
"""Of PCIe 5 with 16 lanes, as copies get it."""

MEMORY_SHARE = 0.8
"""Assumed of a kernel that reads much: of the data sheet's bandwidth copies get about nine tenths, and the beginning
and the end of each kernel have fewer reads under way."""
PRODUCT_SHARE = 0.7
"""Assumed of tiles that want for nothing: what the best libraries get at the clock that the card keeps under load."""
L2_BYTES_S = 5.5e12
"""Assumed, of an H100 or H200; published measurements of it differ by a factor of two, and this is their lower end."""
LANE_OPERATIONS_S = 132 * 128 * 1.755e9
"""Single operations outside the matrix units: multiprocessors, lanes, clock, from the data sheet."""
LAUNCH_S = 3e-6
"""Assumed between the beginnings of two kernels of a graph, where the first has next to nothing to do."""

LAUNCHES = 13
"""Of a layer in a step of few rows: two norms, four products of which three are split, heads, attention in two passes,
and the gate."""
LANE_OPERATIONS = {None: 0, 8: 3, 4: 4}
"""For each weight, by bits: taking it out of its byte, less its zero, as float32, as bfloat16."""


class Cost(NamedTuple):
    """moved: bytes to and from memory that nobody can do without; operations: of matrix products."""

    moved: float
    operations: float = 0.0

    def floor_s(self, card: Card) -> float:
        return max(self.moved / card.memory, self.operations / card.products)


def attention_cost(rows: int, context: int, dtype: torch.dtype = torch.bfloat16) -> Cost:
    """One layer of so many sequences with a row each."""
    positions = rows * context * 2 * SIZES.kv_heads
    moved = positions * (SIZES.dim + scale_elements(dtype)) * dtype.itemsize
    return Cost(moved, 4 * rows * context * SIZES.heads * SIZES.dim)


def prompt_attention_cost(count: int, context: int) -> Cost:
    """One layer of whole prompts: half of all pairs of positions."""
    rows = count * context
    moved = 4 * 2 * rows * SIZES.heads * SIZES.dim + 2 * rows * 2 * SIZES.kv_heads * SIZES.dim
    return Cost(moved, 2 * rows * context * SIZES.heads * SIZES.dim)


def product_cost(rows: int, outputs: int, inputs: int, bytes_each: float = 2.0) -> Cost:
    """bytes_each: of a weight, with its share of scales."""
    return Cost(4 * rows * (inputs + outputs) + bytes_each * outputs * inputs, 2.0 * rows * outputs * inputs)


def norm_cost(rows: int) -> Cost:
    """With a residual: both are read and written."""
    return Cost(16 * rows * SIZES.hidden)


def gate_cost(rows: int) -> Cost:
    return Cost(12 * rows * SIZES.ffn)


def heads_cost(rows: int, dtype: torch.dtype = torch.bfloat16) -> Cost:
    written = 2 * SIZES.kv_heads * (SIZES.dim + scale_elements(dtype)) * dtype.itemsize
    return Cost(rows * (4 * (2 * SIZES.heads + 2 * SIZES.kv_heads) * SIZES.dim + written))


def blocks_bytes(positions: int) -> float:
    """Of all layers, bfloat16."""
    return positions * SIZES.layers * 2 * SIZES.kv_heads * SIZES.dim * 2


def tokens_cost(rows: int) -> Cost:
    """The logits read once."""
    return Cost(4 * rows * SIZES.vocab)


def step_cost(rows: int, context: int, bits: int | None) -> Cost:
    """A token for each of so many sequences."""
    weights = SIZES.weight_bytes(torch.bfloat16, bits)
    kv = SIZES.layers * attention_cost(rows, context).moved
    return Cost(weights + kv, 2.0 * rows * _weights())


def prompt_cost(rows: int, bits: int | None) -> Cost:
    """The products and the attention of one prompt in one step, and the logits of its last row."""
    attention = SIZES.layers * prompt_attention_cost(1, rows).operations
    return Cost(SIZES.weight_bytes(torch.bfloat16, bits), 2.0 * rows * _weights() + attention)


def expected_s(rows: int, cost: Cost, bits: int | None, card: Card) -> float:
    """Of a step: the slowest of memory, L2, matrix units and lanes, each at what is assumed of it, and its launches.

    A tile of a product reads so many rows in float32 and so many columns of weights for each input from L2, for all
    its products; a tile of attention its keys and values. Integers are taken apart once for each tile of rows, whose
    sums are scaled for each GROUP of inputs."""
    tile = linear_tile(torch.bfloat16) if bits is None else quantized_tile(torch.bfloat16)
    tiles = -(-rows // tile.rows)
    per_input = min(rows, tile.rows) * 4 + tile.columns * (2.0 if bits is None else bits / 8)
    through_l2 = tiles * _weights() / tile.columns * per_input
    keys = attention_tile(torch.bfloat16, SIZES.dim)
    if tiles > 1:
        attended = SIZES.layers * prompt_attention_cost(1, rows).operations
        through_l2 += attended / keys.rows  # 4 rows keys dim operations for 4 keys dim bytes
    scaling = 0 if bits is None else tile.rows / GROUP * (2 if bits == 4 else 1)
    lanes = tiles * _weights() * (LANE_OPERATIONS[bits] + scaling)
    slowest = max(
        cost.moved / card.memory / MEMORY_SHARE,
        through_l2 / L2_BYTES_S,
        cost.operations / card.products / PRODUCT_SHARE,
        lanes / LANE_OPERATIONS_S,
    )
    return slowest + SIZES.layers * LAUNCHES * LAUNCH_S


def _weights() -> int:
    """Of the products of all layers."""
    return SIZES.layers * sum(outputs * inputs for outputs, inputs in SIZES.products().values())


def kernel_floors() -> Iterator[tuple[str, Cost]]:
    yield "attention of a prompt of 8192", prompt_attention_cost(1, 8192)
    for dtype in (torch.bfloat16, torch.int8):
        yield f"attention of 64 rows over 4096, {dtype_name(dtype)}", attention_cost(64, 4096, dtype)
    outputs, inputs = SIZES.products()["gate_up"]
    for rows in (64, 4096):
        yield f"product of {rows} rows, [{outputs}, {inputs}]", product_cost(rows, outputs, inputs)
    outputs, inputs = SIZES.products()["output"]
    yield f"the same of 64 rows, int4, [{outputs}, {inputs}]", product_cost(64, outputs, inputs, 0.625)
    for rows in (64, 4096):
        yield f"`norm` of {rows} rows with a residual", norm_cost(rows)
        yield f"`gate` of {rows} rows", gate_cost(rows)
        yield f"`place_heads` of {rows} rows", heads_cost(rows)
    yield "`sample` of 64 rows", tokens_cost(64)
    yield "`move`, gather or scatter, of 4096 positions", Cost(2 * blocks_bytes(4096))


STEPS = ((1, 512, None), (1, 512, 8), (1, 512, 4), (64, 512, None), (64, 2048, None), (64, 2048, 4))
"""Rows, context, bits of the weights."""
PROMPTS = ((4096, None), (4096, 4))


def tables() -> str:
    """Markdown."""
    cards = [CARDS["H100"], CARDS["H200"]]
    lines = ["| one launch | bytes, operations | H100 | H200 |", "|---|---|---|---|"]
    for name, cost in kernel_floors():
        size = _size(cost)
        lines.append(f"| {name} | {size} | {' | '.join(_time(cost.floor_s(card)) for card in cards)} |")
    host = blocks_bytes(4096) / HOST_BYTES_S
    lines.append(
        f"| blocks of 4096 positions to the host | {_bytes(blocks_bytes(4096))} | {_time(host)} | {_time(host)} |"
    )
    lines += [
        "",
        "| step | bytes, operations | H100: floor, expected | H200: floor, expected |",
        "|---|---|---|---|",
    ]
    steps = [
        (f"{r} {'row' if r == 1 else 'rows'} over {c}, {_named(b)}", r, b, step_cost(r, c, b))
        for r, c, b in STEPS
    ]
    steps += [(f"a prompt of {r}, {_named(b)}", r, b, prompt_cost(r, b)) for r, b in PROMPTS]
    for name, rows, bits, cost in steps:
        cells = (
            f"{_time(cost.floor_s(card))}, {_time(expected_s(rows, cost, bits, card))}" for card in cards
        )
        lines.append(f"| {name} | {_size(cost)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _named(bits: int | None) -> str:
    return "bf16" if bits is None else f"int{bits}"


def _size(cost: Cost) -> str:
    return _bytes(cost.moved) + (f", {cost.operations / 1e12:.2g} Tflop" if cost.operations > 1e11 else "")


def _bytes(count: float) -> str:
    return f"{count / 1e9:.3g} GB" if count >= 1e8 else f"{count / 1e6:.3g} MB"


def _time(seconds: float) -> str:
    """Two digits that count."""
    unit, size = ("ms", 1e-3) if seconds >= 1e-3 else ("us", 1e-6)
    return f"{float(f'{seconds / size:.2g}'):g} {unit}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, metavar="FILE", help="between the marks there")
    path = parser.parse_args().write
    if path is None:
        print(tables())
        return
    before, rest = path.read_text().split(BEGIN)
    path.write_text(f"{before}{BEGIN}\n{tables()}\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
