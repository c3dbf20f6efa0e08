"""What an answer must be, computed without engine, cache, block or worker: the model and the sampler alone."""

from dataclasses import dataclass

import torch

from engine.sampling import Sampler, SampleRow
from engine.sequence import SamplingParams
from tests.fakes.hash_model import POSITION_BYTES, START, logits_for, next_token, position_kv


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
    )


def answer(prompt, *, max_tokens, min_tokens, stop, temperature, top_p, top_k, seed):
    params = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
    tokens, kv, before = list(prompt), bytearray(), START
    while True:
        for position in range(len(kv) // POSITION_BYTES, len(tokens)):
            before = position_kv(before, tokens[position], position)
            kv += before
        generated = len(tokens) - len(prompt)
        banned = stop if generated < min_tokens else frozenset()
        token = _sample(next_token(bytes(kv)), params, len(tokens), banned)
        tokens.append(token)
        generated += 1
        if token in stop and generated > min_tokens:
            return Answer(tuple(tokens[len(prompt) :]), "stop", bytes(kv))
        if generated == max_tokens:
            return Answer(tuple(tokens[len(prompt) :]), "length", bytes(kv))


def _sample(first_choice, params, position, banned):
    if params.temperature == 0 and first_choice not in banned:
        return first_choice
    row = SampleRow(params=params, position=position, banned=banned)
    return Sampler().sample(torch.from_numpy(logits_for([first_choice])), [row])[0].token
