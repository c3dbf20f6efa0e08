"""Matrix products of Triton's interpreter as a GPU takes them: every element is summed in the same order. And a few
programs of a grid alone, where it would take hours to run all.

By itself the interpreter leaves products to a library that sums a row in another order at another place in the matrix.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, TensorHandle


def ordered_dot(
    builder: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any
) -> Any:
    """In place of InterpreterBuilder.create_dot: d + a b, one input after the other."""
    left, right = (x.data.astype(d.data.dtype) for x in (a, b))
    total = d.data.copy()
    for inner in range(left.shape[1]):
        total += left[:, inner, None] * right[inner]
    return TensorHandle(total, d.dtype.scalar)


def install() -> None:
    """For the rest of this process."""
    InterpreterBuilder.create_dot = ordered_dot


@contextmanager
def last_programs() -> Iterator[None]:
    """Meanwhile only those programs of a grid run that are the last along its second axis."""
    run, place, size = GridExecutor.__call__, InterpreterBuilder.set_grid_idx, InterpreterBuilder.set_grid_dim
    skipped = 0

    def run_last(executor: Any, *arguments: Any, **options: Any) -> None:
        nonlocal skipped
        rows, columns, *others = executor.grid
        executor.grid, skipped = (rows, 1, *others), columns - 1
        run(executor, *arguments, **options)

    GridExecutor.__call__ = run_last
    InterpreterBuilder.set_grid_idx = lambda builder, x, y, z: place(builder, x, y + skipped, z)
    InterpreterBuilder.set_grid_dim = lambda builder, x, y, z: size(builder, x, y + skipped, z)
    try:
        with warnings.catch_warnings():  # numpy's, of numbers that nobody made
            warnings.simplefilter("ignore", RuntimeWarning)
            yield
    finally:
        GridExecutor.__call__, InterpreterBuilder.set_grid_idx = run, place
        InterpreterBuilder.set_grid_dim = size
