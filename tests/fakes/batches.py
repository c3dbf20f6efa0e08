"""A batch one run at a time, for those who look at runs, and made of runs, for those who write them down."""

from dataclasses import dataclass

import numpy as np

from engine.batch import Batch, Shape, lay_out


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchItem:
    """A run of consecutive tokens of one sequence.

    tokens: the ids to compute; first_position: absolute position of tokens[0]; block_table: ids of all blocks up to and
    including the one that holds the run's last token; wants_logits: whether the row of the last token is sampled from.
    """

    tokens: tuple[int, ...]
    first_position: int
    block_table: tuple[int, ...]
    wants_logits: bool


def items_of(batch: Batch, block_size: int) -> list[BatchItem]:
    starts, rows = batch.query_starts.tolist(), set(batch.rows.tolist())
    return [
        BatchItem(
            tokens=tuple(batch.token_ids[first:end].tolist()),
            first_position=int(batch.positions[first]),
            block_table=tuple(table[: -(-int(context) // block_size)].tolist()),
            wants_logits=end - 1 in rows,
        )
        for first, end, table, context in zip(
            starts, starts[1:], batch.block_tables, batch.context_lengths, strict=False
        )
    ]


def batch_of(*items: BatchItem, block_size: int) -> Batch:
    tables = np.full((len(items), max(len(item.block_table) for item in items)), -1, np.int32)
    for row, item in zip(tables, items, strict=True):
        row[: len(item.block_table)] = item.block_table
    counts = np.array([len(item.tokens) for item in items], np.int32)
    return lay_out(
        Shape(counts, np.array([item.wants_logits for item in items], np.bool_)),
        token_ids=[token for item in items for token in item.tokens],
        firsts=np.array([item.first_position for item in items], np.int32),
        block_tables=tables,
        block_size=block_size,
    )
