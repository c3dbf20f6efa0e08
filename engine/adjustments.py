"""What is done to a row of logits before a token is drawn from it: biases first, then penalties.

A fold over the known tokens: a sequence keeps the value so far, the sampler applies it. Made of all tokens at once it
is to the bit what it becomes one token after the other, so nobody has to keep it or send it. Knows no sequence, no
temperature and no chance; one more token costs in proportion to the different ones before it.

Order and meaning are vLLM's (`vllm/v1/sample/sampler.py`): logit bias, repetition penalty, frequency penalty, presence
penalty, and temperature and truncation only after them. The repetition penalty is that of transformers'
`RepetitionPenaltyLogitsProcessor`; the other two are the formula of OpenAI's documentation.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Biases: TypeAlias = tuple[tuple[int, float], ...]
"""(token id, what is added to its logit), each id once, in ascending order."""

_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Adjustments:
    """ids: of all tokens whose logits change, int64 [k], ascending. biases: float64 [k]. repeated: whether the token is
    in the prompt or in the answer, bool [k]. counts: how often it is in the answer, int64 [k]. presence, frequency: in
    [-2, 2], 0 is off; they look at the answer alone. repetition: in (0, 2], 1 is off; it looks at the prompt too.
    """

    ids: NDArray[np.int64]
    biases: NDArray[np.float64]
    repeated: NDArray[np.bool_]
    counts: NDArray[np.int64]
    presence: float
    frequency: float
    repetition: float

    def after(self, token: int) -> "Adjustments":
        """With one more token of the answer."""
        if not _penalised(self.presence, self.frequency, self.repetition):
            return self
        place = int(np.searchsorted(self.ids, token))
        known = place < len(self.ids) and self.ids[place] == token
        wider = self if known else self._with(token, place)
        repeated, counts = wider.repeated.copy(), wider.counts.copy()
        repeated[place] = True
        counts[place] += 1
        return replace(wider, repeated=repeated, counts=counts)

    def apply(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """A copy of logits [vocab] with these in it. Computed in float64 and rounded once; what float32 cannot hold
        becomes the largest that it can, and a token that was impossible, at -inf, stays so."""
        given = logits[self.ids]
        values: NDArray[np.float64] = given.astype(np.float64) + self.biases
        with np.errstate(over="ignore"):
            scaled = np.where(values > 0, values / self.repetition, values * self.repetition)
        values = np.where(self.repeated, scaled, values)
        values -= self.frequency * self.counts + self.presence * (self.counts > 0)
        values = values.clip(-_LARGEST, _LARGEST)
        values[np.isneginf(given)] = -np.inf
        adjusted = logits.copy()
        adjusted[self.ids] = values
        return adjusted

    def _with(self, token: int, place: int) -> "Adjustments":
        """With a token of which nothing is known yet."""
        return replace(
            self,
            ids=np.insert(self.ids, place, token),
            biases=np.insert(self.biases, place, 0.0),
            repeated=np.insert(self.repeated, place, False),
            counts=np.insert(self.counts, place, 0),
        )


def adjustments_of(
    tokens: Sequence[int],
    prompt_tokens: int,
    *,
    presence: float,
    frequency: float,
    repetition: float,
    biases: Biases,
) -> Adjustments | None:
    """After these tokens, of which the first so many are the prompt; the others are the answer. None where nothing is
    asked for. At most one bias per id."""
    penalised = _penalised(presence, frequency, repetition)
    if not penalised and not biases:
        return None
    assert 1 <= prompt_tokens <= len(tokens), f"a prompt of {prompt_tokens} of {len(tokens)} tokens"
    biased = np.array([token for token, _ in biases], np.int64)
    prompt = np.array(tokens[:prompt_tokens] if repetition != 1.0 else [], np.int64)
    answer = np.array(tokens[prompt_tokens:] if penalised else [], np.int64)
    ids = np.unique(np.concatenate((biased, prompt, answer)))
    values = np.zeros(len(ids))
    values[np.searchsorted(ids, biased)] = [bias for _, bias in biases]
    counts = np.bincount(np.searchsorted(ids, answer), minlength=len(ids)).astype(np.int64)
    return Adjustments(
        ids=ids,
        biases=values,
        repeated=np.isin(ids, prompt) | (counts > 0),
        counts=counts,
        presence=presence,
        frequency=frequency,
        repetition=repetition,
    )


def _penalised(presence: float, frequency: float, repetition: float) -> bool:
    """Whether it matters which tokens there are."""
    return presence != 0.0 or frequency != 0.0 or repetition != 1.0
