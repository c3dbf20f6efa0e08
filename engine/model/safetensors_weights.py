"""The tensors of a Hugging Face folder: one safetensors file, or shards with an index.

Made when a model is opened. Refuses pickled checkpoints: reading one would run its code.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from engine.errors import ModelError
from engine.kernels.backend import QuantizedWeight
from engine.model.huggingface_config import read_json

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

FLOATS = ("F32", "F16", "BF16")
INTEGERS = ("I32",)
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class SafetensorsWeights:
    """See engine.model.weights.Weights. The files stay mapped as long as this lives."""

    def __init__(self, folder: Path, dtypes: tuple[str, ...] = FLOATS) -> None:
        """dtypes: that tensors may have, as safetensors names them. Raises ModelError."""
        self._files: dict[str, _OpenFile] = {}
        self.stored_bytes = 0
        shapes: dict[str, tuple[int, ...]] = {}
        for name in _file_names(folder):
            self.stored_bytes += (folder / name).stat().st_size
            file = _open(folder / name)
            for tensor in tuple(file.keys()):
                if tensor in shapes:
                    raise ModelError(f"tensor {tensor[:80]!r} is in two files")
                shapes[tensor] = _shape(file, tensor, dtypes)
                self._files[tensor] = file
        self.shapes: Mapping[str, tuple[int, ...]] = shapes

    def read(self, name: str) -> torch.Tensor:
        """float32 or bfloat16, in the tensor's shape."""
        tensor = self.tensor(name)
        return tensor.float() if tensor.dtype is torch.float16 else tensor

    def tensor(self, name: str) -> torch.Tensor:
        """As it is stored."""
        return self._files[name].get_tensor(name)

    def quantized(self, name: str) -> QuantizedWeight | None:
        return None

    def raw(self, name: str) -> tuple[memoryview, ...]:
        return (self.tensor(name).contiguous().view(torch.uint8).reshape(-1).numpy().data,)

    def stored_as(self, name: str) -> str:
        return self._files[name].get_slice(name).get_dtype()


class _OpenSlice(Protocol):
    def get_dtype(self) -> str: ...

    def get_shape(self) -> list[int]: ...


class _OpenFile(Protocol):
    """What this file uses of safetensors' own, untyped, open file."""

    def keys(self) -> Iterable[str]: ...

    def get_tensor(self, name: str) -> torch.Tensor: ...

    def get_slice(self, name: str) -> _OpenSlice: ...


def _file_names(folder: Path) -> tuple[str, ...]:
    if (folder / SINGLE_FILE).is_file():
        return (SINGLE_FILE,)
    if (folder / INDEX_FILE).is_file():
        return _shard_names(read_json(folder / INDEX_FILE))
    if any(next(folder.glob(pattern), None) for pattern in _PICKLED):
        raise ModelError("pickled weights are refused; convert them to safetensors")
    raise ModelError(f"neither {SINGLE_FILE} nor {INDEX_FILE} is there")


def _shard_names(index: Mapping[str, object]) -> tuple[str, ...]:
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{INDEX_FILE} has no weight_map")
    names = {name if isinstance(name, str) else "" for name in weight_map.values()}
    for name in names:
        if not name.endswith(".safetensors") or Path(name).name != name:
            raise ModelError(f"{INDEX_FILE} names {name[:60]!r}, wanted safetensors files beside it")
    return tuple(sorted(names))


def _open(path: Path) -> _OpenFile:
    try:
        file: _OpenFile = safe_open(path, framework="pt")
    except (SafetensorError, FileNotFoundError) as error:
        raise ModelError(f"{path.name} is not a sound safetensors file: {error}") from None
    return file


def _shape(file: _OpenFile, tensor: str, dtypes: tuple[str, ...]) -> tuple[int, ...]:
    view = file.get_slice(tensor)
    dtype = view.get_dtype()
    if dtype not in dtypes:
        packed = dtype in INTEGERS and tensor.endswith(".qweight")
        reason = "config.json has no quantization_config" if packed else f"served are {', '.join(dtypes)}"
        raise ModelError(f"tensor {tensor[:80]!r} has dtype {dtype}; {reason}")
    return tuple(view.get_shape())
