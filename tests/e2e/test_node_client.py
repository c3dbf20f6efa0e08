"""Another language: a Node client that knows the service only from what `crossdock proto export` wrote."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from crossdock.client import Client, Generation
from tests.e2e.conftest import crossdock

SCRIPT = Path(__file__).parent / "node" / "generate.js"
PACKAGES = ("@grpc/grpc-js@1.14.7", "@grpc/proto-loader@0.8.1")
PROMPT, MAX_TOKENS = "The capital of France is", 12


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


def test_a_node_client_streams_the_tokens_that_the_python_client_streams(node, exact_stack, tmp_path):
    exported = crossdock("proto", "export", str(tmp_path))
    assert exported.returncode == 0 and "crossdock/v1/inference.proto" in exported.stdout
    argv = ["node", str(SCRIPT), str(tmp_path), exact_stack.grpc, PROMPT, str(MAX_TOKENS)]
    environ = {**os.environ, "NODE_PATH": str(node)}
    done = subprocess.run(argv, capture_output=True, text=True, timeout=90, check=False, env=environ)
    assert done.returncode == 0, done.stderr
    theirs = json.loads(done.stdout)
    with Client(exact_stack.grpc) as client:
        how = Generation(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
        ours = list(client.stream(PROMPT, how))
    assert theirs["tokenIds"] == [token for delta in ours for token in delta.token_ids]
    assert theirs["text"] == "".join(delta.text for delta in ours)
    assert theirs["finish"] == "FINISH_REASON_LENGTH"
    assert theirs["usage"]["completionTokens"] == MAX_TOKENS
