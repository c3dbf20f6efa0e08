"""The load client against a server that answers a token every few milliseconds."""

import asyncio
import json
import threading

import pytest
from aiohttp import web

from benchmarks.serving.__main__ import main

TOKEN_S = 0.002


class FakeServer:
    """asked: bodies of completions. running: now, and at most."""

    def __init__(self, *, tokenize=True, fails=False):
        self.asked, self.running, self.most, self.fails = [], 0, 0, fails
        self._app = web.Application(client_max_size=1 << 24)
        self._app.router.add_get("/v1/models", self._models)
        self._app.router.add_post("/v1/completions", self._completions)
        if tokenize:
            self._app.router.add_post("/tokenize", self._tokenize)

    async def _models(self, request):
        return web.json_response({"data": [{"id": "fake"}]})

    async def _tokenize(self, request):
        word = (await request.json())["prompt"]
        return web.json_response({"tokens": [sum(word.encode())]})

    async def _completions(self, request):
        body = await request.json()
        if self.fails and len(self.asked) > 0:
            return web.json_response({"error": {"message": "no"}}, status=503)
        self.asked.append(body)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            response = web.StreamResponse()
            await response.prepare(request)
            for number in range(1, body["max_tokens"] + 1):
                await asyncio.sleep(TOKEN_S)
                usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": number}
                event = json.dumps({"choices": [{"text": " x"}], "usage": usage})
                await response.write(f"data: {event}\n\n".encode())
            await response.write(b"data: [DONE]\n\n")
            return response
        finally:
            self.running -= 1

    async def _serve(self):
        runner = web.AppRunner(self._app, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._ready.set()
        await self._stop.wait()
        await runner.cleanup()

    def __enter__(self):
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()
        self._ready.wait(10)
        return self

    def __exit__(self, *failure):
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)


@pytest.fixture
def server():
    with FakeServer() as made:
        yield made


def measured(tmp_path, *arguments):
    out = tmp_path / "out.json"
    main([*arguments[:-1], "--out", str(out), *arguments[-1]])
    return [each["rounds"] for each in json.loads(out.read_text())["results"]]


def test_a_closed_loop_keeps_so_many_requests_running(server, tmp_path):
    way = ["run", "--concurrency", "4", "--requests", "12", "--prompt", "16", "--answer", "20"]
    (((figures,),)) = (measured(tmp_path, "--url", server.url, way)[0],)
    assert server.most == 4 and len(server.asked) == 1 + 12, "and one to warm up"
    assert figures["requests"] == figures["ttft_ms"]["count"] == 12
    assert figures["failures"] == {} and figures["short_answers"] == figures["prompts_counted_otherwise"] == 0
    assert figures["itl_ms"]["count"] == 12 * 19 and figures["tokens_per_chunk"] == 1.0
    body = server.asked[-1]
    assert body["ignore_eos"] and body["temperature"] == 0 and len(body["prompt"]) == 16
    assert len({tuple(each["prompt"]) for each in server.asked}) == 13, "each prompt is new"


def test_an_open_loop_sends_whatever_the_server_does(server, tmp_path):
    way = ["run", "--rate", "200", "--requests", "40", "--prompt", "8", "--answer", "100"]
    ((figures,),) = measured(tmp_path, "--url", server.url, way)
    assert server.most > 8
    assert figures["requests"] == 40 and figures["failures"] == {}


def test_two_servers_stand_side_by_side_with_their_ratio(server, tmp_path, capsys):
    with FakeServer() as other:
        way = ["prefill", "--lengths", "32", "64", "--repeat", "2"]
        first, second = measured(tmp_path, "--url", server.url, "--url", other.url, "--rounds", "2", way)
        assert len(first) == len(second) == 2
        assert len(other.asked) == 2 * (1 + 4)
    assert first[0]["64 tokens"]["ttft_ms"]["count"] == 2
    lines = [
        line for line in capsys.readouterr().out.splitlines() if line.startswith("64 tokens.ttft_ms.p50")
    ]
    assert len(lines) == 1 and lines[0].endswith("x")


def test_interference_looks_at_streams_before_and_while_long_prompts_come(server, tmp_path):
    way = ["interference", "--streams", "3", "--answer", "30", "--prompt", "8", "--before-s", "0.3"]
    way += ["--long-prompt", "500", "--longs", "4", "--long-answer", "5"]
    ((figures,),) = measured(tmp_path, "--url", server.url, way)
    assert figures["failures"] == [] and figures["long_ttft_ms"]["count"] == 4
    assert figures["before"]["itl_ms"]["count"] > 20 and figures["during"]["itl_ms"]["count"] > 3
    assert sum(len(body["prompt"]) == 500 for body in server.asked) == 4


def test_a_sweep_ends_at_the_first_rate_that_does_not_keep_the_limits(server, tmp_path):
    way = ["sweep", "--rates", "50", "100", "--seconds", "0.2", "--ttft-ms", "0.001"]
    ((figures,),) = measured(tmp_path, "--url", server.url, way)
    assert figures["best_rate"] == 0.0 and "100.0/s" not in figures


def test_failures_are_told(tmp_path, capsys):
    with FakeServer(fails=True) as server:
        ((figures,),) = measured(tmp_path, "--url", server.url, ["run", "--requests", "3"])
    ((told, times),) = figures["failures"].items()
    assert told.startswith("http 503") and times == 3
    assert "http 503" in capsys.readouterr().out


def test_a_server_without_tokenize_needs_a_tokenizer_file():
    with FakeServer(tokenize=False) as server, pytest.raises(SystemExit, match="--tokenizer"):
        main(["--url", server.url, "run"])
