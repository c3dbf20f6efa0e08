"""Builds the tokenizer of a GGUF file from the file's own vocabulary.

`read_vocabulary` calls `read_gguf`. Two families are known: byte-level BPE ("gpt2") with the pre-tokenizers of
GPT-2, SmolLM, Llama 3 and Qwen2, and scored pieces ("llama"), which are turned into merges. Everything else
is refused by name rather than tokenised wrongly.
"""

from collections.abc import Mapping, Sequence
from enum import IntEnum
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from service.gguf_metadata import Value, read_metadata
from service.model_source import ModelFilesError
from service.vocabulary import Vocabulary

_SPACE = "▁"
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


class _Kind(IntEnum):
    """Values of tokenizer.ggml.token_type."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def read_gguf(path: Path) -> Vocabulary:
    """Raises ModelFilesError when the header is broken or its vocabulary is of an unknown kind."""
    metadata = _Metadata(path.name, read_metadata(path))
    family = metadata.text("tokenizer.ggml.model")
    if family == "gpt2":
        backend = _byte_level(metadata)
    elif family == "llama":
        backend = _scored_pieces(metadata)
    else:
        raise ModelFilesError(f'{path.name}: tokenizer "{family}" is not supported (gpt2 and llama are)')
    tokens = metadata.texts("tokenizer.ggml.tokens")
    _add_special_tokens(backend, tokens, metadata.integers("tokenizer.ggml.token_type", len(tokens)))
    _add_start(backend, metadata, family)
    architecture = metadata.text("general.architecture")
    return Vocabulary(
        backend=backend,
        size=len(tokens),
        eos_token_ids=metadata.end_token_ids(),
        special_tokens=metadata.special_tokens(),
        chat_template=metadata.optional_text("tokenizer.chat_template"),
        max_model_len=metadata.optional_integer(f"{architecture}.context_length"),
    )


class _Metadata:
    """Typed look-ups in the header; a wrong type is an error that names the key."""

    def __init__(self, file: str, values: Mapping[str, Value]) -> None:
        self._file = file
        self._values = values

    def text(self, key: str) -> str:
        value = self.optional_text(key)
        if value is None:
            raise self._wrong(key)
        return value

    def optional_text(self, key: str) -> str | None:
        value = self._values.get(key)
        if value is not None and not isinstance(value, str):
            raise self._wrong(key)
        return value

    def optional_integer(self, key: str) -> int | None:
        value = self._values.get(key)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise self._wrong(key)
        return value

    def flag(self, key: str, *, default: bool) -> bool:
        value = self._values.get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key)
        return value

    def texts(self, key: str) -> list[str]:
        value = self._values.get(key)
        if not isinstance(value, list) or not value:
            raise self._wrong(key)
        texts = [item for item in value if isinstance(item, str)]
        if len(texts) != len(value):
            raise self._wrong(key)
        return texts

    def integers(self, key: str, count: int) -> list[int]:
        value = self._values.get(key)
        if not isinstance(value, list) or len(value) != count:
            raise self._wrong(key)
        return [int(item) for item in value]

    def numbers(self, key: str, count: int) -> list[float]:
        value = self._values.get(key)
        if not isinstance(value, list) or len(value) != count:
            raise self._wrong(key)
        return [float(item) for item in value]

    def token(self, name: str) -> tuple[int, str] | None:
        """Id and text of the token with a meaning, for example "bos"."""
        token_id = self.optional_integer(f"tokenizer.ggml.{name}_token_id")
        if token_id is None:
            return None
        tokens = self.texts("tokenizer.ggml.tokens")
        if not 0 <= token_id < len(tokens):
            raise self._wrong(f"tokenizer.ggml.{name}_token_id")
        return token_id, tokens[token_id]

    def end_token_ids(self) -> tuple[int, ...]:
        """End of sequence, of turn and of message: each ends an answer."""
        ends = [token[0] for name in ("eos", "eot", "eom") if (token := self.token(name)) is not None]
        return tuple(dict.fromkeys(ends))

    def special_tokens(self) -> dict[str, str]:
        names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
        found = {theirs: self.token(ours) for ours, theirs in names.items()}
        return {name: token[1] for name, token in found.items() if token is not None}

    def _wrong(self, key: str) -> ModelFilesError:
        return ModelFilesError(f"{self._file}: {key} is missing or not what it should be")


def _byte_level(metadata: _Metadata) -> Tokenizer:
    rule = metadata.optional_text("tokenizer.ggml.pre") or "default"
    splits = {
        "default": pre_tokenizers.ByteLevel(add_prefix_space=False),
        "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
        "smollm": pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        ),
        "llama-bpe": _split_then_bytes(_LLAMA3_SPLIT),
        "qwen2": _split_then_bytes(_QWEN2_SPLIT),
    }
    if rule not in splits:
        raise ModelFilesError(f'pre-tokenizer "{rule}" is not supported ({", ".join(splits)} are)')
    tokens = metadata.texts("tokenizer.ggml.tokens")
    merges = [_pair(merge) for merge in metadata.texts("tokenizer.ggml.merges")]
    try:
        model = models.BPE(vocab=_ids(tokens), merges=merges, ignore_merges=rule == "llama-bpe")
    except Exception as error:  # the library raises bare Exception for merges outside the vocabulary
        raise ModelFilesError(f"the vocabulary does not fit together: {error}") from None
    backend = Tokenizer(model)
    if rule == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = splits[rule]
    backend.decoder = decoders.ByteLevel()
    return backend


def _split_then_bytes(pattern: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _ids(tokens: Sequence[str]) -> dict[str, int]:
    return {token: index for index, token in enumerate(tokens)}


def _scored_pieces(metadata: _Metadata) -> Tokenizer:
    tokens = metadata.texts("tokenizer.ggml.tokens")
    scores = metadata.numbers("tokenizer.ggml.scores", len(tokens))
    kinds = metadata.integers("tokenizer.ggml.token_type", len(tokens))
    normal = {
        token: score for token, score, kind in zip(tokens, scores, kinds, strict=True) if kind == _Kind.NORMAL
    }
    unknown = metadata.token("unknown")
    model = models.BPE(
        vocab=_ids(tokens),
        merges=_merges(normal),
        unk_token=None if unknown is None else unknown[1],
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = Tokenizer(model)
    prefixed = metadata.flag("tokenizer.ggml.add_space_prefix", default=True)
    spaces = normalizers.Replace(" ", _SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefixed else spaces
    undo: list[decoders.Decoder] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*undo, decoders.Strip(" ", 1, 0)] if prefixed else undo)
    return backend


def _merges(scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """Every way to put a piece together from two others, the best-scored piece first."""
    ranked = sorted(scores, key=lambda piece: -scores[piece])
    return [
        (piece[:cut], piece[cut:])
        for piece in ranked
        for cut in range(1, len(piece))
        if piece[:cut] in scores and piece[cut:] in scores
    ]


def _add_special_tokens(backend: Tokenizer, tokens: Sequence[str], kinds: Sequence[int]) -> None:
    """Text that is matched whole, before any splitting."""
    for kind, special in ((_Kind.CONTROL, True), (_Kind.USER_DEFINED, False)):
        chosen = [token for token, its_kind in zip(tokens, kinds, strict=True) if its_kind == kind]
        added = [AddedToken(token, special=special, normalized=False) for token in chosen]
        backend.add_special_tokens(added) if special else backend.add_tokens(added)


def _add_start(backend: Tokenizer, metadata: _Metadata, family: str) -> None:
    """The begin-of-sequence token, where the model was trained with one."""
    start = metadata.token("bos")
    usual = family == "llama" or metadata.optional_text("tokenizer.ggml.pre") == "llama-bpe"
    if start is None or not metadata.flag("tokenizer.ggml.add_bos_token", default=usual):
        return
    backend.post_processor = processors.TemplateProcessing(
        single=[start[1], "$A"], special_tokens=[(start[1], start[0])]
    )
