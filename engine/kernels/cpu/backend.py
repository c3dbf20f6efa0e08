"""The Backend of one worker on CPU cores: compiled kernels and the threads that run them.

Called by the model on the step thread; one caller at a time.
Never falls back: whether the kernels can be built here is for `choose_backend` to find out.
"""

import platform

import torch

from engine.collective import ALONE, Collective
from engine.kernels.backend import (
    Decoder,
    DecoderWeights,
    Numerics,
    PackedLinear,
    QuantizedWeight,
    dtype_name,
)
from engine.kernels.cpu import structures
from engine.kernels.cpu.crew import Crew
from engine.kernels.cpu.decoder import CpuDecoder


class CpuBackend:
    """Row-invariant to the bit, over any batch, chunking and number of threads.

    float32: inputs, weights and sums are float32. bfloat16: products round their input and their weight to
    bfloat16 (nearest even) and sum in float32. Attention over a cache in bfloat16 or int8 does the same with its
    queries and weights, and with what int8 stands for, where the processor has an instruction for it, whatever the
    weights' dtype. All else computes in float32; what is read from the cache is as the cache's dtype rounded it.
    A quantized weight is used as it is, with its input rounded to bytes; integers are summed exactly and groups in
    float32.
    """

    name = "cpu"
    kv_dtypes = frozenset({torch.float32, torch.bfloat16, torch.int8})

    def __init__(self, dtype: torch.dtype, crew: Crew) -> None:
        assert dtype in {torch.float32, torch.bfloat16}, dtype
        library = crew.library
        self.device = torch.device("cpu")
        self.dtype = dtype
        bf16 = "own" if library.has_bf16() else "fma"
        attention = "rounded" if library.rounds_attention() else "float32"
        self.numerics: Numerics = (
            ("kernels", "cpu packed"),
            ("processor", f"{platform.machine()} lanes={library.lanes()} bf16={bf16}"),
            ("attention", attention),
            ("weights", dtype_name(dtype)),
        )
        self._library = library
        self._crew = crew

    def borrowed_s(self) -> float:
        return self._library.borrowed_s(self._crew.handle)

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedLinear:
        bias = None if bias is None else bias.to(torch.float32).contiguous()
        return self._library.pack(weight.to(self.dtype).contiguous(), bias)

    def pack_quantized(self, weight: QuantizedWeight, bias: torch.Tensor | None = None) -> PackedLinear:
        bias = None if bias is None else bias.to(torch.float32).contiguous()
        return self._library.pack_quantized(weight, bias)

    def decoder(self, weights: DecoderWeights, collective: Collective = ALONE) -> Decoder:
        assert collective.share.size == 1, "a native step has all heads: see `CpuOperations`"
        return CpuDecoder(weights, self._library, self._run)

    def _run(self, decoder: structures.Decoder, batch: structures.Batch) -> None:
        self._library.decoder_forward(self._crew.handle, decoder, batch)
