"""Weights that are packed into int32, as AWQ and GPTQ pack them: what their bits mean.

Layouts, of codes of 4 or 8 bits, the first in the lowest bits. AWQ (AutoAWQ's gemm): a word has eight consecutive
outputs of one input, in the order 0, 2, 4, 6, 1, 3, 5, 7; so have the zeros of a group. GPTQ: a word has consecutive
inputs of one output, and consecutive outputs of a group's zeros, which the first version of the format stores less one.
In both a weight is (code - zero) * scale. Opens no file, and knows no names.
"""

from dataclasses import dataclass

import torch

from engine.kernels.backend import GROUP, QuantizedWeight
from engine.model.packed_format import Method, PackedFormat

_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in an AWQ word each of its eight outputs stands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedMatrix:
    """A weight [out, in]. codes: uint8 [out, in]; scales: float, zeros: uint8, both [out, groups]; groups: int64 [in],
    the group of each input."""

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    groups: torch.Tensor
    bits: int

    def values(self) -> torch.Tensor:
        """float32 [out, in], exact where scales are float16 or bfloat16."""
        values = self.codes.float()
        values -= self.zeros.float()[:, self.groups]
        values *= self.scales.float()[:, self.groups]
        return values

    def quantized(self) -> QuantizedWeight | None:
        """The same numbers as kernels take them; None where GROUP consecutive inputs do not share a scale, or where a
        scale is not a float16."""
        halves = self.scales.half()
        if len(self.groups) % GROUP or not torch.equal(halves.float(), self.scales.float()):
            return None
        runs = self.groups.view(-1, GROUP)
        if not torch.equal(runs, runs[:, :1].expand_as(runs)):
            return None
        groups = runs[:, 0]
        return QuantizedWeight(
            codes=self.codes,
            scales=halves[:, groups],
            least=None,
            bits=self.bits,
            zero=0,
            zeros=self.zeros[:, groups],
        )


def unpack_matrix(
    form: PackedFormat,
    qweight: torch.Tensor,
    qzeros: torch.Tensor,
    scales: torch.Tensor,
    groups: torch.Tensor,
) -> PackedMatrix:
    """qweight, qzeros: int32, as stored; scales: float [groups, out]; groups: int64 [in]."""
    if form.method is Method.AWQ:
        codes, zeros = _codes(qweight, 4)[:, :, _PLACES], _codes(qzeros, 4)[:, :, _PLACES]
        codes = codes.flatten(1).T.contiguous()
    else:
        codes = _codes(qweight.T.contiguous(), form.bits).flatten(1)
        zeros = _codes(_raised(qzeros, form.bits) if form.zeros_less_one else qzeros, form.bits)
    return PackedMatrix(codes=codes, scales=scales.T, zeros=zeros.flatten(1).T, groups=groups, bits=form.bits)


def _codes(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [n, m] -> uint8 [n, m, codes of a word], the lowest bits first."""
    octets = words.contiguous().flatten().view(torch.uint8)
    if bits == 4:
        octets = torch.stack((octets & 0x0F, octets >> 4), dim=-1)
    return octets.view(*words.shape, 32 // bits)


def _raised(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Words whose codes are one more. Word by word, because the writers take one off so: the borrow of a zero of 0 goes
    into the next code."""
    return words + sum(1 << place for place in range(0, 32, bits))
