"""SMG's router over a gateway, which it takes for one vLLM engine: it is told an address and nothing else."""

import socket
import subprocess

import httpx
import pytest

from service.config import DEFAULT_MODEL

pytestmark = [pytest.mark.harness, pytest.mark.timeout(900)]

ASKED = {"model": DEFAULT_MODEL, "temperature": 0, "max_tokens": 12}
PROMPT = {**ASKED, "prompt": "The capital of France is"}
CHAT = {**ASKED, "messages": [{"role": "user", "content": "Name a colour."}]}
STARTING_S = 60


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@pytest.fixture(scope="module")
def router(environment, exact_stack, tmp_path_factory):
    """A client of it, once it has all that it needs to answer."""
    smg = environment("smg", "smg==1.13.0")
    port, metrics = free_port(), free_port()
    argv = [smg.program("smg"), "launch", "--worker-urls", f"grpc://{exact_stack.grpc}", "--host=127.0.0.1"]
    argv += [f"--port={port}", f"--prometheus-port={metrics}", "--load-monitor-interval=1"]
    with (tmp_path_factory.mktemp("smg") / "log").open("w+") as log:
        process = subprocess.Popen(argv, stdout=log, stderr=log, cwd=smg.folder)
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
                for _ in range(STARTING_S):
                    if answers(client):
                        break
                    with pytest.raises(subprocess.TimeoutExpired):  # it has not ended
                        process.wait(1)
                yield client
        finally:
            process.kill()
            process.wait()


def answers(client):
    try:
        return client.post("/v1/completions", json=PROMPT).is_success
    except httpx.TransportError:
        return False


@pytest.mark.parametrize(("path", "asked"), [("/v1/completions", PROMPT), ("/v1/chat/completions", CHAT)])
def test_an_answer_through_the_router_is_ours(router, exact_stack, path, asked):
    ours = httpx.post(exact_stack.http + path, json=asked, timeout=60).json()
    theirs = router.post(path, json=asked).json()
    for name in ("text", "message", "finish_reason"):
        told = [each["choices"][0].get(name) for each in (theirs, ours)]
        said = [each["content"] if isinstance(each, dict) else each for each in told]
        assert said[0] == said[1]
    for name in ("prompt_tokens", "completion_tokens"):
        assert theirs["usage"][name] == ours["usage"][name]


def test_the_router_is_told_how_much_there_is_room_for(router):
    (load,) = router.get("/get_loads").json()["loads"]
    assert load["max_running_requests"] > 0 and load["max_total_num_tokens"] > 0
