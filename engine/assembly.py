"""Puts one engine together: backend, model, cache, pool, core.

Called once per process. The only place that turns wishes into a Capacity: what the device can hold is found here,
once, and never written back into anybody's configuration. Starts no thread.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from engine.batch import ModelRunner
from engine.cache.block_pool import BlockPool
from engine.cache.kv_cache import KVCache
from engine.cache.layout import KVLayout
from engine.cache.swap_space import SwapSpace
from engine.collective import ALONE
from engine.core import EngineCore
from engine.device_sampler import DeviceSampler
from engine.errors import CapacityError
from engine.loading import Loaded, load
from engine.model.architecture import ModelConfig
from engine.model.transformer import Transformer
from engine.model.weights import model_digest
from engine.policy import Policy
from engine.progress import SILENT, Progress
from engine.ranks import Followers, LedRunner, LedStagedCache
from engine.recorded_runner import RecordedRunner
from engine.runner import TransformerRunner
from engine.sampling import Sampler
from engine.warm_up import warm_up
from engine.wishes import EngineWishes

KV_BYTES_DEFAULT = 2 << 30
KV_SHARE_OF_MEMORY = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What the device holds. tokens: in all blocks. tokens_max: of one sequence, by the model's length and the pool's
    size."""

    num_blocks: int
    tokens: int
    max_model_len: int
    tokens_max: int

    def full_requests(self) -> int:
        """Sequences of tokens_max that fit at once."""
        return self.tokens // self.tokens_max


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """note: one line for the operator about the backend, or None. borrowed_s: seconds that cores of other workers have
    computed for this engine. enter: to be called on the thread that steps, before it does. device: of
    its first rank, as torch names it."""

    config: ModelConfig
    model_digest: str
    capacity: Capacity
    device: str
    cache: KVCache
    core: EngineCore
    backend_name: str
    note: str | None
    borrowed_s: Callable[[], float]
    enter: Callable[[], None]


def assemble(
    wishes: EngineWishes,
    policy: Policy,
    *,
    memory_bytes: int,
    progress: Progress = SILENT,
    followers: Followers | None = None,
) -> Engine:
    """memory_bytes: free host memory. followers: the other ranks of this engine, whose first one this process is; they
    load beside it. Raises ModelError, CapacityError or RankLost."""
    loaded = load(wishes, ALONE if followers is None else followers.collective, progress)
    backend, layout = loaded.backend, loaded.layout(wishes, model_digest(wishes.model))
    num_blocks = _num_blocks(wishes, layout, _room(wishes, loaded, memory_bytes, followers))
    cache, runner = _cache_and_runner(loaded, layout, num_blocks, followers)
    if followers is None:
        runner = _recorded(runner, loaded.model, cache, wishes.recorded_rows, progress)
    sampler = _sampler(loaded)
    _warm_up(wishes, loaded, runner, sampler, cache)
    core = EngineCore(
        pool=BlockPool(num_blocks),
        block_size=layout.block_size,
        runner=runner,
        sampler=sampler,
        policy=policy,
        caching=wishes.caching,
        swap=_swap_space(wishes, cache, memory_bytes - num_blocks * layout.block_bytes()),
        ahead=_ahead(wishes, loaded),
    )
    return Engine(
        config=loaded.config,
        model_digest=layout.model_digest,
        capacity=Capacity(
            num_blocks=num_blocks,
            tokens=num_blocks * layout.block_size,
            max_model_len=loaded.model.max_model_len,
            tokens_max=min(loaded.model.max_model_len, num_blocks * layout.block_size),
        ),
        device=str(backend.device),
        cache=cache,
        core=core,
        backend_name=backend.name,
        note=loaded.note,
        borrowed_s=backend.borrowed_s,
        enter=partial(_enter, backend.device),
    )


def _enter(device: torch.device) -> None:
    """Each thread has a GPU of its own choice, the first one unless it says otherwise."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


class _Room(NamedTuple):
    """For the cache, in bytes. free: that it may take; usual: that it takes where nobody says how much."""

    free: int
    usual: int


def _room(wishes: EngineWishes, loaded: Loaded, host_bytes: int, followers: Followers | None) -> _Room:
    """On other devices, of which each has its share, the cache takes as much host memory as is handed over."""
    own = loaded.room_bytes(wishes)
    least = own if followers is None else followers.loaded(own)
    if least is not None:
        free = min(least * loaded.collective.share.size, host_bytes)
        return _Room(free, free)
    if wishes.kv_share is not None:
        return _Room(host_bytes, int(host_bytes * wishes.kv_share))
    return _Room(host_bytes, min(KV_BYTES_DEFAULT, int(host_bytes * KV_SHARE_OF_MEMORY)))


def _cache_and_runner(
    loaded: Loaded, layout: KVLayout, num_blocks: int, followers: Followers | None
) -> tuple[KVCache, ModelRunner]:
    if followers is None:
        cache = loaded.cache(layout, num_blocks)
        return cache, TransformerRunner(loaded.model, cache)
    memory, lane = followers.open(num_blocks, layout), loaded.copy_lane()
    if lane is None:
        cache = loaded.cache(layout, num_blocks, memory)
    else:
        cache = LedStagedCache(layout, num_blocks, lane, memory, followers)
    return cache, LedRunner(TransformerRunner(loaded.model, cache), followers)


def _ahead(wishes: EngineWishes, loaded: Loaded) -> bool:
    """Ranks are told each token, which somebody must have read."""
    ranks = loaded.collective.share.size
    assert ranks == 1 or not wishes.ahead, "asked for where there are several ranks"
    if wishes.ahead is None:
        return ranks == 1 and loaded.backend.device.type == "cuda"
    return wishes.ahead


def _sampler(loaded: Loaded) -> Sampler:
    """One that draws where the logits are, on a device that can."""
    if loaded.backend.device.type != "cuda":
        return Sampler(loaded.sampling)
    from engine.kernels.triton.sampling import draw, settle

    return DeviceSampler(loaded.sampling, draw, settle)


def _warm_up(
    wishes: EngineWishes, loaded: Loaded, runner: ModelRunner, sampler: Sampler, cache: KVCache
) -> None:
    """With the largest step where memory is taken and kernels are compiled at their first use."""
    tokens_max, step_tokens = loaded.model.max_model_len, cache.layout.block_size
    if loaded.backend.device.type == "cuda":
        step_tokens = min(wishes.step_tokens, wishes.step_sequences * tokens_max)
    try:
        loaded.take_step_memory(wishes)
        warm_up(runner, sampler, cache, tokens_max=tokens_max, step_tokens=step_tokens)
    except torch.OutOfMemoryError:
        raise CapacityError(
            f"no memory is left for steps of {step_tokens} tokens and {wishes.step_sequences} sequences: "
            "less gpu_memory_utilization, max_num_batched_tokens or max_num_seqs"
        ) from None


def _recorded(
    plain: ModelRunner, model: Transformer, cache: KVCache, recorded_rows: int, progress: Progress
) -> ModelRunner:
    """One that replays steps, on a device that can."""
    if recorded_rows == 0 or cache.tensor.device.type != "cuda":
        return plain
    from engine.kernels.triton.graphs import CudaGraphs

    blocks_max = min(cache.num_blocks, cache.layout.blocks_for(model.max_model_len))
    runner = RecordedRunner(model, cache, CudaGraphs(), rows_max=recorded_rows, blocks_max=blocks_max)
    try:
        runner.record_all(progress)
    except torch.OutOfMemoryError:
        raise CapacityError(
            "no memory is left to record steps in: less gpu_memory_utilization, or enforce_eager"
        ) from None
    return runner


def _swap_space(wishes: EngineWishes, cache: KVCache, memory_bytes: int) -> SwapSpace | None:
    if wishes.swap_bytes == 0:
        return None
    needed = cache.layout.block_bytes()
    if wishes.swap_bytes < needed:
        raise CapacityError(f"{wishes.swap_bytes} bytes of swap space hold no block of {needed} bytes")
    if wishes.swap_bytes > memory_bytes:
        left = f"the {memory_bytes} that the KV cache leaves"
        raise CapacityError(f"{wishes.swap_bytes} bytes of swap space are more than {left}")
    return SwapSpace(cache, wishes.swap_bytes // needed)


def _num_blocks(wishes: EngineWishes, layout: KVLayout, room: _Room) -> int:
    needed = layout.block_bytes()
    asked = room.usual if wishes.kv_bytes is None else wishes.kv_bytes
    if wishes.num_blocks is not None:
        asked = wishes.num_blocks * needed
    if asked < needed:
        raise CapacityError(f"{asked} bytes for the KV cache hold no block of {needed} bytes")
    if asked > room.free:
        raise CapacityError(f"{asked} bytes for the KV cache are more than the {room.free} that are free")
    return asked // needed
