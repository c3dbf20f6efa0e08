"""The tensors of a GGUF file under their Hugging Face names and in Hugging Face's order of rows.

Made when a model is opened. Knows names and the rotary order; the bytes are GgufFile's.
"""

import re
from collections.abc import Mapping
from dataclasses import replace

import torch

from engine.kernels.backend import QuantizedWeight
from engine.model.architecture import Architecture, ModelConfig
from engine.model.gguf_blocks import quantized_weight
from engine.model.gguf_config import ROPE_FACTORS
from engine.model.gguf_file import GgufFile
from engine.model.tensors import EMBEDDING, FINAL_NORM, HEAD, layer_prefix

_TOP_NAMES = {"token_embd.weight": EMBEDDING, "output_norm.weight": FINAL_NORM, "output.weight": HEAD}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d{1,4})\.(\w+)\.(weight|bias)")


class GgufWeights:
    """See engine.model.weights.Weights. The file stays mapped as long as this lives."""

    def __init__(self, file: GgufFile, config: ModelConfig) -> None:
        self._file = file
        self._interleaved_heads = _interleaved_heads(config)
        self._stored = {_name(stored): stored for stored in file.tensors if stored != ROPE_FACTORS}
        self.shapes: Mapping[str, tuple[int, ...]] = {
            name: file.tensors[stored].shape for name, stored in self._stored.items()
        }
        self.stored_bytes = sum(tensor.byte_count for tensor in file.tensors.values())

    def read(self, name: str) -> torch.Tensor:
        """float32, in the tensor's shape."""
        tensor = torch.from_numpy(self._file.read(self._stored[name]))
        heads = self._interleaved_heads.get(name)
        return tensor if heads is None else _halves(tensor, heads)

    def quantized(self, name: str) -> QuantizedWeight | None:
        stored = self._stored[name]
        tensor = self._file.tensors[stored]
        weight = quantized_weight(self._file.raw(stored), tensor.type, tensor.shape)
        heads = self._interleaved_heads.get(name)
        if weight is None or heads is None:
            return weight
        return replace(
            weight,
            codes=_halves(weight.codes, heads),
            scales=_halves(weight.scales, heads),
            least=None if weight.least is None else _halves(weight.least, heads),
        )

    def raw(self, name: str) -> tuple[memoryview, ...]:
        return (self._file.raw(self._stored[name]),)

    def stored_as(self, name: str) -> str:
        return self._file.tensors[self._stored[name]].type.name


def _interleaved_heads(config: ModelConfig) -> dict[str, int]:
    """Name to count of heads, for the tensors whose rotary pairs are stored side by side."""
    if config.architecture is not Architecture.LLAMA:
        return {}
    return {
        f"{layer_prefix(layer)}self_attn.{projection}.{kind}": heads
        for layer in range(config.layers)
        for projection, heads in (("q_proj", config.heads), ("k_proj", config.kv_heads))
        for kind in ("weight", "bias")
    }


def _halves(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of each head from pairs (0, d/2, 1, d/2 + 1, ...) back to halves (0, 1, ..., d - 1)."""
    pairs = tensor.view(heads, -1, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)


def _name(stored: str) -> str:
    """A name that is not known stays as it is, and is refused by the check of shapes."""
    if stored in _TOP_NAMES:
        return _TOP_NAMES[stored]
    match = _LAYER_TENSOR.fullmatch(stored)
    if match is None or match[2] not in _LAYER_NAMES:
        return stored
    return f"{layer_prefix(int(match[1]))}{_LAYER_NAMES[match[2]]}.{match[3]}"
