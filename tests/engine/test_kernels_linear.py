"""The packed product: right for any shape, and the same bits for a row wherever it stands."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

DTYPES = (torch.float32, torch.bfloat16)


def product_and_bound(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The exact product of the rounded operands, and how far a float32 sum in any order may be from it."""
    x, weight = x.to(dtype).double(), weight.to(dtype).double()
    bias = torch.zeros(weight.shape[0]) if bias is None else bias
    magnitude = x.abs() @ weight.abs().T + bias.abs()
    return x @ weight.T + bias, (x.shape[1] + 2) * 2.0**-23 * magnitude + 1e-30


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 20),
    inputs=st.integers(1, 130),
    outputs=st.integers(1, 200),
    biased=st.booleans(),
    seed=st.integers(0, 99),
)
def test_product_of_any_shape_is_within_the_rounding_of_a_float32_sum(
    backend_of, dtype, rows, inputs, outputs, biased, seed
):
    backend = backend_of(dtype, 1)
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, inputs, generator=random)
    weight = torch.randn(outputs, inputs, generator=random)
    bias = torch.randn(outputs, generator=random) if biased else None
    wanted, bound = product_and_bound(x, weight, bias, dtype)
    got = backend.linear(x, backend.pack(weight, bias))
    assert got.dtype == torch.float32 and got.shape == (rows, outputs)
    assert ((got - wanted).abs() <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 48), (100, 51), (577, 1000)])
def test_a_row_has_the_same_bits_alone_and_in_every_batch(backend_of, dtype, inputs, outputs):
    backend = backend_of(dtype, 1)
    packed = backend.pack(torch.randn(outputs, inputs), torch.randn(outputs))
    x = torch.randn(40, inputs)
    alone = torch.cat([backend.linear(x[i : i + 1].clone(), packed) for i in range(40)])
    for count in (2, 3, 5, 6, 7, 8, 13, 16, 31, 40):
        first = 40 - count
        assert torch.equal(backend.linear(x[first:].clone(), packed), alone[first:]), count


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 8, 40, 600])
def test_two_threads_compute_the_same_bits_as_one(backend_of, dtype, rows):
    one, two = backend_of(dtype, 1), backend_of(dtype, 2)
    if one.name == "reference":
        pytest.skip("plain torch has its own threads")
    weight, x = torch.randn(700, 300), torch.randn(rows, 300)
    assert torch.equal(one.linear(x, one.pack(weight)), two.linear(x, two.pack(weight)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_broken_row_leaves_its_neighbours_alone_and_is_seen_as_broken(backend_of, dtype):
    backend = backend_of(dtype, 1)
    packed = backend.pack(torch.randn(70, 33))
    x = torch.randn(9, 33)
    wanted = backend.linear(x, packed)
    x[4, 7] = torch.nan
    got = backend.linear(x, packed)
    assert got[4].isnan().all()
    assert torch.equal(got[[0, 1, 2, 3, 5, 6, 7, 8]], wanted[[0, 1, 2, 3, 5, 6, 7, 8]])


def test_packing_keeps_neither_weight_nor_bias(backend_of):
    backend = backend_of(torch.float32, 1)
    weight, bias, x = torch.randn(64, 20), torch.randn(64), torch.randn(3, 20)
    packed = backend.pack(weight, bias)
    wanted = backend.linear(x, packed)
    weight.zero_()
    bias.zero_()
    assert torch.equal(backend.linear(x, packed), wanted)
    assert (packed.out_features, packed.in_features) == (64, 20)


def test_no_rows_give_no_rows(backend_of):
    backend = backend_of(torch.bfloat16, 2)
    assert backend.linear(torch.empty(0, 20), backend.pack(torch.randn(10, 20))).shape == (0, 10)
