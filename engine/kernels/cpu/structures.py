"""What the compiled kernels take by pointer: the C structures, field by field.

Owns their layouts and nothing else; each says which header or source declares it. Pointers are borrowed: whoever fills
a structure keeps alive what it points to.
"""

from ctypes import POINTER, Structure, c_float, c_int, c_int64, c_void_p


class Format(Structure):
    """linear.h"""

    _fields_ = (("bits", c_int), ("offsets", c_int), ("zero", c_int))


class Linear(Structure):
    """linear.h"""

    _fields_ = (
        ("in_features", c_int64),
        ("out_features", c_int64),
        ("packed", c_void_p),
        ("bias", c_void_p),
        ("format", Format),
    )


class Cache(Structure):
    """attention.h"""

    _fields_ = (
        ("keys", c_void_p),
        ("block_stride", c_int64),
        ("half", c_int64),
        ("block_size", c_int64),
        ("kv_heads", c_int64),
        ("dim", c_int64),
        ("token_stride", c_int64),
    )


class Queries(Structure):
    """attention.h"""

    _fields_ = (
        ("q", c_void_p),
        ("q_stride", c_int64),
        ("heads", c_int64),
        ("positions", c_void_p),
        ("query_starts", c_void_p),
        ("block_tables", c_void_p),
        ("sequences", c_int64),
        ("table_stride", c_int64),
        ("scale", c_float),
        ("window", c_int),
        ("out", c_void_p),
    )


class Layer(Structure):
    """decoder.cpp"""

    _fields_ = (
        ("input_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("post_norm", c_void_p),
        ("qkv", Linear),
        ("output", Linear),
        ("gate_up", Linear),
        ("down", Linear),
        ("window", c_int64),
    )


class Decoder(Structure):
    """decoder.cpp"""

    _fields_ = (
        ("layers", POINTER(Layer)),
        ("layer_count", c_int64),
        ("embedding", c_void_p),
        ("embedding_bits", c_int64),
        ("hidden", c_int64),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("dim", c_int64),
        ("final_norm", c_void_p),
        ("head", Linear),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("eps", c_float),
        ("scale", c_float),
    )


class Batch(Structure):
    """decoder.cpp"""

    _fields_ = (
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("rows", c_int64),
        ("query_starts", c_void_p),
        ("block_tables", c_void_p),
        ("sequences", c_int64),
        ("table_stride", c_int64),
        ("kv", c_void_p),
        ("kv_bits", c_int64),
        ("block_size", c_int64),
        ("chosen", c_void_p),
        ("chosen_count", c_int64),
        ("memory", c_void_p),
        ("logits", c_void_p),
    )
