"""The bytes that each token stands for.

The tokenizer and the guides ask it. Knows no text beyond single tokens, and encodes nothing.
"""

from service.model_source import ModelFilesError
from service.vocabulary import Vocabulary

_SPACE = "▁"


class Pieces(dict[int, bytes]):
    """Token id -> bytes, filled as tokens are first seen. At most one entry per id of the vocabulary. special: ids of
    tokens that are no text. drops_first_space: whether a text has no space where its first token has one.

    How the decoder writes a byte is found by asking it: GPT-2's alphabet of printable stand-ins, or
    SentencePiece's "▁" for a space and "<0x..>" for a byte.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__()
        self._backend = vocabulary.backend
        added = self._backend.get_added_tokens_decoder()
        self.special = frozenset(token_id for token_id, token in added.items() if token.special)
        decoder = self._backend.decoder
        self.drops_first_space = decoder is not None and decoder.decode(["▁a"]) == "a"
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
