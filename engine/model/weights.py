"""The door to a model's tensors, whatever its files are.

Called by `load_model`, and by whoever needs the digest. Hands out one tensor at a time and keeps none;
refuses files whose tensors are not exactly the model's.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

import torch

from engine.kernels.backend import QuantizedWeight
from engine.model.architecture import ModelConfig
from engine.model.config import naming_model
from engine.model.fields import Fields
from engine.model.gguf_config import read_gguf_config
from engine.model.gguf_file import GgufFile
from engine.model.gguf_weights import GgufWeights
from engine.model.huggingface_config import read_huggingface_config, read_json
from engine.model.packed_format import read_packed_format
from engine.model.packed_weights import PackedWeights
from engine.model.safetensors_weights import SafetensorsWeights
from engine.model.tensors import check_shapes

DIGEST_WHOLE_BYTES_MAX = 256 * 2**20
DIGEST_SAMPLE_BYTES = 64 * 2**10


class Weights(Protocol):
    """Tensors under Hugging Face names.

    shapes: by name. stored_bytes: size of the content. read: a tensor, float32 or bfloat16. quantized: it as stored,
    where it is stored as small integers that a backend takes. raw: its bytes as stored, in one or more runs. stored_as:
    the stored type, and what else decides what the bytes mean.
    """

    shapes: Mapping[str, tuple[int, ...]]
    stored_bytes: int

    def read(self, name: str) -> torch.Tensor: ...

    def quantized(self, name: str) -> QuantizedWeight | None: ...

    def raw(self, name: str) -> tuple[memoryview, ...]: ...

    def stored_as(self, name: str) -> str: ...


def open_model(path: Path) -> tuple[ModelConfig, Weights]:
    """Configuration and checked tensors. Raises ModelError with one line that names the path."""
    with naming_model(path):
        config, weights = _open(path)
        check_shapes(config, weights.shapes)
    return config, weights


def model_digest(path: Path) -> str:
    """SHA-256 over the configuration and every tensor's name, shape, stored type and content, in hex.

    The content is covered whole up to DIGEST_WHOLE_BYTES_MAX bytes in all; in bigger models only the first
    and the last DIGEST_SAMPLE_BYTES of each stored tensor are, which still tells two fine-tunes apart. Two processes
    that compute the same digest may exchange KV. Raises ModelError.
    """
    config, weights = open_model(path)
    whole = weights.stored_bytes <= DIGEST_WHOLE_BYTES_MAX
    digest = hashlib.sha256()
    for part in _digest_parts(config, weights, whole):
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.hexdigest()


def _open(path: Path) -> tuple[ModelConfig, Weights]:
    if path.is_dir():
        return _open_folder(path, read_huggingface_config(path))
    file = GgufFile(path)
    config = read_gguf_config(file)
    return config, GgufWeights(file, config)


def _open_folder(path: Path, config: ModelConfig) -> tuple[ModelConfig, Weights]:
    form = read_packed_format(Fields(read_json(path / "config.json")))
    if form is None:
        return config, SafetensorsWeights(path)
    return config, PackedWeights(path, form, config)


def _digest_parts(config: ModelConfig, weights: Weights, whole: bool) -> Iterator[bytes | memoryview]:
    yield json.dumps(dataclasses.asdict(config), sort_keys=True).encode()
    for name in sorted(weights.shapes):
        yield f"{name} {weights.shapes[name]} {weights.stored_as(name)}".encode()
        for content in weights.raw(name):
            if whole:
                yield content
            else:
                yield content[:DIGEST_SAMPLE_BYTES]
                yield content[-DIGEST_SAMPLE_BYTES:]
