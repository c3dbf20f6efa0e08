"""Writes a model folder with weights packed as AWQ or GPTQ pack them, from a model's floats.

Rounds to nearest: no calibration, which is what the two methods are about. So it says what the layouts and the kernels
cost, and an upper bound of what a calibrated checkpoint of the same bits loses.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from engine.model.architecture import ModelConfig
from engine.model.weights import open_model

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """method: awq or gptq. group_size: inputs that share a scale; a divisor of all widths. symmetric: every zero is the
    middle code, as GPTQ has it by default."""

    method: str
    bits: int
    group_size: int
    symmetric: bool

    def config(self) -> dict[str, object]:
        """quantization_config of config.json."""
        shared = {"quant_method": self.method, "bits": self.bits, "group_size": self.group_size}
        if self.method == "awq":
            return shared | {"version": "gemm", "zero_point": True}
        return shared | {"checkpoint_format": "gptq", "desc_act": False, "sym": self.symmetric}


def write_packed_folder(source: Path, folder: Path, packing: Packing) -> None:
    """source: a model without biases and scaled positions. Its layers' products are packed; the rest is bfloat16."""
    config, weights = open_model(source)
    tensors: dict[str, torch.Tensor] = {}
    for name in weights.shapes:
        tensor = weights.read(name)
        if name.endswith("_proj.weight"):
            tensors |= pack(name.removesuffix("weight"), tensor, packing)
        else:
            tensors[name] = tensor.bfloat16()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    settings = _settings(config) | {"quantization_config": packing.config()}
    (folder / "config.json").write_text(json.dumps(settings))


def pack(module: str, weight: torch.Tensor, packing: Packing) -> Mapping[str, torch.Tensor]:
    """The tensors that stand for a float weight [out, in]; module ends in a dot."""
    codes, scales, zeros = round_to_codes(weight, packing)
    tensors = {f"{module}scales": scales.half().T.contiguous()}
    if packing.method == "awq":
        places = torch.arange(weight.shape[0]).view(-1, 8)[:, _AWQ_ORDER].flatten()
        return tensors | {
            f"{module}qweight": _words(codes.T[:, places], 4),
            f"{module}qzeros": _words(zeros.T[:, places], 4),
        }
    return tensors | {
        f"{module}qweight": _words(codes, packing.bits).T.contiguous(),
        f"{module}qzeros": _words(zeros.T, packing.bits) - _ones(packing.bits),
        f"{module}g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // packing.group_size,
    }


def round_to_codes(weight: torch.Tensor, packing: Packing) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """uint8 codes [out, in]; float32 scales, as float16 has them, and uint8 zeros, both [out, groups]."""
    groups = weight.float().view(weight.shape[0], -1, packing.group_size)
    last, (least, greatest) = (1 << packing.bits) - 1, torch.aminmax(groups, dim=2)
    least, greatest = least.clamp(max=0), greatest.clamp(min=0)
    if packing.symmetric:
        greatest = torch.maximum(greatest, -least)
        least = -greatest
    scales = ((greatest - least) / last).half().float().clamp(min=2.0**-24)
    middle = torch.full_like(scales, 1 << (packing.bits - 1))
    zeros = middle if packing.symmetric else (-least / scales).round().clamp(0, last)
    codes = torch.addcmul((zeros + 0.5).unsqueeze(2), groups, (1 / scales).unsqueeze(2)).clamp_(0, last)
    return codes.byte().flatten(1), scales, zeros.byte()


def _words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 [n, m] -> int32 [n, m * bits / 32], the first code of a word in its lowest bits."""
    octets = codes if bits == 8 else codes[:, ::2] | codes[:, 1::2] << 4
    return octets.contiguous().flatten().view(torch.int32).view(codes.shape[0], -1)


def _ones(bits: int) -> int:
    return sum(1 << place for place in range(0, 32, bits))


def _settings(config: ModelConfig) -> dict[str, object]:
    assert config.rope_scaling is None and not config.qkv_bias, config
    return {
        "model_type": str(config.architecture),
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": config.max_position,
        "tie_word_embeddings": config.tie_word_embeddings,
        "eos_token_id": list(config.eos_token_ids),
        "bos_token_id": config.bos_token_id,
    }
