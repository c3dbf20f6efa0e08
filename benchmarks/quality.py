"""What rounding weights, activations and the KV cache costs: the negative log-likelihood of a fixed text in each mode.

    python -m benchmarks.quality [--text tests/data/quality.txt] [--modes none gguf int8 int4] [--kv-cache-dtype int8]

The text is read as one sequence; the figure is the mean over its tokens, in nats, and how far it is from float32. The
modes awq, gptq and gptq8 read folders that the built-in model is packed into first, rounded to nearest; of those the
same weights are computed in float32 too, which tells what rounding them cost from what computing with them costs.
"""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmarks.packed_folder import Packing, write_packed_folder
from engine.cache.kv_cache import KVCache
from engine.cache.layout import KVLayout
from engine.collective import ALONE, Collective
from engine.kernels.backend import AttentionMeta, Decoder, DecoderWeights
from engine.kernels.composed import ComposedDecoder
from engine.kernels.cpu.backend import CpuBackend
from engine.kernels.cpu.build import COMPILERS, built, default_cache_folder, host_flags
from engine.kernels.cpu.crew import Crew
from engine.kernels.cpu.library import Library
from engine.kernels.cpu.operations import CpuOperations
from engine.kernels.reference import cached, cached_values
from engine.kernels.select import choose_backend
from engine.model.load import load_model
from engine.model.transformer import Quantization, Transformer
from gateway.tokenizer import load_tokenizer
from service.config import DEFAULT_MODEL
from service.model_source import resolve_model

TEXT = Path("tests/data/quality.txt")
CHUNK = 256
BLOCK = 16
MODES = {
    "none": Quantization.NONE,
    "gguf": Quantization.STORED,
    "int8": Quantization.INT8,
    "int4": Quantization.INT4,
    "awq": Quantization.STORED,
    "gptq": Quantization.STORED,
    "gptq8": Quantization.STORED,
}
PACKINGS = {
    "awq": Packing(method="awq", bits=4, group_size=64, symmetric=False),
    "gptq": Packing(method="gptq", bits=4, group_size=32, symmetric=True),
    "gptq8": Packing(method="gptq", bits=8, group_size=64, symmetric=True),
}
"""Of the modes that read another folder than the built-in model; its widths are no multiples of 128."""
KV_DTYPES = {
    "auto": None,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}


def token_ids(text: str) -> list[int]:
    return list(load_tokenizer(resolve_model(DEFAULT_MODEL)).encode(text))


def likelihood(
    ids: Sequence[int],
    *,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
    quantization: Quantization = Quantization.NONE,
    threads: int = 1,
    path: Path | None = None,
) -> float:
    """Mean negative log-likelihood of each token but the first, in nats. kv_dtype: that of the weights if None. path:
    the built-in model's if None."""
    path = path or resolve_model(DEFAULT_MODEL)
    backend = choose_backend(dtype, threads).backend
    if isinstance(backend, CpuBackend) and kv_dtype is not None and kv_dtype not in backend.kv_dtypes:
        backend, kv_dtype = _rounding_to(kv_dtype, dtype, threads), torch.float32
    model = load_model(path, backend, len(ids), quantization)
    config = model.config
    layout = KVLayout(
        model_digest="",
        layers=config.layers,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        block_size=BLOCK,
        dtype=kv_dtype or dtype,
    )
    cache = KVCache(layout, layout.blocks_for(len(ids)))
    total = sum(
        _chunk(model, cache, ids, first, min(first + CHUNK, len(ids) - 1))
        for first in range(0, len(ids) - 1, CHUNK)
    )
    return total / (len(ids) - 1)


@contextmanager
def model_of(mode: str) -> Iterator[Path]:
    """The files that a mode reads, made for as long as this lasts where they are not the built-in model's."""
    source = resolve_model(DEFAULT_MODEL)
    if mode not in PACKINGS:
        yield source
        return
    with TemporaryDirectory() as folder:
        write_packed_folder(source, Path(folder), PACKINGS[mode])
        yield Path(folder)


def _rounding_to(kv_dtype: torch.dtype, dtype: torch.dtype, threads: int) -> CpuOperations:
    """Compiled kernels, on keys and values as a cache of a dtype gives them back that these have not."""

    class Rounding(CpuOperations):
        def decoder(self, weights: DecoderWeights, collective: Collective = ALONE) -> Decoder:
            return ComposedDecoder(weights, self, collective)

        def write_kv(
            self, kv: torch.Tensor, layer: int, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor
        ) -> None:
            k, v = (cached_values(cached(x, kv_dtype)) for x in (k, v))
            super().write_kv(kv, layer, k, v, slots)

    library = Library(built(default_cache_folder(), COMPILERS, host_flags()))
    return Rounding(dtype, Crew(library, threads))


def _chunk(model: Transformer, cache: KVCache, ids: Sequence[int], first: int, end: int) -> float:
    """The sum over the tokens that follow positions first .. end - 1."""
    positions = torch.arange(first, end, dtype=torch.int32)
    meta = AttentionMeta(
        positions=positions,
        slots=positions.long(),
        query_starts=torch.tensor([0, end - first], dtype=torch.int32),
        context_lengths=torch.tensor([end], dtype=torch.int32),
        block_tables=torch.arange(cache.num_blocks, dtype=torch.int32).unsqueeze(0),
    )
    rows = torch.arange(end - first)
    with torch.inference_mode():
        logits = model.forward(torch.tensor(ids[first:end]), cache.tensor, meta, rows)
    following = torch.tensor(ids[first + 1 : end + 1])
    return float(torch.nn.functional.cross_entropy(logits, following, reduction="sum"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=list(MODES))
    parser.add_argument("--kv-cache-dtype", default="auto", choices=list(KV_DTYPES), help="in all modes")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    ids = token_ids(options.text.read_text(encoding="utf-8"))
    exact = likelihood(ids, dtype=torch.float32, threads=options.threads)
    print(f"{len(ids)} tokens\nfloat32        {exact:.5f}")
    for mode in options.modes:
        with model_of(mode) as path:
            found = likelihood(
                ids,
                dtype=torch.bfloat16,
                kv_dtype=KV_DTYPES[options.kv_cache_dtype],
                quantization=MODES[mode],
                threads=options.threads,
                path=path,
            )
            line = f"bfloat16 {mode:5} {found:.5f}  {found / exact - 1:+.2%}"
            if mode in PACKINGS:
                same = likelihood(ids, dtype=torch.float32, threads=options.threads, path=path)
                line += f"  the same weights in float32 {same:.5f}  {found / same - 1:+.2%}"
        print(line, flush=True)


if __name__ == "__main__":
    main()
