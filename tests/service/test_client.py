"""What the client refuses by itself, before anything is sent."""

import pytest

from crossdock.client import Client, Generation, Message, RequestError
from crossdock.credentials import Credentials


@pytest.mark.parametrize(
    ("how", "field"),
    [
        (Generation(seed=2**64), "seed"),
        (Generation(max_tokens=2**40), "max_tokens"),
        (Generation(stop_token_ids=(-1,)), "token_ids"),
        (Generation(logprobs=2**40), "logprobs"),
        (Generation(prompt_logprobs=2**40), "prompt_logprobs"),
        (Generation(truncate_prompt_tokens=2**40), "truncate_prompt_tokens"),
        (Generation(priority=2**40), "priority"),
        (Generation(logit_bias={-1: 1.0}), "logit_bias"),
        (Generation(logit_bias={2**32: 1.0}), "logit_bias"),
        (Generation(timeout_s=0.0), "timeout_s"),
        (Generation(timeout_s=float("nan")), "timeout_s"),
        (Generation(timeout_s=float("inf")), "timeout_s"),
        (Generation(json_schema={"a": object()}), "json_schema"),
        (Generation(choice=(5,)), "strings"),
        (Generation(regex="a", json_object=True), "json_object, regex"),
        (Generation(choice="abc"), "choice"),
        (Generation(stop="abc"), "stop"),
        (Generation(stop=("\ud800",)), "strings"),
        (Generation(cache_salt="\ud800"), "cache_salt"),
    ],
)
def test_what_no_message_can_say_is_refused_by_the_client_by_name(how, field):
    with Client("127.0.0.1:1") as client, pytest.raises(RequestError, match=f"INVALID_ARGUMENT: {field}"):
        client.generate("hello", how)


def test_token_ids_that_are_none_are_refused_by_the_client():
    with Client("127.0.0.1:1") as client, pytest.raises(RequestError, match="INVALID_ARGUMENT: ids"):
        client.generate([-1])


@pytest.mark.parametrize(
    ("prompt", "field"), [("caf\udce9", "text"), ([Message(role="user", content="\ud800")], "content")]
)
def test_text_that_is_not_unicode_is_refused_by_the_client(prompt, field):
    with Client("127.0.0.1:1") as client, pytest.raises(RequestError, match=f"{field}: is not valid Unicode"):
        client.generate(prompt)


@pytest.mark.parametrize(
    "part", [{"certificate": b"c", "private_key": b"k"}, {"certificate": b"c", "ca": b"a"}]
)
def test_a_part_of_what_tls_takes_is_no_reason_to_speak_without_it(part):
    with pytest.raises(ValueError, match="certificate"):
        Credentials(key="secret", **part)
