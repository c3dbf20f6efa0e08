"""Float weights as blocks of every quantized GGUF type: by the gguf package where it can, else to nearest.

Those of K types it can only read. Layouts: https://github.com/ggml-org/ggml, ggml-common.h.
"""

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

BLOCK = 256
"""Elements of a block of a K type."""


def quantized(weight, kind):
    """float32 [out, in] -> uint8 [out, bytes]."""
    makers = {Type.Q4_K: _q4_k, Type.Q5_K: _q5_k, Type.Q6_K: _q6_k}
    if kind not in makers:
        return gguf.quants.quantize(weight, kind)
    return makers[kind](weight.reshape(-1, BLOCK)).reshape(len(weight), -1)


def write_tensor(path, stored, kind):
    """A file that holds it as `t`. stored: uint8 [out, bytes]."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("t", stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _q4_k(blocks):
    codes, head = _scaled_and_shifted(blocks, 15)
    return np.concatenate((*head, _nibbles(codes)), axis=1)


def _q5_k(blocks):
    codes, head = _scaled_and_shifted(blocks, 31)
    fifth = np.packbits(codes.reshape(-1, 8, 32) >> 4, axis=1, bitorder="little").reshape(-1, 32)
    return np.concatenate((*head, fifth, _nibbles(codes & 15)), axis=1)


def _q6_k(blocks):
    """Sixteen scales of a byte, and one of these."""
    groups = blocks.reshape(-1, 16, 16)
    wanted = np.abs(groups).max(axis=2) / 31
    whole = (wanted.max(axis=1, keepdims=True) / 127).astype(np.float16)
    scales = _nearest(wanted, whole.astype(np.float32), 0, 127).astype(np.int8)
    steps = (whole.astype(np.float32) * scales)[:, :, None]
    codes = (_nearest(groups, steps, -32, 31) + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    low, high = codes & 15, codes >> 4
    low = low[:, :, :2] | low[:, :, 2:] << 4
    high = high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
    parts = (low, high, scales, whole)
    return np.concatenate([part.reshape(len(blocks), -1).view(np.uint8) for part in parts], axis=1)


def _scaled_and_shifted(blocks, most):
    """Codes up to `most`, uint8 [n, 256], and what stands before them: eight scales and least values of six bits, and
    the scale of either."""
    groups = blocks.reshape(-1, 8, 32)
    least = np.maximum(-groups.min(axis=2), 0)
    wanted = (groups.max(axis=2) + least) / most
    of_scales, of_least = ((x.max(axis=1, keepdims=True) / 63).astype(np.float16) for x in (wanted, least))
    scales = _nearest(wanted, of_scales.astype(np.float32), 0, 63).astype(np.uint8)
    lows = _nearest(least, of_least.astype(np.float32), 0, 63).astype(np.uint8)
    steps = (of_scales.astype(np.float32) * scales)[:, :, None]
    shifted = groups + (of_least.astype(np.float32) * lows)[:, :, None]
    codes = _nearest(shifted, steps, 0, most).astype(np.uint8).reshape(-1, BLOCK)
    first, last = slice(0, 4), slice(4, 8)
    packed = (
        scales[:, first] | scales[:, last] >> 4 << 6,
        lows[:, first] | lows[:, last] >> 4 << 6,
        scales[:, last] & 15 | (lows[:, last] & 15) << 4,
    )
    return codes, (of_scales.view(np.uint8), of_least.view(np.uint8), *packed)


def _nearest(values, steps, least, most):
    return np.clip(np.rint(values / np.where(steps == 0, 1, steps)), least, most)


def _nibbles(codes):
    pairs = codes.reshape(-1, 4, 2, 32)
    return (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(-1, 128)
