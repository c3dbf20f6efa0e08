"""The tensors of a folder whose weights are packed as AWQ or GPTQ pack them.

Made when a model is opened. Says of each packed weight what it would be called and how it would be shaped as floats,
and checks its parts against each other. What the folder has as floats (norms, embeddings, modules that were left out)
passes through. What the bits mean is PackedMatrix's.
"""

from collections.abc import Mapping
from pathlib import Path

import torch

from engine.errors import ModelError
from engine.kernels.backend import QuantizedWeight
from engine.model.architecture import ModelConfig
from engine.model.packed_format import Method, PackedFormat
from engine.model.packed_matrix import PackedMatrix, unpack_matrix
from engine.model.safetensors_weights import FLOATS, INTEGERS, SafetensorsWeights
from engine.model.tensors import HEAD, expected_shapes

_WORDS = "qweight"


class PackedWeights:
    """See engine.model.weights.Weights."""

    def __init__(self, folder: Path, form: PackedFormat, config: ModelConfig) -> None:
        """Raises ModelError."""
        self._files = SafetensorsWeights(folder, (*FLOATS, *INTEGERS))
        self._form = form
        self.stored_bytes = self._files.stored_bytes
        shapes = dict(self._files.shapes)
        self._parts: dict[str, tuple[str, ...]] = {}
        for words in [name for name in shapes if name.endswith(f".{_WORDS}")]:
            self._claim(words.removesuffix(_WORDS), shapes)
        self._refuse_strays(shapes)
        if HEAD in self._parts and config.tie_word_embeddings:
            raise ModelError(f"tensor {HEAD} is packed, but tie_word_embeddings is true")
        expected = expected_shapes(config)
        for bias in [name for name in shapes if name.endswith(".bias") and name not in expected]:
            if not self._files.read(bias).any():
                del shapes[bias]  # old writers of GPTQ give every module one, of zeros
        self.shapes: Mapping[str, tuple[int, ...]] = shapes

    def read(self, name: str) -> torch.Tensor:
        """float32 or bfloat16, in the tensor's shape."""
        return self._matrix(name).values() if name in self._parts else self._files.read(name)

    def quantized(self, name: str) -> QuantizedWeight | None:
        return self._matrix(name).quantized() if name in self._parts else None

    def raw(self, name: str) -> tuple[memoryview, ...]:
        return tuple(run for part in self._parts.get(name, (name,)) for run in self._files.raw(part))

    def stored_as(self, name: str) -> str:
        types = " ".join(self._files.stored_as(part) for part in self._parts.get(name, (name,)))
        return f"{self._form} {types}" if name in self._parts else types

    def _claim(self, module: str, shapes: dict[str, tuple[int, ...]]) -> None:
        """Puts a weight's shape in the place of its parts', once they fit each other."""
        outputs, inputs = self._shape(module)
        weight, group_size = f"{module}weight", self._form.group_size or inputs
        if weight in shapes:
            raise ModelError(f"tensor {weight} is there twice, as floats and packed")
        per_word = 32 // self._form.bits
        if outputs % per_word:
            raise ModelError(f"tensor {weight} has {outputs} outputs, wanted a multiple of {per_word}")
        if self._form.method is Method.AWQ and inputs % group_size:
            raise ModelError(
                f"quantization_config.group_size {group_size} does not divide the {inputs} inputs of {weight}"
            )
        groups = -(-inputs // group_size)
        wanted: dict[str, tuple[int, ...]] = {
            "qzeros": (groups, outputs // per_word),
            "scales": (groups, outputs),
        }
        if self._form.method is Method.GPTQ and (f"{module}g_idx" in shapes or not self._form.in_order):
            wanted["g_idx"] = (inputs,)
        for part, shape in wanted.items():
            self._check(f"{module}{part}", shape, FLOATS if part == "scales" else INTEGERS)
        self._parts[weight] = tuple(f"{module}{part}" for part in (_WORDS, *wanted))
        if "g_idx" in wanted:
            self._check_groups(f"{module}g_idx", groups, group_size)
        for part in self._parts[weight]:
            del shapes[part]
        shapes[weight] = (outputs, inputs)

    def _refuse_strays(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """What no packed weight has claimed is taken as it is: that is for floats."""
        for name in sorted(shapes.keys() - self._parts.keys()):
            dtype = self._files.stored_as(name)
            if dtype not in FLOATS:
                rule = f"is of no packed weight; served are {', '.join(FLOATS)}"
                raise ModelError(f"tensor {name[:80]!r} has dtype {dtype}, and {rule}")

    def _shape(self, module: str) -> tuple[int, int]:
        """(outputs, inputs), as the packed words have them."""
        words = f"{module}{_WORDS}"
        self._check(words, None, INTEGERS)
        rows, columns, *_ = self._files.shapes[words]
        per_word = 32 // self._form.bits
        if self._form.method is Method.AWQ:
            return columns * per_word, rows
        return columns, rows * per_word

    def _check(self, name: str, shape: tuple[int, ...] | None, dtypes: tuple[str, ...]) -> None:
        """shape: None for any matrix that holds something."""
        found = self._files.shapes.get(name)
        if found is None:
            raise ModelError(f"tensor {name} is missing")
        if found != shape and (shape is not None or len(found) != 2 or 0 in found):
            raise ModelError(
                f"tensor {name} has shape {list(found)}, wanted {list(shape or ('rows', 'columns'))}"
            )
        if self._files.stored_as(name) not in dtypes:
            found_dtype = self._files.stored_as(name)
            raise ModelError(f"tensor {name} has dtype {found_dtype}; served are {', '.join(dtypes)}")

    def _check_groups(self, name: str, groups: int, group_size: int) -> None:
        found = self._files.tensor(name)
        if self._form.in_order:
            if not torch.equal(found, torch.arange(len(found), dtype=found.dtype) // group_size):
                raise ModelError(f"tensor {name} is not in order, but quantization_config.desc_act is false")
        elif found.numel() and not (found.min() >= 0 and found.max() < groups):
            raise ModelError(f"tensor {name} holds groups outside [0, {groups})")

    def _matrix(self, name: str) -> PackedMatrix:
        tensors = {part.rpartition(".")[2]: self._files.tensor(part) for part in self._parts[name]}
        inputs = self.shapes[name][1]
        order = tensors.get("g_idx", torch.arange(inputs) // (self._form.group_size or inputs))
        return unpack_matrix(
            self._form, tensors["qweight"], tensors["qzeros"], tensors["scales"], order.long()
        )
