"""What OpenAI's own client is refused where keys are asked for and one request at a time is taken, printed as JSON.

Arguments: the base URL, an API key.
"""

import json
import sys

import openai

GIVEN = {"prompt": "Once upon a time", "model": ""}
LONG = {"max_tokens": 4000, "stream": True, "extra_body": {"ignore_eos": True}}


def refused(client, **given):
    try:
        client.completions.create(**GIVEN, **given)
    except openai.APIStatusError as error:
        headers = error.response.headers
        return {
            "kind": type(error).__name__,
            "status": error.status_code,
            "code": error.code,
            "request_id": error.request_id,
            "retry_after": headers.get("retry-after"),
        }
    return None


def main(base_url, key):
    client = openai.OpenAI(base_url=base_url, api_key=key, max_retries=0)
    stranger = refused(openai.OpenAI(base_url=base_url, api_key="none", max_retries=0), max_tokens=1)
    with client.completions.create(**GIVEN, **LONG) as stream:
        next(iter(stream))
        second = refused(client, max_tokens=1, extra_headers={"x-request-id": "second"})
    patient = openai.OpenAI(base_url=base_url, api_key=key, max_retries=20)
    answer = patient.completions.create(**GIVEN, max_tokens=1)
    return {"stranger": stranger, "second": second, "later": len(answer.choices)}


if __name__ == "__main__":
    json.dump(main(*sys.argv[1:]), sys.stdout)
