"""NVIDIA's load generator, on streamed chats."""

import json

import pytest

from service.config import DEFAULT_MODEL
from service.gguf_vocabulary import read_gguf
from service.model_source import resolve_model

pytestmark = [pytest.mark.harness, pytest.mark.timeout(900)]

REQUESTS, TOKENS = 12, 16


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """The model's, as a folder of Hugging Face's."""
    folder = tmp_path_factory.mktemp("tokenizer")
    read_gguf(resolve_model(DEFAULT_MODEL)).backend.save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return folder


@pytest.fixture(scope="module")
def profile(environment, exact_stack, tokenizer, tmp_path_factory):
    """What aiperf exports of a short run."""
    aiperf = environment("aiperf", "aiperf==0.13.0")
    out = tmp_path_factory.mktemp("aiperf")
    argv = [
        "aiperf",
        "profile",
        "--model",
        DEFAULT_MODEL,
        "--url",
        exact_stack.http,
        "--endpoint-type",
        "chat",
    ]
    argv += ["--streaming", "--request-count", str(REQUESTS), "--concurrency", "3"]
    argv += ["--synthetic-input-tokens-mean", "40", "--output-tokens-mean", str(TOKENS)]
    argv += ["--extra-inputs", f"min_tokens:{TOKENS}", "--extra-inputs", "ignore_eos:true"]
    argv += [
        "--tokenizer",
        str(tokenizer),
        "--use-server-token-count",
        "--ui",
        "none",
        "--artifact-dir",
        str(out),
    ]
    aiperf.run(*argv, timeout=600)
    (exported,) = out.rglob("profile_export_aiperf.json")
    return json.loads(exported.read_text())


def test_every_request_of_a_load_generator_is_answered_in_full(profile):
    assert profile["request_count"]["avg"] == REQUESTS
    assert profile.get("error_request_count", {"avg": 0})["avg"] == 0
    assert profile["output_sequence_length"]["avg"] == TOKENS
    assert profile["time_to_first_token"]["avg"] > 0 and profile["inter_token_latency"]["avg"] > 0
