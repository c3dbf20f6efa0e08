"""Products with weights of small integers: right, and the same bits for a row wherever it stands."""

from itertools import product

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType

from engine.kernels.backend import GROUP, QuantizedWeight
from engine.kernels.reference import ReferenceBackend, round_to_bytes
from engine.model.gguf_blocks import quantized_weight
from engine.model.quantize import quantize

FORMATS = list(product((4, 8), ("one zero", "least", "zeros")))


def weight_of(outputs, inputs, bits, offsets):
    random = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 1 << bits, (outputs, inputs), dtype=torch.uint8, generator=random)
    scales = (torch.rand(outputs, inputs // GROUP, generator=random) * 0.02).half()
    zeros = torch.randint(0, 1 << bits, scales.shape, dtype=torch.uint8, generator=random)
    return QuantizedWeight(
        codes=codes,
        scales=scales,
        least=(scales.float() * -(1 << (bits - 1))).half() if offsets == "least" else None,
        bits=bits,
        zero=1 << (bits - 1) if offsets == "one zero" else 0,
        zeros=zeros if offsets == "zeros" else None,
    )


@pytest.mark.parametrize(("bits", "offsets"), FORMATS)
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 32), (31, 64), (33, 96), (100, 576), (700, 1536)])
@pytest.mark.parametrize("biased", [True, False])
def test_a_product_is_the_exact_one_of_the_rounded_operands(
    backend_of, bits, offsets, outputs, inputs, biased
):
    backend = backend_of(torch.bfloat16, 1)
    weight = weight_of(outputs, inputs, bits, offsets)
    x, bias = torch.randn(13, inputs), torch.randn(outputs) if biased else None
    got = backend.linear(x, backend.pack_quantized(weight, bias))
    rounded, values = round_to_bytes(x).double(), weight.values().double()
    wanted = rounded @ values.T + (bias if biased else 0)
    magnitude = (
        rounded.abs() @ (values.abs() + (1 << bits) * weight.scales.double().repeat_interleave(GROUP, 1)).T
    )
    assert got.shape == (13, outputs) and got.dtype == torch.float32
    assert ((got - wanted).abs() <= (inputs / GROUP + 4) * 2.0**-22 * magnitude + 1e-6).all()


@pytest.mark.parametrize(("bits", "offsets"), FORMATS)
def test_a_row_has_the_same_bits_alone_and_in_every_batch(backend_of, bits, offsets):
    backend = backend_of(torch.bfloat16, 1)
    packed = backend.pack_quantized(weight_of(100, 576, bits, offsets), torch.randn(100))
    x = torch.randn(40, 576)
    alone = torch.cat([backend.linear(x[i : i + 1].clone(), packed) for i in range(40)])
    for count in (2, 3, 5, 6, 7, 8, 13, 31, 40):
        assert torch.equal(backend.linear(x[40 - count :].clone(), packed), alone[40 - count :]), count


@pytest.mark.parametrize(("bits", "offsets"), FORMATS)
@pytest.mark.parametrize("rows", [1, 8, 500])
def test_two_threads_compute_the_same_bits_as_one(backend_of, bits, offsets, rows):
    one, two = backend_of(torch.bfloat16, 1), backend_of(torch.bfloat16, 2)
    if one.name == "reference":
        pytest.skip("plain torch has its own threads")
    weight, x = weight_of(700, 576, bits, offsets), torch.randn(rows, 576)
    first = one.linear(x, one.pack_quantized(weight))
    assert torch.equal(first, two.linear(x, two.pack_quantized(weight)))


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_a_broken_row_leaves_its_neighbours_alone_and_is_seen_as_broken(backend_of, broken):
    backend = backend_of(torch.bfloat16, 1)
    packed = backend.pack_quantized(weight_of(70, 64, 4, "least"))
    x = torch.randn(9, 64)
    wanted = backend.linear(x, packed)
    x[4, 40] = broken
    got = backend.linear(x, packed)
    others = [0, 1, 2, 3, 5, 6, 7, 8]
    assert not got[4].isfinite().any()
    assert torch.equal(got[others], wanted[others])


def test_inputs_of_nothing_give_nothing_but_the_bias(backend_of):
    backend = backend_of(torch.bfloat16, 1)
    bias = torch.randn(40)
    packed = backend.pack_quantized(weight_of(40, 64, 8, "one zero"), bias)
    assert torch.equal(backend.linear(torch.zeros(3, 64), packed), bias.expand(3, 40))


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_blocks_of_a_gguf_file_are_taken_as_they_are(kind):
    kind = GGMLQuantizationType[kind]
    values = np.random.default_rng(0).standard_normal((5, 96), dtype=np.float32)
    raw = gguf.quantize(values, kind)
    weight = quantized_weight(memoryview(raw.tobytes()), kind, (5, 96))
    wanted = torch.from_numpy(gguf.dequantize(raw, kind))
    assert torch.allclose(weight.values(), wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("kind", "shape"), [("F16", (5, 96)), ("Q6_K", (1, 256)), ("Q8_0", (96,))])
def test_what_no_kernel_takes_is_no_quantized_weight(kind, shape):
    assert quantized_weight(memoryview(bytes(10_000)), GGMLQuantizationType[kind], shape) is None


@pytest.mark.parametrize(("bits", "steps"), [(8, 127), (4, 15)])
def test_rounding_is_to_the_nearest_step_of_each_group(bits, steps):
    weight = torch.randn(7, 128)
    weight[3] = 0.5
    weight[4, :32] = 0
    groups = weight.view(7, -1, GROUP)
    spread = groups.abs().amax(2) if bits == 8 else groups.amax(2) - groups.amin(2)
    error = (quantize(weight, bits).values() - weight).abs().view(7, -1, GROUP).amax(2)
    assert (error <= spread / steps * 0.51 + groups.abs().amax(2) * 2.0**-10).all()


def test_the_reference_rounds_its_input_as_the_kernels_do(backend_of):
    backend, reference = backend_of(torch.bfloat16, 1), ReferenceBackend(torch.float32)
    weight, x = weight_of(64, 96, 4, "least"), torch.randn(5, 96) * 100
    got = backend.linear(x, backend.pack_quantized(weight))
    wanted = reference.linear(x, reference.pack_quantized(weight))
    assert torch.allclose(got, wanted, rtol=1e-4, atol=1e-3)
