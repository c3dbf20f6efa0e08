"""The text fold: joined deltas are the decoded tokens, and a stop string never shows in part."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.text import TextFold

token_ids = st.lists(st.integers(0, 49151) | st.integers(17, 300), max_size=30)
texts = st.text(
    alphabet=st.characters(exclude_categories=["Cs", "Cc"], max_codepoint=0x1FFFF)
    | st.sampled_from("ab 東é👩"),
    max_size=40,
)


def make_fold(tokenizer, prompt=(), *, stops=(), include_stop=False, include_special=False, min_tokens=0):
    return TextFold(
        tokenizer,
        prompt,
        stop_strings=stops,
        include_stop_string=include_stop,
        include_special=include_special,
        min_tokens=min_tokens,
    )


def byte_ids(tokenizer, content: bytes) -> list[int]:
    """One token per byte: the finest token boundaries there can be."""
    by_byte = {tokenizer.piece(token_id): token_id for token_id in range(17, 17 + 256)}
    return [by_byte[bytes([byte])] for byte in content]


def chunked(ids, sizes):
    """The ids cut into pieces of the given sizes, over and over."""
    at = 0
    for turn in range(len(ids)):
        size = sizes[turn % len(sizes)]
        if at < len(ids):
            yield ids[at : at + size]
        at += size


def tell(fold, pieces):
    """Everything the fold says, and the stop string."""
    said = ""
    for piece in pieces:
        delta = fold.push(piece)
        said += delta.text
        if delta.stop_string is not None:
            return said + fold.finish(), delta.stop_string
    return said + fold.finish(), None


@given(token_ids, st.booleans(), st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_joined_deltas_are_the_decoded_tokens(tokenizer, ids, include_special, sizes):
    fold = make_fold(tokenizer, include_special=include_special)
    said, _ = tell(fold, chunked(ids, sizes))
    assert said == tokenizer.decode(ids, include_special=include_special)


@given(texts, st.lists(st.integers(1, 5), min_size=1, max_size=4))
@example("👩‍👩‍👧‍👦", [1])
def test_no_delta_cuts_a_character(tokenizer, text, sizes):
    fold = make_fold(tokenizer)
    said, _ = tell(fold, chunked(byte_ids(tokenizer, text.encode()), sizes))
    assert said == text


@given(
    texts,
    st.lists(st.text(alphabet="ab 東é👩", min_size=1, max_size=4), min_size=1, max_size=4),
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
    st.booleans(),
)
@example("aab", ["ab", "aab"], [1], False)
@example("xabcabd", ["abd"], [1], True)
def test_the_text_ends_at_the_stop_string_whose_end_comes_first(tokenizer, text, stops, sizes, include):
    fold = make_fold(tokenizer, stops=stops, include_stop=include)
    said, stop = tell(fold, chunked(byte_ids(tokenizer, text.encode()), sizes))
    ends = [(text.find(each) + len(each), text.find(each), each) for each in stops if each in text]
    if not ends:
        assert (said, stop) == (text, None)
    else:
        end, start, expected = min(ends)
        assert (said, stop) == (text[: end if include else start], expected)


@given(texts, st.lists(st.text(alphabet="ab 東é👩", min_size=1, max_size=4), min_size=1, max_size=3))
def test_only_what_could_become_a_stop_string_is_held_back(tokenizer, text, stops):
    """Case 75."""
    if any(stop in text for stop in stops):
        return
    fold = make_fold(tokenizer, stops=stops)
    said = "".join(fold.push([token_id]).text for token_id in byte_ids(tokenizer, text.encode()))
    held = text.removeprefix(said)
    assert said + held == text
    assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


def test_a_stop_string_over_token_boundaries_never_leaks_a_part(tokenizer):
    """Case 75."""
    fold = make_fold(tokenizer, stops=["END"])
    assert [fold.push([token_id]).text for token_id in byte_ids(tokenizer, b"hiEN")] == ["h", "i", "", ""]
    delta = fold.push(byte_ids(tokenizer, b"D!"))
    assert (delta.text, delta.stop_string, delta.tokens_used) == ("", "END", 1)
    assert fold.finish() == ""


@pytest.mark.parametrize("stop", ["END", "ND", " END"])
def test_what_the_prompt_ends_with_is_no_part_of_a_stop_string(tokenizer, stop):
    """Case 75: at the end of the prompt. A stop string is looked for in the answer alone."""
    fold = make_fold(tokenizer, byte_ids(tokenizer, b"the EN"), stops=[stop])
    delta = fold.push(byte_ids(tokenizer, b"D"))
    assert (delta.text, delta.stop_string) == ("D", None)
    assert tell(fold, [byte_ids(tokenizer, b" is an END")])[1] == stop


def test_a_beginning_that_did_not_become_the_stop_string_is_shown(tokenizer):
    fold = make_fold(tokenizer, stops=["END"])
    assert fold.push(byte_ids(tokenizer, b"EN")).text == ""
    assert fold.push(byte_ids(tokenizer, b"S")).text == "ENS"
    assert fold.push(byte_ids(tokenizer, b"EE")).text == "E"
    assert fold.finish() == "E"


def test_text_behind_the_stop_string_in_the_same_token_is_dropped(tokenizer):
    (token_id,) = tokenizer.encode(" Paris")
    delta = make_fold(tokenizer, stops=["ar"]).push([token_id, token_id])
    assert (delta.text, delta.stop_string, delta.tokens_used) == (" P", "ar", 1)


def test_a_stop_string_does_not_end_the_first_tokens(tokenizer):
    fold = make_fold(tokenizer, stops=["a", "xay"], min_tokens=3)
    ids = byte_ids(tokenizer, b"axaba")
    assert [fold.push([token_id]).text for token_id in ids[:4]] == ["a", "", "", "xab"]
    assert fold.push(ids[4:]).stop_string == "a"


def test_a_stop_string_of_which_a_part_came_early_still_ends(tokenizer):
    fold = make_fold(tokenizer, stops=["aa"], min_tokens=2)
    ids = byte_ids(tokenizer, b"aaa")
    assert fold.push(ids[:2]).text == "a"
    assert fold.push(ids[2:]).stop_string == "aa"


def test_a_character_begun_in_the_prompt_is_completed(tokenizer):
    euro = byte_ids(tokenizer, "€".encode())
    fold = make_fold(tokenizer, byte_ids(tokenizer, b"price: ") + euro[:2])
    assert fold.push(euro[2:]).text == "€"


def test_an_unfinished_character_at_the_end_becomes_a_replacement(tokenizer):
    fold = make_fold(tokenizer)
    assert fold.push(byte_ids(tokenizer, b"a\xe2\x82")).text == "a"
    assert fold.finish() == "\ufffd"


def test_no_token_means_no_text_even_after_half_a_character(tokenizer):
    assert make_fold(tokenizer, byte_ids(tokenizer, b"\xe2")).finish() == ""


@pytest.mark.parametrize("include_special", [True, False])
def test_special_tokens_show_only_when_asked_for(tokenizer, include_special):
    said, _ = tell(make_fold(tokenizer, include_special=include_special), [[1], tokenizer.encode("hi"), [2]])
    assert said == ("<|im_start|>hi<|im_end|>" if include_special else "hi")
