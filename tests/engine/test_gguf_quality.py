"""What rounding to each GGUF type costs a product, and what computing with it adds: weights of the default model."""

import pytest
import torch
from gguf import GGMLQuantizationType as Type

from engine.kernels.cpu.crew import Crew
from engine.kernels.cpu.operations import CpuOperations
from engine.model.gguf_blocks import quantized_weight
from engine.model.gguf_file import SERVED_TYPES, GgufFile
from tests.engine.conftest import library_for
from tests.fakes.gguf_quantizers import quantized, write_tensor

BOUNDS = {
    Type.Q8_0: 0.0065,
    Type.Q6_K: 0.027,
    Type.Q5_0: 0.065,
    Type.Q5_1: 0.05,
    Type.Q5_K: 0.05,
    Type.Q4_0: 0.13,
    Type.Q4_1: 0.1,
    Type.Q4_K: 0.1,
}
"""Of the error of a product, as a share of the product, both as lengths of all rows together: 1.2 times what is found,
but for the rounding up. The model has these weights in Q8_0, which is what they are compared with."""

COMPUTED = {True: 0.0065, False: 0.0027}
"""Likewise, against float64 on the rounded weights. By whether a kernel takes them as integers, with inputs of bytes;
else both factors are bfloat16."""

INPUTS = 1536


@pytest.fixture(scope="module")
def weight(default_model_path):
    """float32 [96, INPUTS] of the embedding."""
    return GgufFile(default_model_path).read("token_embd.weight")[:256].reshape(-1, INPUTS)


@pytest.fixture(scope="module")
def backend():
    return CpuOperations(torch.bfloat16, Crew(library_for("native"), threads=1))


def test_every_quantized_type_that_is_served_has_a_bound():
    assert set(BOUNDS) == set(SERVED_TYPES) - {Type.F32, Type.F16, Type.BF16}


@pytest.mark.parametrize("kind", BOUNDS, ids=lambda kind: kind.name)
def test_a_product_with_weights_of_a_type_keeps_within_its_bound(kind, weight, backend, tmp_path):
    """As a model's are read: blocks that a kernel takes as they are, others as floats."""
    write_tensor(tmp_path / "one.gguf", quantized(weight, kind), kind)
    file = GgufFile(tmp_path / "one.gguf")
    integers = quantized_weight(file.raw("t"), kind, file.tensors["t"].shape)
    assert (integers is not None) == (kind in {Type.Q4_0, Type.Q4_1, Type.Q8_0})
    read = torch.from_numpy(file.read("t"))
    packed = backend.pack(read) if integers is None else backend.pack_quantized(integers)
    x = torch.randn(16, INPUTS, generator=torch.Generator().manual_seed(1))
    found, exact = backend.linear(x, packed).double(), x.double() @ torch.from_numpy(weight).double().T
    assert apart(found, exact) < BOUNDS[kind]
    assert apart(found, x.double() @ read.double().T) < COMPUTED[integers is not None]


def apart(found, exact):
    return float((found - exact).norm() / exact.norm())
