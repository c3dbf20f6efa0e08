"""Picks the CPU backend of a worker: compiled kernels where they can be built, plain torch where not.

Called once per worker at start-up. Never chooses for a GPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.errors import NoCompiler
from engine.kernels.backend import Backend
from engine.kernels.core_share import ANY_CORES, CoreShare
from engine.kernels.cpu.backend import CpuBackend
from engine.kernels.cpu.build import COMPILERS, build, default_cache_folder, find_compiler, host_flags
from engine.kernels.cpu.library import Library
from engine.kernels.reference import ReferenceBackend
from engine.progress import SILENT, Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenBackend:
    """note: one line for the operator when it is not the backend one would want, else None."""

    backend: Backend
    note: str | None


def choose_backend(
    dtype: torch.dtype | None,
    threads: int,
    *,
    cores: CoreShare = ANY_CORES,
    cache_folder: Path | None = None,
    compilers: Sequence[str] = COMPILERS,
    progress: Progress = SILENT,
) -> ChosenBackend:
    """The best backend for this processor. dtype None: bfloat16 where the processor has it, else float32.

    cores: what the compiled ones run on. cache_folder: where built kernels are kept, the user's default when
    None. compilers: tried in turn. Raises CapacityError when the system refuses the threads.
    """
    try:
        compiler = find_compiler(compilers)
        library = Library(build(cache_folder or default_cache_folder(), compiler, host_flags(), progress))
    except (NoCompiler, OSError) as error:
        note = f"serving with the slow plain-torch backend: {error}"
        return ChosenBackend(backend=ReferenceBackend(dtype or torch.float32), note=note)
    native = torch.bfloat16 if library.has_bf16() else torch.float32
    return ChosenBackend(backend=CpuBackend(dtype or native, threads, library, cores), note=None)
