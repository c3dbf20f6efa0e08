"""The answer's text as a fold over its tokens: UTF-8 is never cut, a stop string never shows in part.

`generation` pushes tokens and gets the text that has become certain. Held back is only what is an unfinished
UTF-8 sequence or could still become a stop string. It knows no stop tokens, no ends of sequence and no wire.
"""

import codecs
from collections.abc import Sequence
from typing import NamedTuple

from gateway.tokenizer import Tokenizer

# A UTF-8 sequence has at most three bytes before its last, so this many tokens reach back to its start.
PROMPT_TAIL_TOKENS = 8


class TextDelta(NamedTuple):
    """text: became certain now. stop_string: the one that has ended the answer. tokens_used: how many of the
    pushed tokens belong to the answer; fewer than all only when a stop string ended it."""

    text: str
    stop_string: str | None
    tokens_used: int


class TextFold:
    """Texts of all deltas and of finish, joined, are the decoded tokens, up to the stop string.

    prompt_token_ids: what the answer follows; it may complete the prompt's last character.
    min_tokens: so many tokens come before a stop string ends the answer. The stop string whose last character
    comes first wins, whatever the token boundaries; of two that end together, the longer.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        *,
        stop_strings: Sequence[str],
        include_stop_string: bool,
        include_special: bool,
        min_tokens: int,
    ) -> None:
        self._piece = tokenizer.piece
        self._include_special = include_special
        self._stop_strings = tuple(stop_strings)
        self._include_stop_string = include_stop_string
        self._min_tokens = min_tokens
        self._tokens = 0
        self._held = ""
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        for token_id in prompt_token_ids[-PROMPT_TAIL_TOKENS:]:
            self._utf8.decode(self._piece(token_id, include_special=include_special))

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        """Not to be called again after a stop string was found."""
        sure: list[str] = []
        for index, token_id in enumerate(token_ids):
            self._tokens += 1
            new = self._utf8.decode(self._piece(token_id, include_special=self._include_special))
            if not self._stop_strings:
                sure.append(new)
                continue
            text, stop_string = self._take(new)
            sure.append(text)
            if stop_string is not None:
                return TextDelta(text="".join(sure), stop_string=stop_string, tokens_used=index + 1)
        return TextDelta(text="".join(sure), stop_string=None, tokens_used=len(token_ids))

    def finish(self) -> str:
        """What was held back, when no further token comes."""
        if self._tokens == 0:
            return ""
        rest = self._held + self._utf8.decode(b"", final=True)
        self._held = ""
        return rest

    def _take(self, new: str) -> tuple[str, str | None]:
        """The text that is certain now, and the stop string that the new characters complete."""
        text = self._held + new
        if self._tokens > self._min_tokens:
            match = self._first_match(text, known=len(self._held))
            if match is not None:
                start, stop_string = match
                self._held = ""
                self._utf8.reset()
                return text[: start + len(stop_string) * self._include_stop_string], stop_string
        sure = len(text) - self._open_suffix(text)
        self._held = text[sure:]
        return text[:sure], None

    def _first_match(self, text: str, *, known: int) -> tuple[int, str] | None:
        """Start and stop string of the match that ends first, after the characters already known."""
        matches = [
            (start + len(stop_string), start, stop_string)
            for stop_string in self._stop_strings
            if (start := text.find(stop_string, max(0, known - len(stop_string) + 1))) >= 0
        ]
        if not matches:
            return None
        _, start, stop_string = min(matches)
        return start, stop_string

    def _open_suffix(self, text: str) -> int:
        """Characters at the end that could be the beginning of a stop string."""
        return max((_overlap(text, stop_string) for stop_string in self._stop_strings), default=0)


def _overlap(text: str, stop_string: str) -> int:
    """Length of the longest end of the text that is a proper beginning of the stop string."""
    longest = min(len(text), len(stop_string) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop_string[:size])), 0)
