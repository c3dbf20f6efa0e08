"""What a model's files say about text, whichever kind of files they are. Reads no weights."""

from pathlib import Path

from service.folder_vocabulary import read_folder
from service.gguf_vocabulary import read_gguf
from service.model_source import ModelFilesError
from service.vocabulary import Vocabulary


def read_vocabulary(path: Path) -> Vocabulary:
    """From a Hugging Face folder or a GGUF file. Raises ModelFilesError."""
    if path.is_dir():
        return read_folder(path)
    if path.is_file():
        return read_gguf(path)
    raise ModelFilesError(f"{path.name}: no such file or folder")
