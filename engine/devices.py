"""What an operator may say of where an engine computes: auto, cpu, cuda, or cuda:N."""

CUDA = "cuda"

GPU_SHARE = 0.9
"""Of a GPU's memory for all that is there, unless somebody wishes otherwise."""


def first_gpu(device: str) -> int | None:
    """Index of the GPU of the first rank; the others have those that come next. None: the processor. `auto` is that as
    long as no GPU has run the kernels."""
    kind, _, index = device.partition(":")
    return int(index or 0) if kind == CUDA else None
