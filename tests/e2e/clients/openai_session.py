"""What OpenAI's own client gets, printed as JSON. Arguments: the base URL, the prompt."""

import asyncio
import json
import sys
from typing import Literal

import openai
import pydantic

MESSAGES = [{"role": "user", "content": "Name three colours."}]
GREEDY = {"model": "", "temperature": 0}


def completion(client, prompt):
    answer = client.completions.create(prompt=prompt, max_tokens=12, logprobs=2, **GREEDY)
    (choice,) = answer.choices
    return {
        "text": choice.text,
        "tokens": choice.logprobs.tokens,
        "token_logprobs": choice.logprobs.token_logprobs,
        "alternatives": [len(top) for top in choice.logprobs.top_logprobs],
        "finish_reason": choice.finish_reason,
        "usage": answer.usage.to_dict(),
    }


def chat(client):
    whole = client.chat.completions.create(messages=MESSAGES, max_completion_tokens=16, **GREEDY)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(
        client.chat.completions.create(messages=MESSAGES, max_completion_tokens=16, **options, **GREEDY)
    )
    said = [choice for chunk in chunks for choice in chunk.choices]
    return {
        "whole": whole.choices[0].message.content,
        "streamed": "".join(choice.delta.content or "" for choice in said),
        "roles": [choice.delta.role for choice in said if choice.delta.role],
        "finish_reasons": [choice.finish_reason for choice in said if choice.finish_reason],
        "usage_of_whole": whole.usage.to_dict(),
        "usage_of_last": chunks[-1].usage.to_dict(),
        "usages": sum(chunk.usage is not None for chunk in chunks),
    }


def choices(client, prompt):
    answer = client.completions.create(
        prompt=prompt, max_tokens=8, n=3, seed=5, temperature=1.0, top_p=0.9, model="", stop=["\n\n"]
    )
    again = client.completions.create(
        prompt=prompt, max_tokens=8, n=3, seed=5, temperature=1.0, top_p=0.9, model="", stop=["\n\n"]
    )
    return {
        "indices": [choice.index for choice in answer.choices],
        "texts": [choice.text for choice in answer.choices],
        "again": [choice.text for choice in again.choices],
    }


def streamed(client, prompt):
    """Two choices of a completion, whole and as they come, with what has been used so far in every chunk."""
    given = {"prompt": prompt, "max_tokens": 8, "n": 2, "seed": 5, "temperature": 0.9, "model": ""}
    whole = client.completions.create(**given)
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = client.completions.create(stream=True, stream_options=options, **given)
    said = [choice for chunk in chunks for choice in chunk.choices]
    return {
        "whole": [choice.text for choice in whole.choices],
        "streamed": ["".join(each.text for each in said if each.index == index) for index in (0, 1)],
        "finish_reasons": sorted(each.index for each in said if each.finish_reason),
        "used": [chunk.usage.completion_tokens for chunk in (*chunks, last)],
        "usage_of_whole": whole.usage.completion_tokens,
        "choices_of_last": len(last.choices),
    }


def echoed(client, prompt):
    """The prompt as a text and as token ids, with what the model makes of it."""
    given = {"max_tokens": 4, "echo": True, "logprobs": 1, "extra_body": {"return_token_ids": True}, **GREEDY}
    (as_text,) = client.completions.create(prompt=prompt, **given).choices
    (as_ids,) = client.completions.create(prompt=as_text.prompt_token_ids, **given).choices
    return [[each.text, each.token_ids, each.logprobs.to_dict()] for each in (as_text, as_ids)]


def chat_logprobs(client):
    answer = client.chat.completions.create(
        messages=MESSAGES, max_completion_tokens=6, logprobs=True, top_logprobs=2, **GREEDY
    )
    (choice,) = answer.choices
    return {"text": choice.message.content, "content": choice.logprobs.to_dict()["content"]}


def broken_off(client):
    """A stream whose answer turns out to be too much work, which is said in a frame of its own."""
    guide = {"structured_outputs": {"regex": "[a-z ]{300}(a{1000}){1000}"}}
    seen = 0
    try:
        for chunk in client.completions.create(
            prompt="x", max_tokens=200, stream=True, extra_body=guide, **GREEDY
        ):
            seen += len(chunk.choices)
    except openai.APIError as error:
        return [type(error).__name__, error.code, error.param, seen > 0]
    return None


class Reply(pydantic.BaseModel):
    colour: Literal["red", "green", "blue"]
    certain: bool
    places: tuple[Literal["sky", "sea", "meadow"], Literal["sky", "sea", "meadow"]]


def parsed(client):
    """What the library makes of an answer that a class describes."""
    answer = client.chat.completions.parse(
        messages=MESSAGES, response_format=Reply, max_completion_tokens=120, **GREEDY
    )
    return answer.choices[0].message.parsed.model_dump()


def steered(client, prompt):
    """Tokens under a bias that nothing outweighs, and under none; ids come with vLLM's extra field."""
    given = {"prompt": prompt, "max_tokens": 4, "extra_body": {"return_token_ids": True}, **GREEDY}
    free = client.completions.create(**given)
    biased = client.completions.create(logit_bias={"500": 100}, **given)
    return [answer.choices[0].token_ids for answer in (free, biased)]


def left_early(client):
    """A stream that its reader closes after the first word."""
    stream = client.chat.completions.create(
        messages=MESSAGES, max_completion_tokens=2000, stream=True, extra_body={"ignore_eos": True}, **GREEDY
    )
    with stream:
        for chunk in stream:
            if chunk.choices[0].delta.content:
                return chunk.choices[0].delta.content
    return None


def refusals(client):
    found = {}
    for name, wish in (
        ("range", {"temperature": 9}),
        ("type", {"max_tokens": "many"}),
        ("model", {"model": "no-such-model"}),
        ("length", {"max_tokens": 10_000_000}),
    ):
        try:
            client.completions.create(**{"prompt": "x", "model": "", **wish})
        except openai.APIStatusError as error:
            found[name] = [type(error).__name__, error.status_code, error.param, error.code]
    return found


def models(client):
    (listed,) = client.models.list()
    return [listed.id, client.models.retrieve(listed.id).id]


async def crowd(base_url):
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:

        async def one(number):
            messages = [{"role": "user", "content": f"Count to {number}."}]
            stream = await client.chat.completions.create(
                messages=messages, max_completion_tokens=12, stream=True, **GREEDY
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        together = await asyncio.gather(*(one(number) for number in range(8)))
        return [together, [await one(number) for number in range(8)]]


def main(base_url, prompt):
    client = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0)
    return {
        "completion": completion(client, prompt),
        "chat": chat(client),
        "choices": choices(client, prompt),
        "streamed": streamed(client, prompt),
        "echoed": echoed(client, prompt),
        "chat_logprobs": chat_logprobs(client),
        "broken_off": broken_off(client),
        "parsed": parsed(client),
        "steered": steered(client, prompt),
        "left_early": left_early(client),
        "refusals": refusals(client),
        "models": models(client),
        "crowd": asyncio.run(crowd(base_url)),
    }


if __name__ == "__main__":
    json.dump(main(*sys.argv[1:]), sys.stdout)
