"""Reads the tokenizer of a Hugging Face folder: tokenizer.json, and what the configurations say beside it.

`read_vocabulary` calls `read_folder`. It runs no code from the folder and needs no network.
"""

from pathlib import Path

import orjson
from tokenizers import Tokenizer

from service.model_source import ModelFilesError
from service.vocabulary import Vocabulary

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_folder(path: Path) -> Vocabulary:
    """Raises ModelFilesError when a file is missing or broken."""
    backend = _backend(path / "tokenizer.json")
    about_tokenizer = _object(path / "tokenizer_config.json")
    about_model = _object(path / "config.json")
    special = {
        name: text for name in _SPECIAL_NAMES if (text := _token_text(about_tokenizer.get(name))) is not None
    }
    ends = _object(path / "generation_config.json").get("eos_token_id", about_model.get("eos_token_id"))
    return Vocabulary(
        backend=backend,
        size=_size(backend),
        eos_token_ids=_end_ids(backend, ends, special.get("eos_token")),
        special_tokens=special,
        chat_template=_chat_template(path, about_tokenizer.get("chat_template")),
        max_model_len=_length(about_model, about_tokenizer),
    )


def _backend(path: Path) -> Tokenizer:
    if not path.is_file():
        raise ModelFilesError(f"{path.name} is missing from the model's folder")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for a broken file
        raise ModelFilesError(f"{path.name}: not a usable tokenizer: {error}") from None


def _object(path: Path) -> dict[str, object]:
    """The JSON object in a file, empty when there is no such file."""
    if not path.is_file():
        return {}
    try:
        content = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError):
        raise ModelFilesError(f"{path.name}: not readable as JSON") from None
    if not isinstance(content, dict):
        raise ModelFilesError(f"{path.name}: not a JSON object")
    return content


def _token_text(value: object) -> str | None:
    """A token is written as text, or as an object with its text in "content"."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _size(backend: Tokenizer) -> int:
    return 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)


def _end_ids(backend: Tokenizer, configured: object, eos_token: str | None) -> tuple[int, ...]:
    if isinstance(configured, int):
        return (configured,)
    if isinstance(configured, list):
        return tuple(item for item in configured if isinstance(item, int))
    token_id = None if eos_token is None else backend.token_to_id(eos_token)
    return () if token_id is None else (token_id,)


def _chat_template(path: Path, configured: object) -> str | None:
    """A file of its own wins over the configuration; of several named templates the one called "default"."""
    own_file = path / "chat_template.jinja"
    if own_file.is_file():
        try:
            return own_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            raise ModelFilesError(f"{own_file.name}: not readable as text") from None
    if isinstance(configured, list):
        named = {item.get("name"): item.get("template") for item in configured if isinstance(item, dict)}
        configured = named.get("default")
    return configured if isinstance(configured, str) else None


def _length(about_model: dict[str, object], about_tokenizer: dict[str, object]) -> int | None:
    lengths = (about_model.get("max_position_embeddings"), about_tokenizer.get("model_max_length"))
    return next((length for length in lengths if isinstance(length, int) and length < 1 << 31), None)
