"""A constraint over the tokens of the hash model, without a compiler: what it allows depends on every token so far."""

import numpy as np

from tests.fakes.hash_model import VOCAB

END = VOCAB - 1


def mask_of(*tokens, vocab=VOCAB):
    mask = np.zeros((vocab + 31) // 32, np.uint32)
    for token in tokens:
        mask[token // 32] |= np.uint32(1 << token % 32)
    return mask


class Odd:
    """After tokens whose sum is s: those that differ from s by an odd number. END alone after `length` tokens, and
    nothing after `dead_end` of them."""

    ends = frozenset({END})

    def __init__(self, length=1000, dead_end=1000, tokens=()):
        self.length, self.dead_end = length, dead_end
        self.tokens = list(tokens)

    def allowed(self):
        return mask_of(*self._allowed())

    def advance(self, token):
        if token not in self._allowed():
            self.dead_end = 0
        self.tokens.append(token)

    def fork(self):
        return Odd(self.length, self.dead_end, self.tokens)

    def _allowed(self):
        if len(self.tokens) >= self.dead_end:
            return []
        if len(self.tokens) >= self.length:
            return [END]
        return [token for token in range(END) if (token - sum(self.tokens)) % 2]


def follows(tokens):
    """Whether such a constraint allows this run of tokens."""
    return all((token - sum(tokens[:place])) % 2 for place, token in enumerate(tokens) if token != END)
