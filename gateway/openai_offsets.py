"""Where tokens begin in the text of a choice, as its logprobs say.

`openai_answers` asks for each token it tells of. Counts characters of what is shown; knows no stop strings: where one
has cut the text off, a token's place is where it would stand.
"""

import codecs
from collections.abc import Iterable, Sequence
from itertools import accumulate

from gateway.request import Request
from gateway.text import PROMPT_TAIL_TOKENS
from gateway.tokenizer import Tokenizer

_AHEAD_BYTES_MAX = 16
"""So far a token is looked for in a text that goes on otherwise: what reads texts may normalise them, and drop what it
has no token for."""


class Offsets:
    """A fold over pieces as they are shown. A token that is part of a character begins where the character does, one
    that is not shown where the next one does.

    characters: in front of the first piece. before: pieces whose last character the first one may complete.
    """

    def __init__(self, characters: int = 0, before: Iterable[bytes] = ()) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        for piece in before:
            self._utf8.decode(piece)
        self._characters = characters

    def of(self, pieces: Iterable[bytes]) -> list[int]:
        """In characters, of each of the next pieces."""
        return [self._next(piece) for piece in pieces]

    def _next(self, piece: bytes) -> int:
        before = self._characters
        self._characters += len(self._utf8.decode(piece))
        try:
            return self._characters - len(piece.decode("utf-8"))
        except UnicodeDecodeError:
            return before


def shown_pieces(token_ids: Sequence[int], request: Request, tokenizer: Tokenizer) -> list[bytes]:
    """What each token adds to a text of this request's."""
    special = request.include_special_tokens
    return [tokenizer.piece(token_id, include_special=special) for token_id in token_ids]


def answer_offsets(request: Request, tokenizer: Tokenizer, characters: int) -> Offsets:
    """Of the answer's tokens, in front of which the choice shows so many characters."""
    return Offsets(
        characters, shown_pieces(request.prompt_token_ids[-PROMPT_TAIL_TOKENS:], request, tokenizer)
    )


def offsets_in(text: str, token_ids: Sequence[int], tokenizer: Tokenizer) -> list[int]:
    """Of the tokens that a text became, in the text as it was given: with the special tokens that it has, and without
    spaces that only tokens have. A token that is not there begins where the next one may."""
    given = text.encode()
    characters = [*accumulate(byte & 0xC0 != 0x80 for byte in given), len(text) + 1]
    offsets: list[int] = []
    at, first = 0, tokenizer.drops_first_space
    for token_id in token_ids:
        plain, whole = tokenizer.piece(token_id), tokenizer.piece(token_id, include_special=True)
        bare = whole.removeprefix(b" ")
        start, end = _place(
            given, at, (bare, whole) if first else (whole, bare), _AHEAD_BYTES_MAX if plain else 0
        )
        offsets.append(characters[start] - 1)
        at, first = end, first and not plain
    return offsets


def _place(given: bytes, at: int, pieces: tuple[bytes, bytes], ahead: int) -> tuple[int, int]:
    """Where one of the pieces begins and ends: here, or else a little ahead; both `at` where none is."""
    for reach in (0, ahead):
        for piece in pieces:
            if (start := given.find(piece, at, at + reach + len(piece))) >= 0:
                return start, start + len(piece)
    return at, at
