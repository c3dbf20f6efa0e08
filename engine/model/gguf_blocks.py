"""GGUF's blocks of small integers as they are, for kernels that multiply with them.

Knows the three kinds of block whose numbers a kernel takes without change; of any other kind there is no
QuantizedWeight. Layouts: https://github.com/ggml-org/ggml, ggml-common.h.
"""

import numpy as np
import numpy.typing as npt
import torch
from gguf.constants import GGMLQuantizationType

from engine.kernels.backend import GROUP, QuantizedWeight

_HALF = 2  # bytes


def quantized_weight(
    raw: memoryview, kind: GGMLQuantizationType, shape: tuple[int, ...]
) -> QuantizedWeight | None:
    """The weight [out, in] in these bytes, copied; None for a kind or a shape that no kernel takes."""
    if kind not in _READERS or len(shape) != 2 or shape[1] % GROUP:
        return None
    blocks = np.frombuffer(raw, np.uint8).reshape(shape[0], shape[1] // GROUP, -1)
    return _READERS[kind](blocks)


def _q4_0(blocks: npt.NDArray[np.uint8]) -> QuantizedWeight:
    codes = _nibbles(blocks[:, :, _HALF:])
    return QuantizedWeight(codes=codes, scales=_halves(blocks, 0), least=None, bits=4, zero=8)


def _q4_1(blocks: npt.NDArray[np.uint8]) -> QuantizedWeight:
    codes = _nibbles(blocks[:, :, 2 * _HALF :])
    return QuantizedWeight(codes=codes, scales=_halves(blocks, 0), least=_halves(blocks, 1), bits=4, zero=0)


def _q8_0(blocks: npt.NDArray[np.uint8]) -> QuantizedWeight:
    """Signed bytes, as codes around 128."""
    codes = torch.from_numpy((blocks[:, :, _HALF:] ^ 0x80).reshape(blocks.shape[0], -1))
    return QuantizedWeight(codes=codes, scales=_halves(blocks, 0), least=None, bits=8, zero=128)


_READERS = {
    GGMLQuantizationType.Q4_0: _q4_0,
    GGMLQuantizationType.Q4_1: _q4_1,
    GGMLQuantizationType.Q8_0: _q8_0,
}


def _halves(blocks: npt.NDArray[np.uint8], place: int) -> torch.Tensor:
    """float16 [out, groups]: the half that stands at this place in each block."""
    octets = np.ascontiguousarray(blocks[:, :, place * _HALF : (place + 1) * _HALF])
    return torch.from_numpy(octets.view(np.float16)[:, :, 0].copy())


def _nibbles(octets: npt.NDArray[np.uint8]) -> torch.Tensor:
    """uint8 [out, in]: a block's low nibbles, then its high ones."""
    codes = np.concatenate((octets & 0x0F, octets >> 4), axis=2)
    return torch.from_numpy(codes.reshape(octets.shape[0], -1))
