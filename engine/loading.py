"""What every rank of an engine makes of its wishes: a backend, its share of the model, the form of a block.

Called once per process, by the assembly or by a rank that follows. Decides no number of blocks.
"""

import mmap
from dataclasses import dataclass

import torch

from engine.cache.copy_lane import CopyLane
from engine.cache.kv_cache import KVCache
from engine.cache.layout import KVLayout
from engine.cache.staged_cache import StagedKVCache
from engine.collective import Collective
from engine.devices import GPU_SHARE
from engine.distribution import SamplingKernels
from engine.errors import CapacityError
from engine.kernels.backend import Backend
from engine.kernels.reference import ReferenceBackend
from engine.kernels.select import choose_backend, require_kv_dtype
from engine.kernels.triton.tiles import SPLIT_BYTES_MAX
from engine.model.architecture import ModelConfig
from engine.model.config import read_config
from engine.model.load import load_model
from engine.model.transformer import Quantization, Transformer
from engine.progress import Progress
from engine.recorded_runner import ROWS
from engine.scoring import ROWS_MAX
from engine.wishes import EngineWishes


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """sampling: draws from the backend's logits. note: one line for the operator about the backend, or None."""

    config: ModelConfig
    backend: Backend
    model: Transformer
    quantization: Quantization
    collective: Collective
    sampling: SamplingKernels
    note: str | None

    def layout(self, wishes: EngineWishes, model_digest: str) -> KVLayout:
        """Of whole blocks, with the heads of all ranks: the same however many there are."""
        numerics = (*self.backend.numerics, ("quantization", self.quantization.value))
        return KVLayout(
            model_digest=model_digest,
            layers=self.config.layers,
            kv_heads=self.config.kv_heads,
            head_dim=self.config.head_dim,
            block_size=wishes.block_size,
            dtype=wishes.kv_dtype or self.backend.dtype,
            numerics=numerics,
        )

    def room_bytes(self, wishes: EngineWishes) -> int | None:
        """Of the device's memory, for its share of the KV cache; None where that memory is the host's. Of what it may
        have there the model has its part already, and steps are going to need theirs."""
        device = self.backend.device
        if device.type == "cpu":
            return None
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        return room_bytes(
            share=wishes.kv_share or GPU_SHARE,
            total=total,
            free=free,
            own=torch.cuda.memory_reserved(device),
            steps=self._step_bytes(wishes) + self._recorded_bytes(wishes),
        )

    def take_step_memory(self, wishes: EngineWishes) -> None:
        """All that a step may come to need on the device, once: torch keeps it for this process and gives it to steps
        in parts. Raises torch.OutOfMemoryError. Nothing where that memory is the host's."""
        device = self.backend.device
        if device.type != "cpu":
            torch.cuda.empty_cache()
            torch.empty(self._step_bytes(wishes), dtype=torch.uint8, device=device)

    def cache(self, layout: KVLayout, num_blocks: int, memory: mmap.mmap | None = None) -> KVCache:
        """memory: of the host, that all ranks have whole blocks in; None for one rank."""
        share, lane = self.collective.share, self.copy_lane()
        if lane is None:
            return KVCache(layout, num_blocks, memory, share)
        return StagedKVCache(layout, num_blocks, lane, memory, share)

    def copy_lane(self) -> CopyLane | None:
        """A new one on the device; None where its memory is the host's."""
        if self.backend.device.type == "cpu":
            return None
        from engine.kernels.triton.copy_lane import CudaCopyLane

        return CudaCopyLane(self.backend.device)

    def _step_bytes(self, wishes: EngineWishes) -> int:
        return step_bytes(self.config, wishes.step_tokens, wishes.step_sequences)

    def _recorded_bytes(self, wishes: EngineWishes) -> int:
        alone = self.collective.share.size == 1
        return recorded_bytes(self.config, wishes.recorded_rows) if alone else 0


def room_bytes(*, share: float, total: int, free: int, own: int, steps: int) -> int:
    """What is left for a KV cache of a device's memory, in bytes. share: of the total, for all that this process has
    there. free: that nobody has. own: that it has now. steps: that they need, and recordings of them."""
    return max(0, min(int(total * share) - own, free) - steps)


def step_bytes(config: ModelConfig, tokens: int, sequences: int) -> int:
    """What a step makes for itself at most: float32 rows between the kernels, of which three live at once in a layer;
    logits of rows that are sampled from or scored, twice, since some of them are taken out; and what is kept between
    two passes. Ranks make no more: each gathers whole rows. tokens: of its budget, which is exceeded where everybody
    generates."""
    tokens = max(tokens, sequences + 1)
    logits = min(tokens, sequences + ROWS_MAX)
    return 4 * (tokens * _row_elements(config) + 2 * logits * config.vocab_size) + SPLIT_BYTES_MAX


def recorded_bytes(config: ModelConfig, sequences: int) -> int:
    """What recordings of steps of up to so many sequences keep at most, in one memory for all of them: as much as a
    step makes, and their logits once more. 0 for none."""
    rows = min(sequences, ROWS[-1])
    return 4 * rows * (_row_elements(config) + 2 * config.vocab_size) + (SPLIT_BYTES_MAX if rows else 0)


def _row_elements(config: ModelConfig) -> int:
    heads = (config.heads + 2 * config.kv_heads) * config.head_dim
    return 3 * config.hidden_size + 2 * heads + 3 * config.intermediate_size


def load(wishes: EngineWishes, collective: Collective, progress: Progress) -> Loaded:
    """The part of the model that is the rank's. Raises ModelError or CapacityError."""
    config = _read_config(wishes)
    config.require_shares(collective.share.size)
    chosen = choose_backend(
        wishes.dtype,
        wishes.threads,
        device=wishes.device,
        cores=wishes.cores,
        progress=progress,
        share=collective.share,
    )
    backend = chosen.backend
    torch.set_num_threads(wishes.threads if isinstance(backend, ReferenceBackend) else 1)
    require_kv_dtype(backend, wishes.kv_dtype)
    max_model_len = wishes.max_model_len or config.max_position
    quantization = _quantization(wishes)
    return Loaded(
        config=config,
        backend=backend,
        model=load_model(wishes.model, backend, max_model_len, quantization, progress, collective),
        quantization=quantization,
        collective=collective,
        sampling=chosen.sampling,
        note=chosen.note,
    )


def _quantization(wishes: EngineWishes) -> Quantization:
    """What a file has as small integers is used so, unless somebody asked for a dtype."""
    if wishes.quantization is not None:
        return wishes.quantization
    return Quantization.STORED if wishes.dtype is None else Quantization.NONE


def _read_config(wishes: EngineWishes) -> ModelConfig:
    config = read_config(wishes.model)
    if wishes.max_model_len is not None and wishes.max_model_len > config.max_position:
        limit = config.max_position
        raise CapacityError(f"max_model_len {wishes.max_model_len} is over the model's own limit, {limit}")
    return config
