"""From a path to a model that computes.

Called once per process, by whoever builds an engine. Never keeps a file open, never chooses a device.
"""

from pathlib import Path

from engine.collective import ALONE, Collective
from engine.errors import ModelError
from engine.kernels.backend import Backend
from engine.model.config import naming_model
from engine.model.transformer import Quantization, Transformer
from engine.model.weights import open_model
from engine.progress import SILENT, Progress


def load_model(
    path: Path,
    backend: Backend,
    max_model_len: int,
    quantization: Quantization = Quantization.NONE,
    progress: Progress = SILENT,
    collective: Collective = ALONE,
) -> Transformer:
    """Read, check and pack a Hugging Face folder or a GGUF file, or a rank's share of it.

    max_model_len: most positions of a sequence, in [1, the model's own limit]. Raises ModelError with one
    line that names the path.
    """
    config, weights = open_model(path)
    with naming_model(path):
        if not 1 <= max_model_len <= config.max_position:
            raise ModelError(f"max_model_len {max_model_len} is outside [1, {config.max_position}]")
        return Transformer(config, weights, backend, max_model_len, quantization, progress, collective)
