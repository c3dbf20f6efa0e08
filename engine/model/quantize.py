"""Rounds float weights to small integers with a scale for each group of inputs.

Called while a model is packed. Round to nearest; knows no calibration.
"""

import torch

from engine.kernels.backend import GROUP, QuantizedWeight


def quantize(weight: torch.Tensor, bits: int) -> QuantizedWeight:
    """weight: float [out, in], `in` a multiple of GROUP. bits: 8 (symmetric) or 4 (between least and greatest)."""
    groups = weight.float().view(weight.shape[0], -1, GROUP)
    return _symmetric(groups) if bits == 8 else _between_extremes(groups)


def _symmetric(groups: torch.Tensor) -> QuantizedWeight:
    scales = (groups.abs().amax(dim=2) / 127).half()
    codes = torch.round(groups / _nonzero(scales)).clamp(-127, 127) + 128
    return QuantizedWeight(codes=_codes(codes), scales=scales, least=None, bits=8, zero=128)


def _between_extremes(groups: torch.Tensor) -> QuantizedWeight:
    least = groups.amin(dim=2).half()
    scales = ((groups.amax(dim=2) - least.float()) / 15).clamp(min=0).half()
    codes = torch.round((groups - least.float().unsqueeze(2)) / _nonzero(scales)).clamp(0, 15)
    return QuantizedWeight(codes=_codes(codes), scales=scales, least=least, bits=4, zero=0)


def _nonzero(scales: torch.Tensor) -> torch.Tensor:
    """What is all alike in a group has no scale, and codes of zero."""
    return torch.where(scales == 0, 1.0, scales.float()).unsqueeze(2)


def _codes(codes: torch.Tensor) -> torch.Tensor:
    return codes.to(torch.uint8).flatten(1)
