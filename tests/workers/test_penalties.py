"""Penalties and biases: the same answer on two workers, on one, from any token on, and as one of several choices."""

import pytest

from service.orders import Choice
from tests.fakes.hash_model import golden
from tests.simulation import oracle
from tests.workers.conftest import Bench

PROMPT = (5, 9, 5, 2, 61, 33, 9)
COUNT = 40
SEEDS = (11, 22, 33)
ASKED = {
    "presence_penalty": 1.4,
    "frequency_penalty": 1.2,
    "repetition_penalty": 1.7,
    "logit_bias": ((3, 2.0), (40, 3.4), (96, -100.0)),
}


def right(seed, temperature, **asked):
    """By the formulas, without any engine."""
    penalties = oracle.Penalties(
        presence=asked["presence_penalty"],
        frequency=asked["frequency_penalty"],
        repetition=asked["repetition_penalty"],
        biases=asked["logit_bias"],
    )
    ends = {"max_tokens": COUNT, "min_tokens": 0, "stop": frozenset()}
    how = {"temperature": temperature, "top_p": 1.0, "top_k": 0, "seed": seed}
    return list(oracle.answer(PROMPT, **ends, **how, penalties=penalties).tokens)


@pytest.mark.parametrize("way", [Bench.split, Bench.alone])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("emitted", [0, 1, 2, 5, 38])
def test_an_answer_is_the_right_one_from_wherever_it_is_gone_on_with(
    bench, order_of, way, temperature, emitted
):
    expected = right(SEEDS[0], temperature, **ASKED)
    order = order_of(
        prompt=(*PROMPT, *expected[:emitted]),
        prompt_tokens=len(PROMPT),
        max_tokens=COUNT,
        temperature=temperature,
        choices=(Choice(index=0, seed=SEEDS[0]),),
        **ASKED,
    )
    way(bench, order)
    bench.settle()
    assert bench.token_ids() == expected[emitted:]


@pytest.mark.parametrize("way", [Bench.split, Bench.alone])
def test_each_of_three_choices_is_what_its_seed_gives_alone(bench, order_of, way):
    choices = tuple(Choice(index=number, seed=seed) for number, seed in enumerate(SEEDS))
    way(bench, order_of(prompt=PROMPT, max_tokens=COUNT, temperature=1.0, choices=choices, **ASKED))
    bench.settle()
    answers = [bench.token_ids(number) for number in range(3)]
    assert answers == [right(seed, 1.0, **ASKED) for seed in SEEDS]
    assert len(set(map(tuple, answers))) == 3


@pytest.mark.parametrize("asked", ASKED)
def test_every_one_of_them_is_heeded(bench, order_of, asked):
    only = {**OFF, asked: ASKED[asked]}
    bench.split(order_of(prompt=PROMPT, max_tokens=COUNT, **only))
    bench.settle()
    assert bench.token_ids() == right(0, 0.0, **only)
    assert bench.token_ids() != golden(PROMPT, COUNT)


OFF = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "logit_bias": ()}
