"""What an answer must be, computed without engine, cache, block or worker: the model and the sampler alone."""

from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch

from decode_worker.beam_search import BeamSearch
from engine.distribution import PlainSampling
from engine.sampling import Candidate, Sampled
from engine.sequence import SamplingParams, StopRules
from tests.fakes.hash_model import POSITION_BYTES, START, logits_for, next_token, position_kv
from tests.fakes.sampled_rows import SampleRow, sample


@dataclass(frozen=True, kw_only=True)
class Penalties:
    """As in engine.sequence.SamplingParams."""

    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    biases: tuple[tuple[int, float], ...] = ()


NO_PENALTIES = Penalties()


@dataclass(frozen=True)
class Answer:
    """tokens and end: of the complete answer. kv: of prompt and answer, position by position, without the last."""

    tokens: tuple[int, ...]
    end: str
    kv: bytes


def answer_to(wish):
    """What a client that wishes this must be told."""
    return answer(
        wish.prompt,
        max_tokens=wish.max_tokens,
        min_tokens=wish.min_tokens,
        stop=wish.stop,
        temperature=wish.temperature,
        top_p=wish.top_p,
        top_k=wish.top_k,
        seed=wish.seed,
        penalties=wish.penalties,
    )


def answer(prompt, *, max_tokens, min_tokens, stop, temperature, top_p, top_k, seed, penalties=NO_PENALTIES):
    params = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
    tokens, kv, before = list(prompt), bytearray(), START
    while True:
        for position in range(len(kv) // POSITION_BYTES, len(tokens)):
            before = position_kv(before, tokens[position], position)
            kv += before
        generated = len(tokens) - len(prompt)
        banned = stop if generated < min_tokens else frozenset()
        logits = _penalised(next_token(bytes(kv)), tokens, len(prompt), penalties)
        row = SampleRow(params=params, position=len(tokens), banned=banned)
        token = sample(torch.from_numpy(logits), [row])[0].token
        tokens.append(token)
        generated += 1
        if token in stop and generated > min_tokens:
            return Answer(tuple(tokens[len(prompt) :]), "stop", bytes(kv))
        if generated == max_tokens:
            return Answer(tuple(tokens[len(prompt) :]), "length", bytes(kv))


def searched(prompt, beam, count, *, max_tokens, min_tokens, stop, penalties=NO_PENALTIES):
    """The answers of a beam search, the best first, every hypothesis computed from its first token."""
    rules = StopRules(
        length_limit=len(prompt) + max_tokens, min_length=len(prompt) + min_tokens, stop_token_ids=stop
    )
    search = BeamSearch(beam, rules, len(prompt))
    while search.running:
        runs = [(*prompt, *(step.token for step in each.steps)) for each in search.running]
        search.advance([_likely(run, len(prompt), penalties, search.candidates()) for run in runs])
    return [
        Answer(tuple(step.token for step in each.steps), each.end.name.lower(), _kv(prompt))
        for each in search.best(count)
    ]


def _kv(tokens):
    kv, before = bytearray(), START
    for position, token in enumerate(tokens):
        before = position_kv(before, token, position)
        kv += before
    return bytes(kv)


def _likely(tokens, prompt_tokens, penalties, count):
    """What may come next in a search, the likeliest first: the model's logprobs, penalised as they are."""
    logits = logits_for([next_token(_kv(tokens))])
    (described,) = PlainSampling().describe(logits, [0])
    logprobs = np.subtract(logits, described.log_total, dtype=np.float64)
    own = logprobs[0].tolist()
    scores = _adjusted(logprobs.astype(np.float32), tokens, prompt_tokens, penalties)[0].tolist()
    if penalties == NO_PENALTIES:
        scores = own
    ranked = sorted(range(len(own)), key=lambda token: (-scores[token], token))[:count]
    return Sampled(0, None, (), tuple(Candidate(token, scores[token], own[token]) for token in ranked))


def _penalised(first_choice, tokens, prompt_tokens, penalties):
    """The row of logits [1, vocab], each of them by itself as the formulas say."""
    return _adjusted(logits_for([first_choice]), tokens, prompt_tokens, penalties)


def _adjusted(logits, tokens, prompt_tokens, penalties):
    counts = Counter(tokens[prompt_tokens:])
    if penalties != NO_PENALTIES:
        biases, repeated = dict(penalties.biases), set(tokens)
        for token, logit in enumerate(logits[0].tolist()):
            value = logit + biases.get(token, 0.0)
            if token in repeated:
                value = value / penalties.repetition if value > 0 else value * penalties.repetition
            value -= penalties.frequency * counts[token] + penalties.presence * (counts[token] > 0)
            logits[0, token] = np.float32(value)
    return logits
