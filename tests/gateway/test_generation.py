"""Deltas of one answer from a scripted source of tokens."""

import asyncio
from contextlib import aclosing

import pytest

from crossdock.seeds import choice_seed
from crossdock.v1 import inference_pb2
from gateway.generation import EndOfSequence, Finish, StopString, StopToken, generate
from gateway.request import EndReason, Token, TokenBatch
from service.errors import InternalFault, Unavailable


@pytest.fixture
def ask(frontend_over, scripted):
    async def ask(text="The capital of France is", **fields):
        spec = inference_pb2.GenerationSpec(text=text, **fields)
        frontend = frontend_over(scripted())
        with frontend.hold("") as held:
            return await frontend.accept(spec, None, held=held)

    return ask


async def collect(request, source, tokenizer):
    async with aclosing(generate(request, source, tokenizer)) as deltas:
        return [delta async for delta in deltas]


def stopping(*strings, **fields):
    return inference_pb2.StopConditions(strings=strings, **fields)


async def test_golden_answers_come_out_as_their_text(ask, batches, scripted, tokenizer, golden):
    request = await ask(output=inference_pb2.OutputOptions(include_special_tokens=True))
    for case in golden:
        ended = case["output_ids"][-1] == 2
        end = EndReason.STOP if ended else EndReason.LENGTH
        source = scripted(*batches(case["output_ids"], end=end))
        deltas = await collect(request, source, tokenizer)
        text = "".join(delta.text for delta in deltas)
        assert text == (case["output_text"].removesuffix("<|im_end|>") if ended else case["output_text"])
        assert [token.token_id for delta in deltas for token in delta.tokens] == case["output_ids"]


@pytest.mark.parametrize("size", [1, 2, 3, 7])
async def test_positions_are_consecutive_whatever_the_batches(ask, batches, scripted, tokenizer, size):
    source = scripted(*batches(tokenizer.encode(" one two three four five"), size=size))
    position = 0
    for delta in await collect(await ask(), source, tokenizer):
        assert delta.first_position == position
        position += len(delta.tokens)
    assert position == 5


async def test_an_end_of_sequence_is_named_and_not_shown(ask, batches, scripted, tokenizer):
    ids = [*tokenizer.encode(" Paris"), 2]
    deltas = await collect(await ask(), scripted(*batches(ids, end=EndReason.STOP)), tokenizer)
    assert "".join(delta.text for delta in deltas) == " Paris"
    assert deltas[-1].finish == Finish(reason=EndReason.STOP, matched=EndOfSequence(token_id=2))
    assert deltas[-1].tokens[-1].token_id == 2


@pytest.mark.parametrize(("include", "text"), [(False, " Paris"), (True, " Paris.")])
async def test_a_stop_token_is_shown_only_when_asked_for(ask, batches, scripted, tokenizer, include, text):
    ids = tokenizer.encode(" Paris.")
    request = await ask(stop=stopping(token_ids=[ids[-1]], include_stop_string=include))
    deltas = await collect(request, scripted(*batches(ids, end=EndReason.STOP)), tokenizer)
    assert "".join(delta.text for delta in deltas) == text
    assert deltas[-1].finish == Finish(reason=EndReason.STOP, matched=StopToken(token_id=ids[-1]))


async def test_the_length_limit_is_named(ask, batches, scripted, tokenizer):
    deltas = await collect(await ask(), scripted(*batches(tokenizer.encode(" a b"))), tokenizer)
    assert [delta.finish for delta in deltas] == [None, Finish(reason=EndReason.LENGTH, matched=None)]


async def test_a_stop_string_closes_the_source_before_the_last_delta(ask, batches, scripted, tokenizer):
    ids = tokenizer.encode(" one two three four")
    source = scripted(*batches(ids, end=None), asyncio.Event())
    request = await ask(stop=stopping("two"))
    async with aclosing(generate(request, source, tokenizer)) as deltas:
        async for delta in deltas:
            if delta.finish is not None:
                assert source.closed.is_set()
                break
    assert delta.finish == Finish(reason=EndReason.STOP, matched=StopString(text="two"))


@pytest.mark.parametrize(("include", "text"), [(False, " one "), (True, " one two")])
async def test_tokens_behind_a_stop_string_are_dropped(ask, batches, scripted, tokenizer, include, text):
    source = scripted(*batches(tokenizer.encode(" one two three four"), size=4))
    request = await ask(stop=stopping("two", include_stop_string=include))
    (delta,) = await collect(request, source, tokenizer)
    assert delta.text == text and len(delta.tokens) == 2


async def test_held_back_text_is_shown_at_the_end(ask, batches, scripted, tokenizer):
    source = scripted(*batches([*tokenizer.encode(" one"), 2], end=EndReason.STOP))
    deltas = await collect(await ask(stop=stopping("one two")), source, tokenizer)
    assert [delta.text for delta in deltas] == [" ", "one"]


async def test_tokens_are_told_as_they_come_also_those_whose_text_is_held_back(
    ask, batches, scripted, tokenizer
):
    """Those of the stop string too: a client counts and compares tokens, and shows the text."""
    ids = tokenizer.encode(" one two three four")
    request = await ask(stop=stopping(" two three"))
    deltas = await collect(request, scripted(*batches(ids)), tokenizer)
    assert [delta.text for delta in deltas] == [" one", "", ""]
    assert [[token.token_id for token in delta.tokens] for delta in deltas] == [[each] for each in ids[:3]]


async def test_the_first_tokens_are_safe_from_stop_strings(ask, batches, scripted, tokenizer):
    source = scripted(*batches(tokenizer.encode(" one two two")))
    request = await ask(stop=stopping("two"), sampling=inference_pb2.SamplingParams(min_tokens=2))
    deltas = await collect(request, source, tokenizer)
    assert "".join(delta.text for delta in deltas) == " one two "


async def test_cached_tokens_are_known_from_the_first_delta_on(ask, batches, scripted, tokenizer):
    first, second = batches(tokenizer.encode(" a b"), cached_tokens=3)
    source = scripted(first, TokenBatch(tokens=second.tokens, end=second.end))
    assert [delta.cached_tokens for delta in await collect(await ask(), source, tokenizer)] == [3, 3]


async def test_an_error_of_the_source_is_passed_on(ask, batches, scripted, tokenizer):
    source = scripted(*batches([500], end=None), Unavailable("gone"))
    with pytest.raises(Unavailable, match="gone"):
        await collect(await ask(), source, tokenizer)


async def test_a_source_that_just_stops_is_a_fault(ask, batches, scripted, tokenizer):
    with pytest.raises(InternalFault):
        await collect(await ask(), scripted(*batches([500], end=None)), tokenizer)


async def test_a_gap_in_the_positions_is_our_mistake(ask, batches, scripted, tokenizer):
    source = scripted(*batches([500], end=None), *batches([501], first=2))
    with pytest.raises(AssertionError, match="consecutive"):
        await collect(await ask(), source, tokenizer)


async def test_closing_the_generation_closes_the_source(ask, batches, scripted, tokenizer):
    source = scripted(*batches([500], end=None), asyncio.Event())
    deltas = generate(await ask(), source, tokenizer)
    await anext(deltas)
    assert not source.closed.is_set()
    await deltas.aclose()
    assert source.closed.is_set()


def of_choice(batches, choice):
    return [batch._replace(choice=choice) for batch in batches]


def woven(*answers):
    """The batches of several choices, in turn."""
    return [batch for step in zip(*answers, strict=True) for batch in step]


async def test_each_choice_has_its_own_text_positions_and_end(ask, batches, scripted, tokenizer):
    texts = (" one two", " three four")
    answers = [of_choice(batches(tokenizer.encode(text)), n) for n, text in enumerate(texts)]
    request = await ask(sampling=inference_pb2.SamplingParams(n=2, seed=3))
    deltas = await collect(request, scripted(*woven(*answers)), tokenizer)
    for choice, text in enumerate(texts):
        mine = [delta for delta in deltas if delta.choice == choice]
        assert "".join(delta.text for delta in mine) == text
        assert [delta.first_position for delta in mine] == [0, 1]
        assert [delta.finish is None for delta in mine] == [True, False]
        assert {delta.seed for delta in mine} == {choice_seed(3, choice)}


async def test_a_stop_string_ends_its_choice_and_the_others_go_on(ask, batches, scripted, tokenizer):
    stopped = of_choice(batches(tokenizer.encode(" one two two"), end=None), 0)
    others = of_choice(batches(tokenizer.encode(" a b c")), 1)
    source = scripted(*woven(stopped, others))
    request = await ask(stop=stopping("two"), sampling=inference_pb2.SamplingParams(n=2))
    deltas = await collect(request, source, tokenizer)
    ends = {delta.choice: delta.finish for delta in deltas if delta.finish}
    assert ends == {
        0: Finish(reason=EndReason.STOP, matched=StopString(text="two")),
        1: Finish(reason=EndReason.LENGTH, matched=None),
    }
    assert source.unread == {0, 1}
    assert len([delta for delta in deltas if delta.choice == 0]) == 2, "what came behind it is not shown"


async def test_the_best_of_more_are_those_with_the_highest_sum_of_logprobs(ask, scripted, tokenizer):
    """Shown whole, the best first, under new numbers; of two equals the earlier one."""

    def answer(choice, *logprobs):
        tokens = tuple(
            Token(position=n, token_id=500 + choice, logprob=value, top=())
            for n, value in enumerate(logprobs)
        )
        return TokenBatch(tokens=tokens, end=EndReason.LENGTH, choice=choice)

    request = await ask(sampling=inference_pb2.SamplingParams(n=2, best_of=4, seed=9))
    source = scripted(answer(0, -3.0), answer(2, -1.0), answer(1, -0.4, -0.5), answer(3, -0.1, -0.9))
    deltas = await collect(request, source, tokenizer)
    assert [(delta.choice, delta.tokens[0].token_id) for delta in deltas] == [(0, 501), (1, 502)]
    assert [delta.seed for delta in deltas] == [choice_seed(9, 1), choice_seed(9, 2)]
    assert [delta.unseen_tokens for delta in deltas] == [0, 3]
    assert request.needed_logprobs() == 0 and request.sampling.logprobs is None
