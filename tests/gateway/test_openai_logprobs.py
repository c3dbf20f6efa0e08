"""What logprobs say of the text of an answer: alternatives that are written alike, and where tokens begin."""

import asyncio
from dataclasses import replace
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.request import ModelCard
from gateway.tokenizer import Tokenizer
from service.scores import Scores
from tests.gateway.test_openai_http import events_of

BYTES_FIRST = 3
"""Of the vocabulary `scored`: the token of byte 0."""


def byte_id(character):
    return BYTES_FIRST + ord(character)


class Model(NamedTuple):
    tokenizer: Tokenizer
    card: ModelCard

    specials: frozenset[str]

    @property
    def changes(self):
        return {"tokenizer": self.tokenizer, "card": lambda: self.card}


def special_texts(tokenizer):
    ids = [token for token in range(tokenizer.vocab_size) if not tokenizer.piece(token)]
    return frozenset(tokenizer.piece(token, include_special=True).decode() for token in ids)


@pytest.fixture(scope="session")
def models(tokenizer, scored, card):
    """By how their vocabularies write bytes."""
    others = replace(card, vocab_size=scored.vocab_size, eos_token_ids=scored.eos_token_ids)
    return {
        "byte level": Model(tokenizer, card, special_texts(tokenizer)),
        "scored": Model(scored, others, special_texts(scored)),
    }


class Source:
    """Answers with these tokens, and says as much of the prompt as an echo needs."""

    def __init__(self, batches):
        self._batches = batches

    async def run(self, request, unread):
        first, *others = self._batches
        followers = len(request.prompt_token_ids) - 1
        if request.prompt_logprobs is not None:
            scores = Scores.of([(-1.0, 1, ((5, -1.0),))] * followers) if followers else Scores()
            first = first._replace(scores=scores)
        for batch in (first, *others):
            yield batch


@pytest.fixture(scope="session")
def ask(post, batches, models):
    """The text of a choice and its logprobs, joined where they are streamed. tops: alternatives of each token."""

    async def ask(name, answer_ids, *, tops=None, **fields):
        steps = batches(answer_ids, alternatives=1)
        for place, top in enumerate(tops or ()):
            steps[place] = steps[place]._replace(tokens=(steps[place].tokens[0]._replace(top=top),))
        body = {"prompt": "hello", "logprobs": 1, "max_tokens": len(answer_ids), **fields}
        response = await post(Source(steps), "/v1/completions", body, changes=models[name].changes)
        assert response.status_code == 200, response.text
        events = events_of(response) if fields.get("stream") else [response.json()]
        choices = [event["choices"][0] for event in events]
        logprobs = {
            name: [one for choice in choices for one in choice["logprobs"][name]]
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        }
        return "".join(choice["text"] for choice in choices), logprobs

    return ask


# --- alternatives


async def test_of_tokens_with_one_text_none_hides_a_likelier_one(ask, scored):
    """What harnesses compare: a token is the greedy one where nothing beats it."""
    (whole,) = [token for token in scored.encode("h", add_special=False) if scored.piece(token) == b"h"]
    alike = byte_id("h")
    likely, unlikely = (whole, -0.5), (alike, -3.0)
    for ids, tops, expected in (
        ([whole], [(likely, unlikely)], {"h": -0.5, "bytes:\\x68": -3.0}),
        ([alike], [(likely, unlikely)], {"bytes:\\x68": -0.5, "h": -3.0}),
    ):
        _, logprobs = await ask("scored", ids, tops=tops)
        assert logprobs["top_logprobs"] == [expected]
        assert logprobs["tokens"] == ["h"]


async def test_the_likelier_of_two_alternatives_with_one_text_has_it(ask, scored):
    (whole,) = [token for token in scored.encode("h", add_special=False) if scored.piece(token) == b"h"]
    tops = [((whole, -0.25), (byte_id("h"), -2.0))]
    _, logprobs = await ask("scored", [byte_id("x")], tops=tops)
    assert logprobs["top_logprobs"] == [{"h": -0.25, "bytes:\\x68": -2.0, "x": -0.5}]


# --- places

TEXTS = [
    "hello",
    " hello",
    "<|im_start|>hi",
    "a<|im_end|>b",
    "<s>hello",
    "h€e",
    "\U0001f98a",
    "e\u0301",
    "  two  ",
]


@st.composite
def asked(draw):
    """A vocabulary, a prompt, an answer, and how it is to be shown."""
    name = draw(st.sampled_from(["byte level", "scored"]))
    vocab = {"byte level": st.integers(0, 300) | st.integers(0, 49151), "scored": st.integers(0, 269)}[name]
    text = st.lists(st.sampled_from(TEXTS) | st.text(st.characters(codec="utf-8"), min_size=1), min_size=1)
    prompt = draw(text.map("".join) | st.lists(vocab, min_size=1, max_size=8))
    shown = draw(
        st.fixed_dictionaries(
            {},
            optional={
                "echo": st.just(True),
                "stream": st.just(True),
                "skip_special_tokens": st.just(False),
                "truncate_prompt_tokens": st.integers(1, 8),
            },
        )
    )
    return name, prompt, draw(st.lists(vocab, min_size=1, max_size=8)), shown


@settings(deadline=None, max_examples=200)
@given(asked())
def test_the_text_goes_on_with_a_token_from_its_offset(ask, models, wish):
    """Wherever the token is a whole one that is shown. In front of a word there may be no space that its token has."""
    name, prompt, answer_ids, shown = wish
    text, logprobs = asyncio.run(ask(name, answer_ids, prompt=prompt, **shown))
    offsets = logprobs["text_offset"]
    assert offsets == sorted(offsets) and len(offsets) == len(logprobs["tokens"])
    assert min(offsets) >= 0 and max(offsets) <= len(text)
    sure = "skip_special_tokens" in shown and not isinstance(prompt, str)
    hidden = () if sure else models[name].specials
    for token, offset in zip(logprobs["tokens"], offsets, strict=True):
        if token not in hidden and not token.startswith("bytes:"):
            assert text.startswith((token, token.removeprefix(" ")), offset), (token, offset, text)


async def test_parts_of_a_character_begin_where_it_does_and_the_next_token_behind_it(ask, tokenizer):
    ids = tokenizer.encode("a\U0001f98ab")
    assert len(ids) > 3, "one character, several tokens"
    for fields in ({}, {"stream": True}):
        text, logprobs = await ask("byte level", ids, **fields)
        assert text == "a\U0001f98ab"
        assert logprobs["text_offset"] == [0, *[1] * (len(ids) - 2), 2]


async def test_an_answer_that_completes_the_prompts_last_character_begins_with_it(ask, tokenizer):
    *begin, last = tokenizer.encode("\U0001f98a")
    after = tokenizer.encode("ab")
    text, logprobs = await ask("byte level", [last, *after], prompt=begin)
    assert text == "\U0001f98aab" and logprobs["text_offset"][:2] == [0, 1]


async def test_tokens_of_a_stop_string_are_told_where_its_text_would_stand(ask, tokenizer):
    ids = tokenizer.encode(" one two three")
    for fields in ({}, {"stream": True}):
        text, logprobs = await ask("byte level", ids, stop=[" two three"], **fields)
        assert text == " one"
        assert logprobs["tokens"] == [" one", " two", " three"] and logprobs["text_offset"] == [0, 4, 8]


@pytest.mark.parametrize(("shown", "offsets"), [(False, [0, 0, 5]), (True, [0, 10, 15])])
async def test_special_tokens_count_where_they_are_shown(ask, tokenizer, shown, offsets):
    ids = [*tokenizer.encode("<|im_end|>"), *tokenizer.encode("Hello"), *tokenizer.encode(" there")]
    _, logprobs = await ask("byte level", ids, skip_special_tokens=not shown)
    assert logprobs["text_offset"] == offsets


async def test_a_special_token_that_a_text_has_is_in_its_echo(ask):
    text, logprobs = await ask("byte level", [500], prompt="<|im_start|>hi", echo=True)
    assert text.startswith("<|im_start|>hi")
    assert logprobs["text_offset"] == [0, 12, 14]


async def test_a_token_is_found_behind_what_its_vocabulary_has_no_token_for(ask, tokenizer):
    """The byte that only this character begins with is lost."""
    prompt = "\U00040000hello"
    assert tokenizer.decode(tokenizer.encode(prompt)) != prompt
    text, logprobs = await ask("byte level", tokenizer.encode("!"), prompt=prompt, echo=True)
    assert text == prompt + "!"
    assert [text[offset] for offset in logprobs["text_offset"]][-2:] == ["h", "!"]


# --- echoes of a vocabulary whose first word has a space of its own


@pytest.mark.parametrize("fields", [{}, {"stream": True}])
async def test_an_echo_of_token_ids_begins_as_the_decoder_begins(ask, scored, fields):
    ids = scored.encode("hello hello")
    text, logprobs = await ask(
        "scored", scored.encode("he", add_special=False), prompt=ids, echo=True, **fields
    )
    assert text == scored.decode(ids) + " he" == "hello hello he"
    assert logprobs["text_offset"] == [0, 0, 5, 11, 12]


async def test_special_tokens_that_are_shown_keep_the_space_behind_them(ask, scored):
    ids = scored.encode("hello")
    text, _ = await ask("scored", [byte_id("!")], prompt=ids, echo=True, skip_special_tokens=False)
    assert text == scored.decode(ids, include_special=True) + "!" == "<s> hello!"


@pytest.mark.parametrize("as_ids", [True, False])
@pytest.mark.parametrize(("kept", "text"), [(1, " hello!"), (3, "hello hello!"), (9, "hello hello!")])
async def test_what_is_left_of_a_truncated_prompt_begins_with_its_space(ask, scored, kept, text, as_ids):
    prompt = scored.encode("hello hello") if as_ids else "hello hello"
    found, _ = await ask("scored", [byte_id("!")], prompt=prompt, echo=True, truncate_prompt_tokens=kept)
    assert found == text


async def test_a_text_is_echoed_as_it_was_given(ask):
    for prompt in ("hello", " hello", "<s>hello", "hello</s> hello"):
        text, logprobs = await ask("scored", [byte_id("!")], prompt=prompt, echo=True)
        assert text == prompt + "!"
        assert logprobs["text_offset"][-1] == len(prompt)
