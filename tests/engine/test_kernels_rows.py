"""Norms, rotary embedding, the gated activation and the cache's writes."""

import pytest
import torch

from engine.kernels.composed import Operations

ROWS = 33


@pytest.fixture
def backend(backend_of) -> Operations:
    return backend_of(torch.float32, 1)


def exact_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(dim=-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("width", [1, 8, 48, 100, 576])
def test_rms_norm_is_close_to_float64(backend, width):
    x, weight = torch.randn(ROWS, 3, width), torch.randn(width)
    got = backend.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(got.double(), exact_norm(x, weight, 1e-5), atol=1e-6, rtol=2e-6)


@pytest.mark.parametrize("width", [8, 100, 576])
def test_add_rms_norm_adds_in_place_and_norms_the_sum(backend, width):
    x, residual, weight = torch.randn(ROWS, width), torch.randn(ROWS, width), torch.randn(width)
    total = x + residual
    got = backend.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(residual, total)
    assert torch.equal(got, backend.rms_norm(total, weight, 1e-6))


@pytest.mark.parametrize("width", [1, 7, 64, 100])
def test_silu_mul_is_close_to_float64(backend, width):
    gate_up = torch.randn(ROWS, 2 * width) * 20
    gate, up = gate_up.double().chunk(2, dim=-1)
    got = backend.silu_mul(gate_up)
    torch.testing.assert_close(got.double(), gate * gate.sigmoid() * up, atol=1e-6, rtol=2e-6)


def test_silu_mul_survives_extreme_gates_and_shows_broken_ones(backend):
    gate = torch.tensor([[-1e38, -200.0, -88.0, 0.0, 88.0, 200.0, 1e30, torch.nan]])
    got = backend.silu_mul(torch.cat((gate, torch.ones_like(gate)), dim=1))[0]
    assert got[:3].abs().max() < 1e-30
    assert got[3] == 0
    assert torch.equal(got[4:7], gate[0, 4:7])
    assert got[7].isnan()


@pytest.mark.parametrize("dim", [2, 8, 64, 72])
def test_rotary_turns_each_pair_by_its_angle_in_place(backend, dim):
    angles = torch.rand(50, dim // 2) * 7
    cos, sin = angles.cos(), angles.sin()
    q, k = torch.randn(ROWS, 4, dim), torch.randn(ROWS, 2, dim)
    positions = torch.randint(0, 50, (ROWS,), dtype=torch.int32)
    wanted = []
    for x in (q, k):
        pairs = torch.complex(*x.double().chunk(2, dim=-1))
        turned = pairs * torch.complex(cos.double(), sin.double())[positions].unsqueeze(1)
        wanted.append(torch.cat((turned.real, turned.imag), dim=-1))
    backend.rotary(q, k, positions, cos, sin)
    torch.testing.assert_close(q.double(), wanted[0], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(k.double(), wanted[1], atol=1e-6, rtol=1e-6)


def test_rotary_of_a_slice_leaves_the_rest_alone(backend):
    angles = torch.rand(ROWS, 4)
    fused = torch.randn(ROWS, 6, 8)
    before = fused.clone()
    q, k = before[:, :3].clone(), before[:, 3:4].clone()
    positions = torch.arange(ROWS, dtype=torch.int32)
    backend.rotary(fused[:, :3], fused[:, 3:4], positions, angles.cos(), angles.sin())
    backend.rotary(q, k, positions, angles.cos(), angles.sin())
    assert torch.equal(fused[:, :3], q) and torch.equal(fused[:, 3:4], k)
    assert torch.equal(fused[:, 4:], before[:, 4:])


def operations(backend: Operations):
    weight = torch.linspace(-1, 1, 96)
    angles = torch.linspace(0, 9, 600 * 48).view(600, 48)

    def rotated(x):
        heads = x.clone().view(-1, 1, 96)
        positions = torch.full((len(x),), 599, dtype=torch.int32)
        backend.rotary(heads, heads.clone(), positions, angles.cos(), angles.sin())
        return heads

    return {
        "rms_norm": lambda x: backend.rms_norm(x, weight, 1e-5),
        "add_rms_norm": lambda x: backend.add_rms_norm(x, x.clone(), weight, 1e-5),
        "silu_mul": backend.silu_mul,
        "rotary": rotated,
    }


@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm", "silu_mul", "rotary"])
def test_a_row_has_the_same_bits_alone_in_a_batch_and_on_two_threads(backend_of, name):
    x = torch.randn(600, 96)
    whole = operations(backend_of(torch.float32, 1))[name](x)
    assert torch.equal(operations(backend_of(torch.float32, 2))[name](x), whole)
    alone = operations(backend_of(torch.float32, 1))[name]
    for row in (0, 1, 17, 599):
        assert torch.equal(alone(x[row : row + 1].clone()), whole[row : row + 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_write_kv_stores_rounded_rows_at_their_slots_and_nothing_else(backend, dtype):
    cache = torch.zeros(5, 3, 2, 4, 2, 8, dtype=dtype)
    k, v = torch.randn(6, 2, 8), torch.randn(6, 2, 8)
    slots = torch.tensor([19, 0, 7, 4, 11, 13])
    wanted = cache.clone()
    for row, slot in enumerate(slots.tolist()):
        wanted[slot // 4, 1, 0, slot % 4] = k[row].to(dtype)
        wanted[slot // 4, 1, 1, slot % 4] = v[row].to(dtype)
    backend.write_kv(cache, 1, k, v, slots)
    assert torch.equal(cache, wanted)


def test_write_kv_rounds_to_nearest_even_and_keeps_the_special_values(backend):
    ties = torch.arange(0x3F80_0000, 0x3F80_0000 + 6 * 0x8000, 0x8000, dtype=torch.int32).view(torch.float32)
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 1e-40, 3.4e38, -1e-45, 65504.0, 0.1])
    k = torch.cat((ties, special)).view(1, 2, 8)
    cache = torch.zeros(1, 1, 2, 1, 2, 8, dtype=torch.bfloat16)
    backend.write_kv(cache, 0, k, -k, torch.tensor([0]))
    for half, x in enumerate((k, -k)):
        got, wanted = cache[0, 0, half, 0], x[0].to(torch.bfloat16)
        assert torch.equal(got.isnan(), wanted.isnan())
        real = ~wanted.isnan()
        assert torch.equal(got[real].view(torch.int16), wanted[real].view(torch.int16))
