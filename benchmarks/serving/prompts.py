"""Prompts of an exact number of tokens, new in each run: no server has them cached. No two begin alike.

They are made of words that are one token each: as token ids where the server has a /tokenize route, as text where a
tokenizer file is given.
"""

import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeAlias

Prompt: TypeAlias = str | list[int]
WORDS_MIN = 48

_COMMON = (
    "about above action after again age air all along also always animal answer any area art ask away "
    "back base bed been before begin being best better big bird black blue board boat body book both box "
    "boy bring brother brown building built business call came can car care carry case cause center "
    "certain change child children city class clear close cold color come common company complete could "
    "country course cut dark day deep did door down draw drive dry during each early earth east easy eat "
    "end enough even ever every example eye face fact fall family far fast father feel feet few field "
    "final find fine fire first fish five follow food foot force form found four free friend "
)
WORDS = tuple(_COMMON.split())


class Prompts(Protocol):
    """dice: decides which."""

    def make(self, tokens: int, dice: random.Random) -> Prompt: ...


class IdPrompts:
    """ids: of words."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids = _enough(list(ids))

    def make(self, tokens: int, dice: random.Random) -> Prompt:
        return dice.choices(self._ids, k=tokens)


class TextPrompts:
    """count: tokens of a text, without special ones."""

    def __init__(self, count: Callable[[str], int]) -> None:
        self._count = count
        self._words = _enough([f" {word}" for word in WORDS if count(f" {word}") == 1])

    def make(self, tokens: int, dice: random.Random) -> Prompt:
        text = "".join(dice.choices(self._words, k=tokens))
        assert self._count(text) == tokens, "words that stand side by side are other tokens"
        return text


def from_tokenizer(path: str) -> TextPrompts:
    """path: of a tokenizer.json."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(path)
    return TextPrompts(lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids))


async def from_server(tokenize: Callable[[str], Awaitable[list[int]]]) -> IdPrompts:
    """tokenize: asks the server."""
    split = [await tokenize(f" {word}") for word in WORDS]
    return IdPrompts([ids[0] for ids in split if len(ids) == 1])


def _enough(found: list[int] | list[str]) -> list:  # type: ignore[type-arg]
    if len(found) < WORDS_MIN:
        raise SystemExit(f"only {len(found)} of {len(WORDS)} words are one token here")
    return found
