"""The Backend of one worker on CPU cores: compiled kernels and the threads that run them.

Owns its thread pool, which ends with it. Called by the model on the step thread; one caller at a time. Never
falls back: whether the kernels can be built here is for `choose_backend` to find out.
"""

import platform
import weakref

import torch

from engine.kernels.backend import AttentionMeta, PackedLinear, QuantizedWeight
from engine.kernels.cpu.library import Library, PackedQuantized, PackedWeight


class CpuBackend:
    """Row-invariant to the bit, over any batch, chunking and number of threads.

    float32: inputs, weights and sums are float32. bfloat16: `linear` rounds its input and its weight to
    bfloat16 (nearest even) and sums in float32. All else, attention included, computes in float32; what it
    reads from the cache is as the cache's dtype rounded it. A quantized weight is used as it is, with its input
    rounded to bytes; integers are summed exactly and groups in float32.
    """

    name = "cpu"

    def __init__(self, dtype: torch.dtype, threads: int, library: Library) -> None:
        assert dtype in {torch.float32, torch.bfloat16}, dtype
        self.device = torch.device("cpu")
        self.dtype = dtype
        bf16 = "own" if library.has_bf16() else "fma"
        self.numerics = f"cpu {platform.machine()} lanes={library.lanes()} bf16={bf16} weights={dtype}"
        self._library = library
        self._thread_pool = library.start_thread_pool(threads)
        weakref.finalize(self, library.stop_thread_pool, self._thread_pool)

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedLinear:
        bias = None if bias is None else bias.to(torch.float32).contiguous()
        return self._library.pack(weight.to(self.dtype).contiguous(), bias)

    def pack_quantized(self, weight: QuantizedWeight, bias: torch.Tensor | None = None) -> PackedLinear:
        bias = None if bias is None else bias.to(torch.float32).contiguous()
        return self._library.pack_quantized(weight, bias)

    def linear(self, x: torch.Tensor, linear: PackedLinear) -> torch.Tensor:
        assert isinstance(linear, PackedWeight | PackedQuantized), linear
        out = torch.empty(x.shape[0], linear.out_features)
        if isinstance(linear, PackedQuantized):
            self._library.quantized_linear(self._thread_pool, x, linear, out)
        else:
            self._library.linear(self._thread_pool, x, linear, out)
        return out

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        out = torch.empty(x.shape)
        self._library.rms_norm(self._thread_pool, rows, weight, eps, out.view(rows.shape))
        return out

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        out = torch.empty(x.shape)
        self._library.add_rms_norm(self._thread_pool, x, residual, weight, eps, out)
        return out

    def rotary(
        self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> None:
        self._library.rotary(self._thread_pool, q, positions, cos, sin)
        self._library.rotary(self._thread_pool, k, positions, cos, sin)

    def write_kv(
        self, kv: torch.Tensor, layer: int, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor
    ) -> None:
        self._library.write_kv(self._thread_pool, kv, layer, k, v, slots)

    def attention(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        layer: int,
        meta: AttentionMeta,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        out = torch.empty(q.shape)
        self._library.attention(self._thread_pool, q, kv, layer, meta, scale, window, out)
        return out

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        out = torch.empty(gate_up.shape[0], gate_up.shape[1] // 2)
        self._library.silu_mul(self._thread_pool, gate_up, out)
        return out
