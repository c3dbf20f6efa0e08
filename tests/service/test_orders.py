"""Orders on the wire, and every rule that a worker checks again."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.sequence import SamplingParams
from service.errors import InvalidRequest
from service.guides import TEXT_BYTES_MAX, Guide, GuideKind, choice
from service.orders import (
    AGE_MS_MAX,
    CHOICES_MAX,
    PREEMPTIONS_MAX,
    PRIORITY_S,
    SCORES_MAX,
    AttemptKey,
    AttemptRefused,
    Beam,
    Choice,
    OrderLimits,
    SequenceOrder,
    from_spec,
    superseded,
    to_spec,
)

LOGPROBS_MAX, PRIORITY_MAX, BEAM_WIDTH_MAX, LENGTH_PENALTY_MAX = 20, 100, 16, 10
PENALTY_MAX, REPETITION_PENALTY_MAX, LOGIT_BIAS_MAX, LOGIT_BIASES_MAX, STOP_TOKENS_MAX = 2, 2, 100, 300, 128
LIMITS = OrderLimits(vocab_size=1000, tokens_max=20)
ORDER = SequenceOrder(
    key=AttemptKey(request_id="r", attempt=1),
    choices=(Choice(index=0, seed=-1),),
    token_ids=(1, 2, 3, 4),
    prompt_tokens=3,
    max_tokens=10,
    min_tokens=0,
    stop_token_ids=frozenset({7}),
    temperature=0.5,
    top_p=0.9,
    top_k=5,
    min_p=0.1,
    logprobs=None,
)


def refused_fields(limits=LIMITS, **changes):
    with pytest.raises(InvalidRequest) as refusal:
        from_spec(to_spec(replace(ORDER, **changes)), limits)
    return [violation.field for violation in refusal.value.violations]


unit = st.floats(0, 1)


def choices():
    made = st.builds(Choice, index=st.integers(0, CHOICES_MAX - 1), seed=st.integers(-(2**63), 2**63 - 1))
    return st.lists(made, min_size=1, max_size=3, unique_by=lambda choice: choice.index).map(tuple)


def beams():
    return st.builds(
        Beam,
        width=st.integers(3, BEAM_WIDTH_MAX),
        length_penalty=st.floats(-LENGTH_PENALTY_MAX, LENGTH_PENALTY_MAX),
        early_stopping=st.booleans(),
    )


def guided():
    texts = st.text(min_size=1, max_size=9)
    choices = st.lists(texts, min_size=1).map(choice)
    return st.builds(Guide, kind=st.just(GuideKind.REGEX), text=texts) | choices


def biases():
    bias = st.floats(-LOGIT_BIAS_MAX, LOGIT_BIAS_MAX, width=32)
    return st.dictionaries(st.integers(0, 999), bias, max_size=5).map(
        lambda each: tuple(sorted(each.items()))
    )


def penalties():
    either_way = st.floats(-PENALTY_MAX, PENALTY_MAX)
    return st.fixed_dictionaries(
        {
            "presence_penalty": either_way,
            "frequency_penalty": either_way,
            "repetition_penalty": st.floats(0, REPETITION_PENALTY_MAX, exclude_min=True),
            "logit_bias": biases(),
        }
    )


@st.composite
def orders(draw):
    prompt = draw(st.lists(st.integers(0, 999), min_size=1, max_size=8))
    emitted = draw(st.lists(st.integers(0, 999), max_size=4))
    max_tokens = draw(st.integers(len(emitted) + 1, 12))
    beam = None if emitted else draw(st.none() | beams())
    return SequenceOrder(
        key=AttemptKey(
            request_id=draw(st.text(min_size=1, max_size=32)), attempt=draw(st.integers(1, 2**32 - 1))
        ),
        choices=draw(choices()),
        token_ids=(*prompt, *emitted),
        prompt_tokens=len(prompt),
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, max_tokens)),
        stop_token_ids=draw(st.frozensets(st.integers(0, 999), max_size=5)),
        temperature=draw(st.floats(0, 2)),
        top_p=draw(st.floats(0, 1, exclude_min=True)),
        top_k=draw(st.integers(0, 1000)),
        min_p=draw(unit),
        logprobs=draw(st.none() | st.integers(0, LOGPROBS_MAX)),
        beam=beam,
        guide=draw(st.none() | guided()) if beam is None else None,
        prompt_logprobs=None if emitted or beam else draw(st.none() | st.integers(0, LOGPROBS_MAX)),
        preemptions=draw(st.integers(0, PREEMPTIONS_MAX)),
        age_ms=draw(st.integers(0, AGE_MS_MAX)),
        priority=draw(st.integers(-PRIORITY_MAX, PRIORITY_MAX)),
        **draw(penalties()),
    )


@given(orders())
def test_an_order_that_keeps_the_rules_comes_back_as_it_was(order):
    assert from_spec(to_spec(order), LIMITS) == order


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", [float("nan"), float("inf"), -float("inf"), -0.001, 2.001]),
        ("top_p", [float("nan"), float("inf"), 0.0, -0.001, 1.001]),
        ("min_p", [float("nan"), float("inf"), -0.001, 1.001]),
        ("presence_penalty", [float("nan"), -2.001, 2.001, float("inf")]),
        ("frequency_penalty", [float("nan"), -2.001, 2.001, -float("inf")]),
        ("repetition_penalty", [float("nan"), 0.0, -1.0, 2.001, float("inf")]),
        ("logit_bias", [((1000, 1.0),), ((5, 1.0), (2**32 - 1, 1.0))]),
        ("logit_bias", [((5, bad),) for bad in (float("nan"), float("inf"), -float("inf"), 100.001, -101)]),
        ("logit_bias", [tuple((token, 1.0) for token in range(LOGIT_BIASES_MAX + 1))]),
        ("top_k", [1001, 2**32 - 1]),
        ("logprobs", [LOGPROBS_MAX + 1, 2**32 - 1]),
        ("min_tokens", [11]),
        ("preemptions", [PREEMPTIONS_MAX + 1, 2**32 - 1]),
        ("age_ms", [AGE_MS_MAX + 1, 2**64 - 1]),
        ("priority", [-PRIORITY_MAX - 1, PRIORITY_MAX + 1, -(2**31), 2**31 - 1]),
        ("token_ids", [(1, 2, 3, 1000), (1, 2, 3, 2**32 - 1)]),
        ("stop_token_ids", [frozenset({1000}), frozenset(range(STOP_TOKENS_MAX + 1))]),
        ("prompt_tokens", [0, 5]),
        ("max_tokens", [0, 1, 18]),
        ("key", [AttemptKey(request_id="r", attempt=0)]),
        ("key", [AttemptKey(request_id="", attempt=1), AttemptKey(request_id="é" * 65, attempt=1)]),
        ("choices", [(), tuple(Choice(index=n, seed=n) for n in range(CHOICES_MAX + 1))]),
        (
            "choices",
            [(Choice(index=CHOICES_MAX, seed=0),), (Choice(index=1, seed=0), Choice(index=1, seed=2))],
        ),
    ],
)
def test_each_broken_rule_is_named(field, values):
    for value in values:
        named = "attempt" if field == "key" and value.attempt == 0 else field
        named = "request_id" if named == "key" else named
        assert named in refused_fields(**{field: value}), value


@pytest.mark.parametrize(
    "changes",
    [
        {"max_tokens": 17},
        {"max_tokens": 2},
        {"min_tokens": 10},
        {"prompt_tokens": 4},
        {"temperature": 0.0},
        {"temperature": 2.0},
        {"top_p": 1.0},
        {"presence_penalty": -2.0, "frequency_penalty": 2.0, "repetition_penalty": 5e-324},
        {"presence_penalty": 2.0, "frequency_penalty": -2.0, "repetition_penalty": 2.0},
        {
            "logit_bias": tuple(
                (token, (-1) ** token * 100.0) for token in range(1000 - LOGIT_BIASES_MAX, 1000)
            )
        },
        {"top_k": 1000},
        {"min_p": 1.0},
        {"logprobs": LOGPROBS_MAX},
        {"token_ids": (999,), "prompt_tokens": 1},
        {"stop_token_ids": frozenset(range(STOP_TOKENS_MAX))},
        {"key": AttemptKey(request_id="é" * 64, attempt=2**32 - 1)},
        {"key": AttemptKey(request_id="\0 \n../'\";", attempt=1)},
    ],
)
def test_the_border_of_each_rule_is_inside(changes):
    order = replace(ORDER, **changes)
    assert from_spec(to_spec(order), LIMITS) == order


def test_every_violation_is_named_at_once_and_none_twice_over():
    key = AttemptKey(request_id="", attempt=0)
    fields = refused_fields(key=key, token_ids=(), prompt_tokens=1, temperature=float("nan"), top_p=0.0)
    assert fields == ["request_id", "attempt", "token_ids", "temperature", "top_p", "prompt_tokens"]


def test_an_answer_for_which_no_token_is_left_to_sample_is_refused():
    tiny = OrderLimits(vocab_size=5, tokens_max=20)
    assert "stop_token_ids" in refused_fields(tiny, stop_token_ids=frozenset(range(5)), top_k=0)


@given(orders())
def test_the_engine_gets_every_parameter_of_an_order_and_the_seed_of_the_choice(order):
    choice = order.choices[-1]
    params = order.sampling(choice, SamplingParams)
    for name in set(SamplingParams.__dataclass_fields__) - {"candidates", "packed"}:
        assert getattr(params, name) == (choice.seed if name == "seed" else getattr(order, name)), name


def test_a_repetition_penalty_that_is_not_said_is_off():
    spec = to_spec(ORDER)
    spec.ClearField("repetition_penalty")
    assert from_spec(spec, LIMITS) == ORDER


def test_what_is_left_of_an_answer():
    assert (ORDER.length_limit(), ORDER.remaining()) == (13, 9)


def test_what_has_waited_elsewhere_or_matters_more_counts_as_having_come_before():
    assert ORDER.arrived(100.0) == 100.0
    assert replace(ORDER, age_ms=2500).arrived(100.0) == 97.5
    assert replace(ORDER, priority=-2).arrived(100.0) == 100.0 - 2 * PRIORITY_S
    assert replace(ORDER, priority=1, age_ms=6000).arrived(100.0) < 100.0, "waiting makes up for it"


def key(attempt, request_id="r"):
    return AttemptKey(request_id=request_id, attempt=attempt)


def test_a_newer_attempt_makes_the_older_ones_of_its_request_void():
    live = [("g", key(1)), ("g", key(2)), ("g", key(1, "other")), ("h", key(9, "third"))]
    assert superseded("g", key(3), live) == [key(1), key(2)]
    assert superseded("g", key(2), live) == [key(1)]
    assert superseded("g", key(1, "new"), live) == []


def test_a_guide_that_is_too_large_or_unknown_or_beside_a_search_is_refused():
    large = Guide(kind=GuideKind.REGEX, text="a" * (TEXT_BYTES_MAX + 1))
    assert refused_fields(guide=large) == ["guide.text"]
    small = replace(large, text="a")
    search = {"token_ids": (1, 2, 3), "beam": Beam(width=2)}
    assert refused_fields(guide=small, **search) == ["guide"]
    spec = to_spec(replace(ORDER, guide=small))
    spec.guide.kind = 77
    with pytest.raises(InvalidRequest, match="guide: of an unknown kind"):
        from_spec(spec, LIMITS)


@pytest.mark.parametrize("attempt", [1, 2, 3])
def test_an_older_attempt_or_another_gateway_makes_nothing_void(attempt):
    with pytest.raises(AttemptRefused, match="another gateway"):
        superseded("h", key(attempt), [("g", key(2))])
    if attempt < 2:
        with pytest.raises(AttemptRefused, match="newer"):
            superseded("g", key(attempt), [("g", key(2))])


SEARCH = replace(ORDER, token_ids=(1, 2, 3), beam=Beam(width=2))


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("beam.width", {"beam": Beam(width=1)}),
        ("beam.width", {"beam": Beam(width=BEAM_WIDTH_MAX + 1)}),
        ("beam.length_penalty", {"beam": Beam(width=2, length_penalty=LENGTH_PENALTY_MAX + 0.1)}),
        ("beam.length_penalty", {"beam": Beam(width=2, length_penalty=float("nan"))}),
        ("choices", {"choices": tuple(Choice(index=n, seed=0) for n in range(3))}),
        ("token_ids", {"token_ids": (1, 2, 3, 4)}),
    ],
)
def test_each_broken_rule_of_a_search_is_named(field, changes):
    assert from_spec(to_spec(SEARCH), LIMITS) == SEARCH
    with pytest.raises(InvalidRequest) as refusal:
        from_spec(to_spec(replace(SEARCH, **changes)), LIMITS)
    assert [violation.field for violation in refusal.value.violations] == [field]


@pytest.mark.parametrize(
    ("prompt", "choices", "blocks"),
    [
        (8, 1, 3),  # 8 + 4 - 1 positions
        (8, 3, 2 + 3 * 1),
        (7, 1, 3),
        (7, 3, 1 + 1 + 3 * 2),  # the second block is copied by each of them
        (2, 2, 0 + 1 + 2 * 2),
    ],
)
def test_blocks_that_choices_have_in_common_count_once(prompt, choices, blocks):
    order = replace(
        ORDER,
        token_ids=tuple(range(prompt)),
        prompt_tokens=prompt,
        max_tokens=4,
        choices=tuple(Choice(index=n, seed=n) for n in range(choices)),
    )
    assert order.blocks(block_size=4) == blocks


@pytest.mark.parametrize("value", [LOGPROBS_MAX + 1, 2**32 - 1])
def test_more_alternatives_of_a_prompts_tokens_than_there_may_be_are_refused(value):
    assert refused_fields(prompt_logprobs=value, prompt_tokens=4) == ["prompt_logprobs"]


def test_what_is_told_of_a_whole_prompt_has_its_limit_at_the_worker_too():
    limits, tokens = OrderLimits(vocab_size=1000, tokens_max=SCORES_MAX), (1,) * (SCORES_MAX // 20)
    asked = {"token_ids": tokens, "prompt_tokens": len(tokens)}
    order = replace(ORDER, prompt_logprobs=19, **asked)
    assert from_spec(to_spec(order), limits) == order
    assert refused_fields(limits, prompt_logprobs=20, **asked) == ["prompt_logprobs"]


def test_a_prompts_logprobs_are_wanted_before_the_first_token_and_not_of_a_search():
    assert refused_fields(prompt_logprobs=1) == ["prompt_logprobs"]
    assert refused_fields(prompt_logprobs=1, prompt_tokens=4, beam=Beam(width=2)) == ["prompt_logprobs"]
