"""The door to a model's configuration, whatever its files are.

Called at start-up by everybody who needs a model's numbers but not its weights.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engine.errors import ModelError
from engine.model.architecture import ModelConfig
from engine.model.gguf_config import read_gguf_config
from engine.model.gguf_file import GgufFile
from engine.model.huggingface_config import read_huggingface_config

__all__ = ["ModelConfig", "naming_model", "read_config"]


def read_config(path: Path) -> ModelConfig:
    """The configuration of a Hugging Face folder or a GGUF file.

    Raises ModelError with one line that names the path.
    """
    with naming_model(path):
        if path.is_dir():
            return read_huggingface_config(path)
        return read_gguf_config(GgufFile(path))


@contextmanager
def naming_model(path: Path) -> Iterator[None]:
    """Every fault of a model's files leaves as a ModelError of one line that begins with the path."""
    try:
        yield
    except ModelError as error:
        raise ModelError(_one_line(f"{path}: {error}")) from None
    except OSError as error:
        raise ModelError(_one_line(f"{path}: cannot be read: {error.strerror or error}")) from None


def _one_line(text: str) -> str:
    return " ".join(text.split())
