"""What is accepted and what is refused, field by field."""

import math
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial

import pytest

from crossdock.v1 import inference_pb2
from gateway.request import ModelCard, Sampling
from gateway.tokenizer import Tokenizer
from gateway.validation import accept
from service.errors import DeadlineExpired, InvalidRequest, ModelNotFound
from service.orders import Beam

VOCAB, LENGTH = 49152, 512
SMALLEST = 5e-324


def spec(**fields):
    return inference_pb2.GenerationSpec(**{"text": "The capital of France is", **fields})


def sampling(**fields):
    return spec(sampling=inference_pb2.SamplingParams(**fields))


def stop(**fields):
    return spec(stop=inference_pb2.StopConditions(**fields))


def ids(values):
    return inference_pb2.GenerationSpec(token_ids=inference_pb2.TokenIds(ids=values))


def chat(*messages):
    given = [inference_pb2.ChatMessage(role=role, content=content) for role, content in messages]
    return inference_pb2.GenerationSpec(chat=inference_pb2.ChatPrompt(messages=given))


@pytest.fixture
def take(card, tokenizer):
    def take(asked, *, card=card, tokenizer=tokenizer, time_left_s=None, streamed=False, sharing=1):
        return accept(
            asked,
            card,
            tokenizer,
            new_id=lambda: "made",
            new_seed=lambda: 7,
            now=100.0,
            today=datetime(2030, 1, 2, tzinfo=UTC),
            time_left_s=time_left_s,
            streamed=streamed,
            sharing=sharing,
        )

    return take


def refused(take, asked, **given) -> dict[str, str]:
    with pytest.raises(InvalidRequest) as caught:
        take(asked, **given)
    return {violation.field: violation.description for violation in caught.value.violations}


def test_absent_fields_take_their_defaults(take):
    request = take(spec())
    assert request.id == "made" and request.model == "smol"
    assert request.prompt_token_ids == (504, 3575, 282, 4649, 314)
    assert request.sampling == Sampling(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, seed=7, logprobs=None)
    assert request.stop.max_tokens == LENGTH - 5
    assert request.stop.token_ids == {2} and request.stop.min_tokens == 0
    assert request.deadline is None


def test_given_fields_are_taken_as_they_are(take):
    request = take(
        spec(
            model="smol",
            request_id="mine",
            sampling=inference_pb2.SamplingParams(
                temperature=0, top_p=0.5, top_k=3, min_p=0.1, seed=-(2**63), max_tokens=9, min_tokens=9, n=1
            ),
            stop=inference_pb2.StopConditions(
                strings=["a", "b"], token_ids=[5], ignore_eos=True, include_stop_string=True
            ),
            output=inference_pb2.OutputOptions(logprobs=0, include_special_tokens=True),
        ),
        time_left_s=2.5,
    )
    assert request.id == "mine" and request.deadline == 102.5 and request.include_special_tokens
    assert request.sampling == Sampling(
        temperature=0.0, top_p=0.5, top_k=3, min_p=0.1, seed=-(2**63), logprobs=0
    )
    assert (request.stop.max_tokens, request.stop.min_tokens, request.stop.token_ids) == (9, 9, {5})
    assert request.stop.strings == ("a", "b") and request.stop.include_string


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("temperature", [0, SMALLEST, 2], [-SMALLEST, 2.0000001, math.nan, math.inf, -math.inf]),
        ("top_p", [SMALLEST, 1], [0, -0.0, 1.0000001, -1, math.nan, math.inf]),
        ("min_p", [0, 1], [-SMALLEST, 1.0000001, math.nan, math.inf]),
        ("top_k", [0, 1, VOCAB], [-1, VOCAB + 1, 2**31 - 1, -(2**31)]),
        ("max_tokens", [1, LENGTH - 5], [0, -1, LENGTH + 1, 2**31 - 1, -(2**31)]),
        ("min_tokens", [0, 1, LENGTH - 5], [-1, LENGTH + 1, 2**31 - 1, -(2**31)]),
        ("n", [1, 2, 16], [0, -1, 17, 2**31 - 1]),
        ("best_of", [1, 2, 16], [0, -1, 17, 2**31 - 1]),
        ("beam_width", [2, 16], [0, 1, -1, 17, 2**31 - 1]),
        ("seed", [0, -1, 2**63 - 1, -(2**63)], []),
        ("presence_penalty", [-2, 0, 2], [-2.0000001, 2.0000001, math.nan, math.inf, -math.inf]),
        ("frequency_penalty", [-2, 0, 2], [-2.0000001, 2.0000001, math.nan, math.inf, -math.inf]),
        ("repetition_penalty", [SMALLEST, 1, 2], [0, -0.0, -1, 2.0000001, math.nan, math.inf]),
        (
            "logit_bias",
            [{}, {0: -100, VOCAB - 1: 100}, dict.fromkeys(range(300), 1)],
            [
                {VOCAB: 1},
                {2**32 - 1: 1},
                dict.fromkeys(range(301), 1),
                *({5: bad} for bad in (-100.1, 100.1, math.nan, math.inf, -math.inf, 1e300)),
            ],
        ),
    ],
)
def test_numbers_are_held_to_their_range(take, field, good, bad):
    for value in good:
        take(sampling(**{field: value}))
    for value in bad:
        assert list(refused(take, sampling(**{field: value}))) == [f"sampling.{field}"], value


@pytest.mark.parametrize(("value", "fine"), [(0, True), (20, True), (-1, False), (21, False), (VOCAB, False)])
def test_logprobs_are_bounded(take, value, fine):
    asked = spec(output=inference_pb2.OutputOptions(logprobs=value))
    if fine:
        assert take(asked).sampling.logprobs == value
    else:
        assert refused(take, asked) == {"output.logprobs": "must be in [0, 20]"}


@pytest.mark.parametrize(
    ("value", "fine"), [(0, True), (-100, True), (100, True), (-101, False), (2**31 - 1, False)]
)
def test_a_priority_is_bounded_so_that_nobody_waits_for_ever(take, value, fine):
    asked = spec(priority=value)
    if fine:
        assert take(asked).priority == value
    else:
        assert refused(take, asked) == {"priority": "must be in [-100, 100]"}


def test_what_is_not_said_of_several_answers_is_one_of_them_that_is_shown(take):
    assert [(each.n, each.best_of, each.beam) for each in (take(spec()), take(sampling(n=3)))] == [
        (1, 1, None),
        (3, 3, None),
    ]
    assert take(sampling(n=3, best_of=5)).best_of == 5
    assert take(sampling(beam_width=4, n=2)).beam == Beam(width=4, length_penalty=1.0, early_stopping=False)
    asked = sampling(beam_width=4, length_penalty=-0.5, early_stopping=True, temperature=0, top_p=1)
    asked.sampling.MergeFrom(inference_pb2.SamplingParams(presence_penalty=0.5, logit_bias={5: 1}))
    taken = take(asked)
    assert taken.beam == Beam(width=4, length_penalty=-0.5, early_stopping=True)
    assert (taken.sampling.presence_penalty, taken.sampling.logit_bias) == (0.5, ((5, 1.0),))


@pytest.mark.parametrize(
    ("fields", "broken"),
    [
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"n": 3, "beam_width": 2}, "n"),
        ({"beam_width": 2, "temperature": 0.5}, "temperature"),
        ({"beam_width": 2, "top_p": 0.5}, "top_p"),
        ({"beam_width": 2, "top_k": 5}, "top_k"),
        ({"beam_width": 2, "min_p": 0.5}, "min_p"),
        ({"beam_width": 2, "best_of": 2}, "best_of"),
        ({"beam_width": 2, "length_penalty": 11}, "length_penalty"),
        ({"beam_width": 2, "length_penalty": math.nan}, "length_penalty"),
        ({"length_penalty": 1}, "length_penalty"),
        ({"early_stopping": False}, "early_stopping"),
    ],
)
def test_wishes_for_several_answers_that_do_not_go_together_are_named(take, fields, broken):
    assert list(refused(take, sampling(**fields))) == [f"sampling.{broken}"]


def test_biases_are_taken_in_order_of_id_and_what_is_wrong_with_them_is_said(take):
    asked = {"presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.5}
    taken = take(sampling(**asked, logit_bias={9: 1.5, 5: -1})).sampling
    assert {name: getattr(taken, name) for name in asked} == asked
    assert taken.logit_bias == ((5, -1.0), (9, 1.5))
    for biases, rule in (
        (dict.fromkeys(range(301), 1), "at most 300 tokens"),
        ({VOCAB: 1}, f"each key must be in [0, {VOCAB})"),
        ({5: 101}, "each value must be in [-100, 100]"),
    ):
        assert refused(take, sampling(logit_bias=biases)) == {"sampling.logit_bias": rule}


def test_a_search_knows_no_stop_strings(take):
    asked = sampling(beam_width=2)
    asked.stop.strings.append("x")
    assert refused(take, asked) == {"stop.strings": "not with beam search"}


def test_the_best_of_more_cannot_be_streamed(take):
    assert take(sampling(n=2, best_of=2), streamed=True).best_of == 2
    assert list(refused(take, sampling(n=2, best_of=3), streamed=True)) == ["sampling.best_of"]


@pytest.mark.parametrize(
    ("asked", "fields"),
    [
        (stop(strings=["x"] * 16), []),
        (stop(strings=["x"] * 17), ["stop.strings"]),
        (stop(strings=["x"] * 10_000), ["stop.strings"]),
        (stop(strings=["é" * 128]), []),
        (stop(strings=["é" * 128 + "x"]), ["stop.strings[0]"]),
        (stop(strings=["a", ""]), ["stop.strings[1]"]),
        (stop(strings=["x" * 1_000_000]), ["stop.strings[0]"]),
        (stop(token_ids=[VOCAB - 1] * 64), []),
        (stop(token_ids=[1] * 65), ["stop.token_ids"]),
        (stop(token_ids=[VOCAB]), ["stop.token_ids"]),
        (stop(token_ids=[2**32 - 1]), ["stop.token_ids"]),
        (spec(request_id="x" * 128), []),
        (spec(request_id="x" * 129), ["request_id"]),
        (spec(request_id="a\nb"), ["request_id"]),
        (spec(request_id="é"), ["request_id"]),
        (spec(model="x" * 257), ["model"]),
        (ids([0, VOCAB - 1]), []),
        (ids([VOCAB]), ["token_ids.ids"]),
        (ids([2**31 - 1]), ["token_ids.ids"]),
        (ids([]), ["token_ids.ids"]),
        (inference_pb2.GenerationSpec(), ["prompt"]),
        (spec(text=""), ["text"]),
        (chat(), ["chat.messages"]),
        (
            chat(("user", "hi"), ("", "x"), ("r" * 65, "x")),
            ["chat.messages[1].role", "chat.messages[2].role"],
        ),
    ],
)
def test_lists_texts_and_prompts_are_held_to_their_limits(take, asked, fields):
    if fields:
        assert list(refused(take, asked)) == fields
    else:
        take(asked)


def test_every_broken_rule_is_named_at_once(take):
    asked = inference_pb2.GenerationSpec(
        token_ids=inference_pb2.TokenIds(ids=[VOCAB]),
        sampling=inference_pb2.SamplingParams(temperature=3, top_p=math.nan, n=17),
        stop=inference_pb2.StopConditions(strings=[""]),
        output=inference_pb2.OutputOptions(logprobs=99),
        request_id="\x07",
    )
    assert set(refused(take, asked)) == {
        "token_ids.ids",
        "sampling.temperature",
        "sampling.top_p",
        "sampling.n",
        "stop.strings[0]",
        "output.logprobs",
        "request_id",
    }


def test_refusals_name_fields_and_limits_and_never_contents(take):
    secret = "s3cret"
    asked = spec(text=secret * 10_000, request_id=secret * 100, model="smol")
    asked.stop.strings.extend([secret * 100])
    assert secret not in str(refused(take, asked))


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        (ids([1] * LENGTH), "token_ids.ids"),
        (ids([1] * (LENGTH + 1)), "token_ids.ids"),
        (spec(text="a b c d" * LENGTH), "text"),
        (spec(text="a" * (16 * LENGTH + 1)), "text"),
        (chat(("user", "a" * 16 * LENGTH)), "chat.messages"),
        (chat(("user", "a b c d" * LENGTH)), "chat.messages"),
        (chat(*[("user", "")] * (LENGTH + 1)), "chat.messages"),
        (sampling(max_tokens=LENGTH - 4), "sampling.max_tokens"),
    ],
)
def test_what_is_too_long_has_its_own_reason_and_the_numbers(take, asked, field):
    with pytest.raises(InvalidRequest) as caught:
        take(asked)
    (violation,) = caught.value.violations
    assert violation.field == field and caught.value.reason == "CONTEXT_LENGTH_EXCEEDED"
    assert str(LENGTH) in violation.description


def test_the_longest_prompt_leaves_one_token(take):
    assert take(ids([1] * (LENGTH - 1))).stop.max_tokens == 1


def test_an_oversized_text_is_refused_without_being_tokenised(card, take):
    class Untouchable(Tokenizer):
        def __init__(self):
            self.chat = object()

        def encode(self, text):
            raise AssertionError("tokenised")

    for asked in (spec(text="a" * 10**6), chat(("user", "a" * 10**6)), sampling(n=17)):
        refused(take, asked, tokenizer=Untouchable())


def test_a_small_pool_bounds_a_request_too(card, take):
    small = ModelCard(
        name="smol",
        vocab_size=VOCAB,
        max_model_len=LENGTH,
        eos_token_ids=(2,),
        digest="",
        capacity_tokens=8,
    )
    assert take(spec(), card=small).stop.max_tokens == 3
    assert "at most 8 tokens" in refused(take, ids([1] * 9), card=small)["token_ids.ids"]


def test_min_tokens_stay_under_the_default_of_max_tokens(take):
    assert refused(take, sampling(min_tokens=LENGTH - 4)) == {
        "sampling.min_tokens": f"must be in [0, {LENGTH - 5}], at most max_tokens"
    }


def test_min_tokens_over_max_tokens_are_refused(take):
    assert list(refused(take, sampling(max_tokens=3, min_tokens=4))) == ["sampling.min_tokens"]


def test_another_model_is_not_found(take):
    with pytest.raises(ModelNotFound):
        take(spec(model="other"))


def test_a_deadline_that_has_passed_is_refused_at_the_door(take):
    with pytest.raises(DeadlineExpired):
        take(spec(), time_left_s=0.0)


def test_a_chat_is_rendered_and_opens_the_answer_unless_told_not_to(take, tokenizer):
    opened = take(chat(("user", "hi")))
    text = tokenizer.decode(opened.prompt_token_ids, include_special=True)
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    asked = chat(("user", "hi"))
    asked.chat.add_generation_prompt = False
    closed = take(asked)
    assert tokenizer.decode(closed.prompt_token_ids, include_special=True).endswith("hi<|im_end|>\n")


def test_a_model_without_a_template_cannot_chat(take, tokenizer):
    class Plain(Tokenizer):
        def __init__(self):
            self.chat = None

    assert list(refused(take, chat(("user", "hi")), tokenizer=Plain())) == ["chat"]


@pytest.mark.parametrize(
    ("n", "logprobs", "sharing"), [(1, 20, 1), (16, None, 1), (16, 0, 1), (4, 5, 1), (1, 20, 2), (2, 5, 256)]
)
def test_answers_that_share_a_message_are_no_longer_than_fit_and_streams_may_be(
    take, card, n, logprobs, sharing
):
    large = replace(card, max_model_len=500_000)
    most = 400_000 // (sharing * n * (1 + (logprobs or 0)))

    def asked(**tokens):
        params = inference_pb2.SamplingParams(n=n, **tokens)
        return spec(sampling=params, output=inference_pb2.OutputOptions(logprobs=logprobs))

    whole = partial(take, card=large, sharing=sharing)
    assert whole(asked(max_tokens=most)).stop.max_tokens == most
    assert whole(asked()).stop.max_tokens == most
    (rule,) = refused(whole, asked(max_tokens=most + 1)).items()
    assert rule[0] == "sampling.max_tokens" and f"at most {most} " in rule[1]
    assert whole(asked(max_tokens=most + 1), streamed=True).stop.max_tokens == most + 1
    assert whole(asked(), streamed=True).stop.max_tokens == 500_000 - 5


def test_so_do_the_logprobs_of_their_prompts(take, card):
    def asked(alternatives):
        return spec(
            sampling=inference_pb2.SamplingParams(max_tokens=1),
            output=inference_pb2.OutputOptions(prompt_logprobs=alternatives),
        )

    large, sharing = replace(card, max_model_len=500_000), 400_000 // (5 * 11)
    assert take(asked(10), card=large, sharing=sharing).prompt_logprobs == 10
    assert "at most 10" in refused(take, asked(11), card=large, sharing=sharing)["output.prompt_logprobs"]
    assert "not for" in refused(take, asked(0), card=large, sharing=80_001)["output.prompt_logprobs"]
    assert take(asked(11), card=large, sharing=sharing, streamed=True).prompt_logprobs == 11
