"""Picks the backend of a worker: compiled CPU kernels where they can be built, plain torch where not; a GPU for those
who ask for it.

Called once per worker at start-up. The GPU's kernels are imported only where they are to run.
"""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import CalledProcessError

import torch

from engine.collective import WHOLE, Share
from engine.devices import first_gpu
from engine.distribution import PlainSampling, SamplingKernels
from engine.errors import CapacityError, NoCompiler
from engine.kernels.backend import Backend, dtype_name
from engine.kernels.core_share import ANY_CORES, CoreShare
from engine.kernels.cpu.backend import CpuBackend
from engine.kernels.cpu.build import COMPILERS, built, default_cache_folder, host_flags
from engine.kernels.cpu.crew import Crew
from engine.kernels.cpu.library import Library
from engine.kernels.cpu.operations import CpuOperations
from engine.kernels.cpu.sampling import CpuSampling
from engine.kernels.reference import ReferenceBackend
from engine.progress import SILENT, Progress

CAPABILITY_LEAST = (8, 0)
"""Of a GPU: the first one that multiplies bfloat16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenBackend:
    """sampling: draws from the backend's logits, in host memory. note: one line for the operator when it is not the
    backend one would want, else None."""

    backend: Backend
    sampling: SamplingKernels
    note: str | None


def choose_backend(
    dtype: torch.dtype | None,
    threads: int,
    *,
    device: str = "auto",
    cores: CoreShare = ANY_CORES,
    cache_folder: Path | None = None,
    compilers: Sequence[str] = COMPILERS,
    progress: Progress = SILENT,
    share: Share = WHOLE,
) -> ChosenBackend:
    """The best backend of a device. dtype None: bfloat16 where the device has it, else float32.

    device: see engine.devices. cores: what the compiled ones run
    on. cache_folder: where built kernels are kept, the user's default when None. compilers: tried in turn. share: the
    rank's, of which each has a GPU of its own. Raises CapacityError when the system refuses the threads, or has not
    what cuda or several ranks need.
    """
    gpu = first_gpu(device)
    if gpu is not None:
        _require_gpus(gpu, share.size)
        gpu += share.rank
    try:
        folder = cache_folder or default_cache_folder()
        crew = Crew(Library(built(folder, compilers, host_flags(), progress)), threads, cores)
    except (NoCompiler, OSError) as error:
        if gpu is not None:
            return _cuda_backend(dtype, gpu, PlainSampling())
        if share.size > 1:
            raise CapacityError(
                f"tensor_parallel_size {share.size} needs the compiled kernels: {error}"
            ) from error
        note = f"serving with the slow plain-torch backend: {error}"
        backend = ReferenceBackend(dtype or torch.float32)
        return ChosenBackend(backend=backend, sampling=PlainSampling(), note=note)
    sampling = CpuSampling(crew)
    if gpu is not None:
        return _cuda_backend(dtype, gpu, sampling)
    native = torch.bfloat16 if crew.library.has_bf16() else torch.float32
    kind = CpuBackend if share.size == 1 else CpuOperations
    return ChosenBackend(backend=kind(dtype or native, crew), sampling=sampling, note=None)


def require_kv_dtype(backend: Backend, dtype: torch.dtype | None) -> None:
    """Raises CapacityError where a cache of this dtype cannot be; None: the weights' can."""
    if dtype is None or dtype in backend.kv_dtypes:
        return
    there = ", ".join(sorted(map(dtype_name, backend.kv_dtypes)))
    raise CapacityError(
        f"kv_cache_dtype {dtype_name(dtype)} is not there for backend {backend.name}: it has {there}"
    )


def _require_gpus(first: int, gpus: int) -> None:
    """Raises CapacityError where kernels cannot run on so many from this one on."""
    missing = _missing_for_cuda(first, gpus)
    if missing is not None:
        raise CapacityError(f"no device cuda: {missing}")


def _cuda_backend(dtype: torch.dtype | None, gpu: int, sampling: SamplingKernels) -> ChosenBackend:
    from engine.kernels.triton.backend import TritonBackend
    from engine.kernels.triton.blocks import gather_blocks

    device = torch.device("cuda", gpu)
    torch.cuda.set_device(device)  # where kernels are launched
    one = torch.zeros(1, dtype=torch.int64, device=device)
    require_launch(lambda: gather_blocks(one.view(1, 1), one))
    backend = TritonBackend(dtype or torch.bfloat16, device)
    note = "no GPU has run these kernels before: see docs/gpu.md"
    return ChosenBackend(backend=backend, sampling=sampling, note=note)


def _missing_for_cuda(first: int, gpus: int) -> str | None:
    """Why kernels cannot run on these GPUs here; None where they can."""
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds none here"
    if (found := torch.cuda.device_count()) < first + gpus:
        wanted = f"cuda:{first}" if gpus == 1 else f"tensor_parallel_size {gpus} from cuda:{first} on"
        return f"{wanted} needs {first + gpus} GPUs, and there are {found}"
    for gpu in range(first, first + gpus):
        if torch.cuda.get_device_capability(gpu) < CAPABILITY_LEAST:
            least = ".".join(map(str, CAPABILITY_LEAST))
            return f"{torch.cuda.get_device_name(gpu)} is older than compute capability {least}"
    return None if importlib.util.find_spec("triton") else "triton is not installed"


def require_launch(launch: Callable[[], object]) -> None:
    """Try a kernel: with the first, triton compiles what launches all others, in C and with Python's headers. Raises
    CapacityError where that cannot be."""
    try:
        launch()
    except (RuntimeError, OSError, CalledProcessError, ImportError) as error:
        why = str(error).partition("\n")[0] or type(error).__name__
        raise CapacityError(f"no device cuda: triton launches nothing here: {why}") from error
