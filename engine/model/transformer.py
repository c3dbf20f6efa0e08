"""The dense decoder: its weights, packed for a backend, which has the arithmetic from token ids to logits.

Built once by `load_model`; called by the runner, one flat batch at a time. Holds no state of any sequence:
where rows stand and where their KV goes are arguments. Knows no sampling and no scheduling.
"""

import math
from dataclasses import replace
from enum import Enum

import torch

from engine.collective import ALONE, Collective, Share
from engine.errors import ModelError
from engine.kernels.backend import (
    GROUP,
    AttentionMeta,
    Backend,
    DecoderWeights,
    LayerWeights,
    PackedLinear,
    QuantizedWeight,
)
from engine.model.architecture import ModelConfig
from engine.model.quantize import quantize
from engine.model.rope import rope_tables
from engine.model.tensors import EMBEDDING, FINAL_NORM, HEAD, layer_prefix
from engine.model.weights import Weights
from engine.progress import SILENT, Progress


class Quantization(Enum):
    """How the weights of products are kept. Where it cannot be done, for a width or a kind of file, they are floats."""

    NONE = "none"
    STORED = "stored"
    """As small integers where the file has them so."""
    INT8 = "int8"
    INT4 = "int4"


class Transformer:
    """A model on one backend, or a rank's share of it. max_model_len: positions that its rotary tables cover."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        backend: Backend,
        max_model_len: int,
        quantization: Quantization = Quantization.NONE,
        progress: Progress = SILENT,
        collective: Collective = ALONE,
    ) -> None:
        """Packs every weight; `weights` is not kept. Raises ModelError when a weight is not finite, and when so many
        ranks cannot share the model."""
        share = collective.share
        config.require_shares(share.size)
        self.config = config
        self.backend = backend
        self.max_model_len = max_model_len
        packer = _Packer(weights, backend, quantization, share)
        layers = progress.over(range(config.layers), "loading layer", config.layers)
        cos, sin = rope_tables(config, max_model_len)
        packed = DecoderWeights(
            embedding=packer.read(EMBEDDING).to(backend.dtype, copy=True),
            layers=tuple(_pack_layer(packer, config, layer) for layer in layers),
            final_norm=packer.norm(FINAL_NORM),
            head=packer.product((EMBEDDING if config.tie_word_embeddings else HEAD,), None),
            heads=config.heads // share.size,
            kv_heads=config.kv_heads // share.size,
            head_dim=config.head_dim,
            eps=config.rms_norm_eps,
            scale=1.0 / math.sqrt(config.head_dim),
            cos=cos,
            sin=sin,
        )
        self._decoder = backend.decoder(packed, collective)

    def forward(
        self, token_ids: torch.Tensor, kv: torch.Tensor, meta: AttentionMeta, rows: torch.Tensor
    ) -> torch.Tensor:
        """Compute a flat batch, write its KV, and return the logits of the chosen rows. See kernels.Decoder."""
        return self._decoder.forward(token_ids, kv, meta, rows)


class _Packer:
    """Reads checked tensors and packs them, several side by side where they share an input: of each linear the outputs
    that are this rank's.

    What `read` returns may lie in a mapped file, and is copied before it is kept.
    """

    def __init__(self, weights: Weights, backend: Backend, quantization: Quantization, share: Share) -> None:
        self._weights = weights
        self._backend = backend
        self._quantization = quantization
        self._share = share

    def read(self, name: str) -> torch.Tensor:
        tensor = self._weights.read(name)
        if not math.isfinite(tensor.sum(dtype=torch.float32).item()):
            raise ModelError(f"tensor {name} holds values that are not finite")
        return tensor

    def norm(self, name: str) -> torch.Tensor:
        return self.read(name).to(torch.float32, copy=True)

    def linear(self, *names: str, bias: bool) -> PackedLinear:
        """One linear whose outputs are those of the named ones, in order."""
        biases = torch.cat([self._outputs(f"{name}.bias") for name in names]) if bias else None
        return self.product(tuple(f"{name}.weight" for name in names), biases)

    def product(self, names: tuple[str, ...], bias: torch.Tensor | None) -> PackedLinear:
        """names: of the weights whose outputs stand side by side."""
        quantized = self._quantized(names)
        if quantized is not None:
            return self._backend.pack_quantized(quantized, bias)
        return self._backend.pack(torch.cat([self._outputs(name) for name in names]), bias)

    def _outputs(self, name: str) -> torch.Tensor:
        return _own(self.read(name), self._share)

    def _quantized(self, names: tuple[str, ...]) -> QuantizedWeight | None:
        match self._quantization:
            case Quantization.NONE:
                return None
            case Quantization.STORED:
                return _joined(names, [self._weights.quantized(name) for name in names], self._share)
        weight = torch.cat([self._outputs(name) for name in names])
        return None if weight.shape[1] % GROUP else quantize(weight, _BITS[self._quantization])


_BITS = {Quantization.INT8: 8, Quantization.INT4: 4}


def _own(outputs: torch.Tensor, share: Share) -> torch.Tensor:
    """The rank's rows of a tensor, and zeros where it has fewer than others."""
    if share.size == 1:
        return outputs
    own = outputs[share.of(len(outputs))]
    missing = -(-len(outputs) // share.size) - len(own)
    return torch.cat((own, own.new_zeros(missing, *own.shape[1:]))) if missing else own


def _joined(
    names: tuple[str, ...], stored: list[QuantizedWeight | None], share: Share
) -> QuantizedWeight | None:
    """The rank's outputs of all. None unless all are of one kind. Raises ModelError when a scale is not finite."""
    parts = [part for part in stored if part is not None]
    kinds = {(part.bits, part.zero, part.least is None, part.zeros is None) for part in parts}
    if len(parts) < len(stored) or len(kinds) > 1:
        return None
    least = [_own(part.least, share) for part in parts if part.least is not None]
    zeros = [_own(part.zeros, share) for part in parts if part.zeros is not None]
    joined = replace(
        parts[0],
        codes=torch.cat([_own(part.codes, share) for part in parts]),
        scales=torch.cat([_own(part.scales, share) for part in parts]),
        least=torch.cat(least) if least else None,
        zeros=torch.cat(zeros) if zeros else None,
    )
    if not all(halves.isfinite().all() for halves in (joined.scales, *least)):
        raise ModelError(f"tensor {' or '.join(names)} holds values that are not finite")
    return _with_one_zero(joined)


def _with_one_zero(weight: QuantizedWeight) -> QuantizedWeight:
    """Zeros that are all alike, as those of symmetric weights are, need not be stored for each group."""
    if weight.zeros is None or not bool((weight.zeros == weight.zeros[0, 0]).all()):
        return weight
    return replace(weight, zero=int(weight.zeros[0, 0]), zeros=None)


def _pack_layer(packer: _Packer, config: ModelConfig, layer: int) -> LayerWeights:
    prefix = layer_prefix(layer)
    attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
    projections = (f"{attention}q_proj", f"{attention}k_proj", f"{attention}v_proj")
    return LayerWeights(
        input_norm=packer.norm(f"{prefix}input_layernorm.weight"),
        qkv=packer.linear(*projections, bias=config.qkv_bias),
        q_norm=packer.norm(f"{attention}q_norm.weight") if config.qk_norm else None,
        k_norm=packer.norm(f"{attention}k_norm.weight") if config.qk_norm else None,
        output=packer.linear(f"{attention}o_proj", bias=config.output_bias),
        post_norm=packer.norm(f"{prefix}post_attention_layernorm.weight"),
        gate_up=packer.linear(f"{mlp}gate_proj", f"{mlp}up_proj", bias=config.mlp_bias),
        down=packer.linear(f"{mlp}down_proj", bias=config.mlp_bias),
        window=config.windows[layer],
    )
