"""What an operator asks of one engine, in the engine's own terms.

Made once per process from its flags; frozen. What the device can hold of it is for the assembly to find out.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

import torch

from engine.kernels.core_share import ANY_CORES, CoreShare
from engine.model.transformer import Quantization

_QUANTIZATIONS = {
    "auto": None,
    "none": Quantization.NONE,
    "stored": Quantization.STORED,
    "int8": Quantization.INT8,
    "int4": Quantization.INT4,
}
_DTYPES = {
    "auto": None,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}


class EngineFlags(Protocol):
    """The flags of one engine by their usual names; device: see engine.devices; dtypes are auto, float32 or bfloat16,
    of the cache also int8 or fp8; quantization is auto, none, stored, int8 or int4."""

    @property
    def device(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def kv_cache_dtype(self) -> str: ...
    @property
    def quantization(self) -> str: ...
    @property
    def threads(self) -> int | None: ...
    @property
    def max_model_len(self) -> int | None: ...
    @property
    def max_num_batched_tokens(self) -> int: ...
    @property
    def max_num_seqs(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def num_gpu_blocks_override(self) -> int | None: ...
    @property
    def gpu_memory_utilization(self) -> float | None: ...
    @property
    def kv_cache_memory_bytes(self) -> int | None: ...
    @property
    def swap_space(self) -> int: ...
    @property
    def enable_prefix_caching(self) -> bool: ...
    @property
    def async_scheduling(self) -> bool | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineWishes:
    """What an operator asked for. None: whatever is best here.

    device: see engine.devices. dtype: of the weights; kv_dtype: of the cache. max_model_len: tokens. num_blocks goes
    before kv_bytes, and that before kv_share, in (0, 1]: of the host's free memory for the cache, or of the whole of a
    GPU's for all that is there. step_tokens, step_sequences: in one step at most. swap_bytes: of host
    memory for sequences that are given up. recorded_rows: up to so many sequences that all generate, a step is recorded
    where the device can replay it; 0: none is. Steps of several ranks are not. ahead: whether a step is begun before
    what the last one drew is read (see `EngineCore`); None: where the device computes beside the host.
    """

    model: Path
    device: str = "auto"
    dtype: torch.dtype | None = None
    kv_dtype: torch.dtype | None = None
    quantization: Quantization | None = None
    threads: int = 1
    cores: CoreShare = ANY_CORES
    max_model_len: int | None = None
    block_size: int = 16
    num_blocks: int | None = None
    kv_bytes: int | None = None
    swap_bytes: int = 0
    kv_share: float | None = None
    caching: bool = True
    step_tokens: int = 256
    step_sequences: int = 64
    recorded_rows: int = 0
    ahead: bool | None = None

    @classmethod
    def of(cls, flags: EngineFlags, model: Path, cores: CoreShare = ANY_CORES) -> Self:
        """From flags as an operator sets them; model: where its files are."""
        return cls(
            model=model,
            device=flags.device,
            dtype=_DTYPES[flags.dtype],
            kv_dtype=_DTYPES[flags.kv_cache_dtype],
            quantization=_QUANTIZATIONS[flags.quantization],
            threads=flags.threads or len(cores.own) or 1,
            cores=cores,
            max_model_len=flags.max_model_len,
            block_size=flags.block_size,
            num_blocks=flags.num_gpu_blocks_override,
            kv_bytes=flags.kv_cache_memory_bytes,
            swap_bytes=flags.swap_space,
            kv_share=flags.gpu_memory_utilization,
            caching=flags.enable_prefix_caching,
            step_tokens=flags.max_num_batched_tokens,
            step_sequences=flags.max_num_seqs,
            ahead=flags.async_scheduling,
        )
