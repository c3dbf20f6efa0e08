"""What OpenAI's answers say of a prompt: echoed before the answer, in vLLM's form, truncated, or alone."""

import pytest

from gateway.request import EndReason
from service.scores import Scores
from tests.gateway.test_openai_http import PROMPT, chat, completion, events_of

WIDTH = 2


def scores_of(ids, width=WIDTH):
    """Token i of the prompt has the logprob -i; the token is among the alternatives, as the second, where i is even."""
    each = []
    for place, token in enumerate(ids[1:], start=1):
        second = (token, -float(place)) if place % 2 == 0 else (7, -float(place) + 0.25)
        top = ((5, -float(place) + 0.5), second)[:width]
        each.append((-float(place), 2 if place % 2 == 0 else 100, top))
    return Scores.of(each)


@pytest.fixture
def prompt_ids(tokenizer):
    return tokenizer.encode(PROMPT)


@pytest.fixture
def answered(scripted, batches, tokenizer, prompt_ids):
    """A source that answers " Paris is" and says all that can be asked of the prompt."""
    ids = tokenizer.encode(" Paris is")
    return scripted(*batches(ids, alternatives=WIDTH, scores=scores_of(prompt_ids)))


PIECES = ["The", " capital", " of", " France", " is"]


async def test_an_echo_begins_with_the_prompt_and_its_logprobs(post, answered):
    body = completion(echo=True, logprobs=WIDTH, max_tokens=2)
    (choice,) = (await post(answered, "/v1/completions", body)).json()["choices"]
    assert choice["text"] == PROMPT + " Paris is"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == [*PIECES, " Paris", " is"]
    assert logprobs["token_logprobs"] == [None, -1.0, -2.0, -3.0, -4.0, -0.5, -0.5]
    assert logprobs["text_offset"] == [0, 3, 11, 14, 21, 24, 30]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["top_logprobs"][1][" capital"] == -1.0 and len(logprobs["top_logprobs"][1]) == WIDTH + 1
    assert logprobs["top_logprobs"][2][" of"] == -2.0 and len(logprobs["top_logprobs"][2]) == WIDTH
    assert answered.requests[0].prompt_logprobs == WIDTH
    assert "prompt_logprobs" not in choice


async def test_the_first_chunk_of_a_stream_brings_the_echo(post, answered):
    body = completion(echo=True, logprobs=WIDTH, max_tokens=2, stream=True)
    first, second = [each["choices"][0] for each in events_of(await post(answered, "/v1/completions", body))]
    assert (first["text"], second["text"]) == (PROMPT + " Paris", " is")
    assert first["logprobs"]["tokens"] == [*PIECES, " Paris"] and second["logprobs"]["tokens"] == [" is"]
    assert first["logprobs"]["token_logprobs"][0] is None
    assert second["logprobs"]["text_offset"] == [30]


async def test_what_lm_eval_reads_of_an_echo_adds_up(post, answered, prompt_ids):
    """It sends token ids, asks for one token, and leaves that one out; a token is greedy where nothing beats it."""
    body = completion(prompt=[prompt_ids], echo=True, logprobs=1, max_tokens=1, temperature=0, seed=1234)
    last = answered.steps[0]._replace(end=EndReason.LENGTH, scores=scores_of(prompt_ids, width=1))
    answered.steps = (last,)
    (choice,) = (await post(answered, "/v1/completions", body)).json()["choices"]
    context = 2
    logprobs = choice["logprobs"]["token_logprobs"][context:-1]
    tops = choice["logprobs"]["top_logprobs"][context:-1]
    assert sum(logprobs) == -2.0 - 3.0 - 4.0
    assert all(logprob <= max(top.values()) for logprob, top in zip(logprobs, tops, strict=True))
    assert choice["text"] == PROMPT + " Paris"


async def test_an_echo_without_logprobs_asks_for_none_of_the_prompt(post, scripted, batches, tokenizer):
    source = scripted(*batches(tokenizer.encode(" Paris")))
    (choice,) = (await post(source, "/v1/completions", completion(echo=True))).json()["choices"]
    assert (choice["text"], choice["logprobs"]) == (PROMPT + " Paris", None)
    assert source.requests[0].prompt_logprobs is None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("logprobs", [None, WIDTH])
async def test_no_tokens_with_echo_are_the_prompt_alone(
    post, scripted, batches, prompt_ids, stream, logprobs
):
    """What the workers draw, here a stop token, is nobody's."""
    source = scripted(
        *batches([2], end=EndReason.STOP, alternatives=logprobs, scores=scores_of(prompt_ids, logprobs or 0))
    )
    options = {"stream_options": {"include_usage": True}} if stream else {}
    body = completion(echo=True, logprobs=logprobs, max_tokens=0, stream=stream, **options)
    response = await post(source, "/v1/completions", body)
    if stream:
        said, last = events_of(response)
    else:
        said = last = response.json()
    (choice,) = said["choices"]
    assert (choice["text"], choice["finish_reason"]) == (PROMPT, "length")
    assert last["usage"]["completion_tokens"] == 0 and last["usage"]["prompt_tokens"] == 5
    if logprobs is None:
        assert choice["logprobs"] is None
    else:
        assert choice["logprobs"]["tokens"] == PIECES
        assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -2.0, -3.0, -4.0]
    assert source.requests[0].prompt_only and source.requests[0].stop.max_tokens == 1


async def test_each_of_several_prompts_and_choices_is_echoed(post, scripted, batches, tokenizer):
    first, second = batches(tokenizer.encode(" x")), batches(tokenizer.encode(" y"))
    source = scripted(*first, *(batch._replace(choice=1) for batch in second))
    body = completion(prompt=["one", "two"], echo=True, n=2)
    choices = (await post(source, "/v1/completions", body)).json()["choices"]
    assert [choice["text"] for choice in choices] == ["one x", "one y", "two x", "two y"]


async def test_an_echo_of_part_of_a_character_leaves_it_to_the_answer_that_completes_it(
    post, scripted, batches, tokenizer
):
    *begin, last = tokenizer.encode("\U0001f98a")
    assert begin, "one character, several tokens"
    source = scripted(*batches([last]))
    (choice,) = (await post(source, "/v1/completions", completion(prompt=begin, echo=True))).json()["choices"]
    assert choice["text"] == "\U0001f98a"


async def test_prompt_logprobs_have_the_form_of_vllm(post, answered, prompt_ids, tokenizer):
    body = completion(prompt_logprobs=WIDTH, max_tokens=2)
    (choice,) = (await post(answered, "/v1/completions", body)).json()["choices"]
    assert choice["text"] == " Paris is" and choice["logprobs"] is None
    told = choice["prompt_logprobs"]
    assert len(told) == len(prompt_ids) and told[0] is None
    assert told[1] == {
        str(prompt_ids[1]): {"logprob": -1.0, "rank": 100, "decoded_token": " capital"},
        "5": {"logprob": -0.5, "rank": 1, "decoded_token": tokenizer.decode([5], include_special=True)},
        "7": {"logprob": -0.75, "rank": 2, "decoded_token": tokenizer.decode([7], include_special=True)},
    }
    assert list(told[2]) == [str(prompt_ids[2]), "5"]
    assert told[2][str(prompt_ids[2])]["rank"] == 2


async def test_in_a_chat_they_stand_beside_the_choices_and_in_a_stream_in_the_first_chunk(
    post, scripted, batches, tokenizer
):
    def source():
        request_ids = tokenizer.encode("any tokens will do here")
        return scripted(*batches([500, 501], scores=scores_of(request_ids, 0)))

    whole = (await post(source(), "/v1/completions", completion(prompt_logprobs=0, stream=True))).text
    assert whole.count("prompt_logprobs") == 1 and whole.index("prompt_logprobs") < whole.index("\n\n")
    asked = source()
    ids = None

    class Counting(type(asked)):
        """Says as much as the rendered chat has tokens."""

        async def run(self, request, unread):
            nonlocal ids
            ids = request.prompt_token_ids
            self.steps = batches([500, 501], scores=scores_of(ids, 0))
            async for batch in super().run(request, unread):
                yield batch

    answer = (await post(Counting([]), "/v1/chat/completions", chat("hi", prompt_logprobs=0))).json()
    assert "prompt_logprobs" not in answer["choices"][0]
    assert [None if each is None else list(each) for each in answer["prompt_logprobs"]] == [
        None,
        *([str(token)] for token in ids[1:]),
    ]


async def test_the_echo_and_the_form_of_vllm_have_each_as_many_alternatives_as_were_asked_for(
    post, answered, prompt_ids
):
    body = completion(echo=True, logprobs=WIDTH, prompt_logprobs=1, max_tokens=2)
    (choice,) = (await post(answered, "/v1/completions", body)).json()["choices"]
    assert answered.requests[0].prompt_logprobs == WIDTH
    assert list(choice["prompt_logprobs"][1]) == [str(prompt_ids[1]), "5"]
    assert len(choice["logprobs"]["top_logprobs"][1]) == WIDTH + 1


async def test_as_many_tokens_of_a_prompt_as_the_model_takes_are_kept(post, scripted, batches):
    source = scripted(*batches([500]))
    body = completion(prompt=[1] * 600, truncate_prompt_tokens=-1, max_tokens=12)
    assert (await post(source, "/v1/completions", body)).json()["usage"]["prompt_tokens"] == 500


@pytest.mark.parametrize(("kept", "text"), [(2, " France is"), (5, PROMPT), (400, PROMPT)])
async def test_the_last_tokens_of_a_truncated_prompt_are_kept_and_echoed(
    post, scripted, batches, prompt_ids, kept, text
):
    source = scripted(*batches([500]))
    body = completion(truncate_prompt_tokens=kept, echo=True, max_tokens=1)
    answer = (await post(source, "/v1/completions", body)).json()
    assert source.requests[0].prompt_token_ids == tuple(prompt_ids[-kept:])
    assert answer["choices"][0]["text"].startswith(text)
    assert answer["usage"]["prompt_tokens"] == min(kept, 5)
