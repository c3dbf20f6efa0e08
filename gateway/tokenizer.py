"""Text to token ids and back, for one model.

Validation, the text fold and the servicers call it. It knows no requests and no limits, and never holds text
back: what is certain in a stream is the text fold's business. Encoding releases the GIL; long texts belong on
another thread.
"""

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from gateway.chat import ChatMessage, ChatTemplate
from gateway.errors import ModelFilesError
from gateway.folder_vocabulary import read_folder
from gateway.gguf_vocabulary import read_gguf
from gateway.vocabulary import Vocabulary

_SPACE = "▁"


def load_tokenizer(path: Path) -> "Tokenizer":
    """From a Hugging Face folder or a GGUF file. Raises ModelFilesError."""
    if path.is_dir():
        return Tokenizer(read_folder(path))
    if path.is_file():
        return Tokenizer(read_gguf(path))
    raise ModelFilesError(f"{path.name}: no such file or folder")


class Tokenizer:
    """chat, chat_template: None for a model without a chat template. special_tokens: see Vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocab_size = vocabulary.size
        self.eos_token_ids = vocabulary.eos_token_ids
        self.max_model_len = vocabulary.max_model_len
        self.special_tokens = vocabulary.special_tokens
        self.chat_template = vocabulary.chat_template
        self.chat = _template(vocabulary)
        self._backend = vocabulary.backend
        self._pieces = _Pieces(vocabulary)

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """add_special: with the special tokens that the model's convention adds; those in the text count as such
        anyway."""
        return list(self._backend.encode(text, add_special_tokens=add_special).ids)

    def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool,
        now: datetime,
        characters_max: int,
    ) -> list[int]:
        """Raises InvalidRequest as ChatTemplate.render. The model must have a chat template."""
        assert self.chat is not None, "only a model with a chat template is asked to chat"
        text = self.chat.render(
            messages, add_generation_prompt=add_generation_prompt, now=now, characters_max=characters_max
        )
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: Sequence[int], *, include_special: bool = False) -> str:
        """Bytes that are not UTF-8 become U+FFFD; ids without a token give nothing."""
        return str(self._backend.decode(token_ids, skip_special_tokens=not include_special))

    def piece(self, token_id: int, *, include_special: bool = False) -> bytes:
        """What one token adds to a text: any bytes, also a part of a character."""
        if not include_special and token_id in self._pieces.special:
            return b""
        return self._pieces[token_id]


def _template(vocabulary: Vocabulary) -> ChatTemplate | None:
    if vocabulary.chat_template is None:
        return None
    return ChatTemplate(vocabulary.chat_template, vocabulary.special_tokens)


class _Pieces(dict[int, bytes]):
    """Token id -> bytes, filled as tokens are first seen. At most one entry per id of the vocabulary.

    How the decoder writes a byte is found by asking it: GPT-2's alphabet of printable stand-ins, or
    SentencePiece's "▁" for a space and "<0x..>" for a byte.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__()
        self._backend = vocabulary.backend
        added = self._backend.get_added_tokens_decoder()
        self.special = frozenset(token_id for token_id, token in added.items() if token.special)
        decoder = self._backend.decoder
        if decoder is not None and decoder.decode(["Ġ"]) == " ":
            self._of = _ByteLevelAlphabet().bytes_of
        elif decoder is not None and decoder.decode(["a", "▁b"]) == "a b":
            self._of = _sentencepiece_bytes if decoder.decode(["<0x41>"]) == "A" else _spaced_bytes
        else:
            raise ModelFilesError("the tokenizer's decoder is neither byte-level nor SentencePiece's")

    def __missing__(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        piece = b"" if token is None else self._of(token)
        self[token_id] = piece
        return piece


class _ByteLevelAlphabet:
    """GPT-2's one printable character for each byte (https://github.com/openai/gpt-2, encoder.py)."""

    def __init__(self) -> None:
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = [byte for byte in range(256) if byte not in printable]
        self._bytes = {chr(byte): byte for byte in printable}
        self._bytes |= {chr(256 + index): byte for index, byte in enumerate(others)}

    def bytes_of(self, token: str) -> bytes:
        if all(character in self._bytes for character in token):
            return bytes(self._bytes[character] for character in token)
        return token.encode("utf-8")


def _sentencepiece_bytes(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            return _spaced_bytes(token)
    return _spaced_bytes(token)


def _spaced_bytes(token: str) -> bytes:
    return token.replace(_SPACE, " ").encode("utf-8")
