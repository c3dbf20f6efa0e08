"""Another language: a Node client that knows the service only from what `crossdock proto export` wrote."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from crossdock.client import Client, Generation
from service.errors import Unavailable
from tests.e2e.conftest import crossdock
from tests.fakes.gateways import documented_service_config, gateways_well

SCRIPTS = Path(__file__).parent / "node"
PACKAGES = ("@grpc/grpc-js@1.14.7", "@grpc/proto-loader@0.8.1")
PROMPT, MAX_TOKENS = "The capital of France is", 12
CALLS = 40


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    """A folder with the packages in it. Skips where there is no Node, or no registry to install from."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node and npm are not installed")
    folder = tmp_path_factory.mktemp("node")
    argv = ["npm", "install", "--prefix", str(folder), "--no-audit", "--no-fund", "--ignore-scripts"]
    argv += ["--prefer-offline", "--fetch-retries=0", *PACKAGES]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        pytest.skip(f"npm cannot install {' '.join(PACKAGES)}: {done.stderr.strip().splitlines()[-1:]}")
    return folder / "node_modules"


def run(node, script, protos, *argv):
    """What a script prints, which is JSON. protos: a folder for the contracts."""
    exported = crossdock("proto", "export", str(protos))
    assert exported.returncode == 0 and "crossdock/v1/inference.proto" in exported.stdout
    words = ["node", str(SCRIPTS / script), str(protos), *argv]
    environ = {**os.environ, "NODE_PATH": str(node)}
    done = subprocess.run(words, capture_output=True, text=True, timeout=90, check=False, env=environ)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_node_client_streams_the_tokens_that_the_python_client_streams(node, exact_stack, tmp_path):
    theirs = run(node, "generate.js", tmp_path, exact_stack.grpc, PROMPT, str(MAX_TOKENS))
    with Client(exact_stack.grpc) as client:
        how = Generation(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
        ours = list(client.stream(PROMPT, how))
    assert theirs["tokenIds"] == [token for delta in ours for token in delta.token_ids]
    assert theirs["text"] == "".join(delta.text for delta in ours)
    assert theirs["finish"] == "FINISH_REASON_LENGTH"
    assert theirs["usage"]["completionTokens"] == MAX_TOKENS


def test_by_the_documented_config_a_node_client_goes_round_and_comes_again_when_it_was_refused(
    node, tmp_path
):
    """Two gateways, of which each refuses some calls: as many as are tried again, then one more."""
    config = documented_service_config()
    tries = config["methodConfig"][0]["retryPolicy"]["maxAttempts"]
    with gateways_well(2) as (one, other):
        left = [Unavailable("not now", retry_after_ms=1) for _ in range(2 * tries - 1)]
        one.refusals = other.refusals = left
        target = f"ipv4:{one.address},{other.address}"
        came = run(node, "tokenize.js", tmp_path, target, json.dumps(config), str(CALLS))
    assert [each["code"] for each in came] == ["UNAVAILABLE"] + ["OK"] * (CALLS - 1)
    assert {token for each in came[1:] for token in each["tokenIds"]} == {0, 1}
    assert one.calls + other.calls == 2 * tries + CALLS - 2
