"""Starting, refusing to start, and ending."""

import asyncio
import os
import select
import signal
import subprocess
import sys

import grpc
import httpx
import pytest

from crossdock.v1 import inference_pb2, inference_pb2_grpc
from tests.e2e.conftest import ROOT, running_stack, spec


def serve(*flags):
    argv = [sys.executable, "-m", "commands.main", "serve", "--grpc-port", "0", "--http-port", "0", *flags]
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"\x00" * 4096, b"GGUF\x03\x00\x00\x00" + b"\xff" * 64])
def test_an_unreadable_model_file_is_one_clear_line_and_exit_code_2(tmp_path, content):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(content)
    done = serve("--model", str(broken))
    lines = done.stderr.strip().splitlines()
    assert done.returncode == 2, done.stderr
    assert len(lines) == 1 and "broken.gguf" in lines[0], done.stderr
    assert done.stdout == ""


def test_an_unknown_model_is_one_clear_line_and_exit_code_2():
    done = serve("--model", "no-such-model")
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1 and "no-such-model" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_when_serve_ends_by_any_signal_its_children_are_gone(number, shallow_model):
    with running_stack(*shallow_model, "--num-gpu-blocks-override", "64") as stack:
        pids = stack.children()
        assert set(pids) == {"gateway", "prefill-0", "decode-0"}
        watched = [os.pidfd_open(pid) for pid in pids.values()]
        stack.process.send_signal(number)
        code = stack.process.wait(timeout=20)
        for descriptor in watched:
            gone(descriptor)
    assert code == (-signal.SIGKILL if number == signal.SIGKILL else 0)


async def test_answers_that_outlive_the_shutdown_timeout_are_told_and_processes_end_by_themselves(capfd):
    """On every face, streamed and whole, and nobody is killed."""
    long = {"prompt": "Once", "max_tokens": 4000, "ignore_eos": True}
    flags = ("--kv-cache-memory-bytes", "512MiB", "--shutdown-timeout", "2")
    with running_stack(*flags) as stack:
        async with (
            grpc.aio.insecure_channel(stack.grpc) as channel,
            httpx.AsyncClient(base_url=stack.http, timeout=60) as client,
        ):
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            wish = spec(
                "Once", sampling={"max_tokens": 4000}, stop=inference_pb2.StopConditions(ignore_eos=True)
            )
            streamed = stub.GenerateStream(inference_pb2.GenerateStreamRequest(spec=wish))
            whole = stub.Generate(inference_pb2.GenerateRequest(spec=wish))
            plain = asyncio.create_task(client.post("/v1/completions", json=long))
            events = asyncio.create_task(client.post("/v1/completions", json=long | {"stream": True}))
            while stack.audit().live_requests < 4:
                await asyncio.sleep(0.05)
            await streamed.read()
            stack.process.terminate()
            answer, said = await plain, (await events).text
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")
            assert '"code":"draining"' in said.split("data: ")[-1] and "[DONE]" not in said
            with pytest.raises(grpc.aio.AioRpcError):
                while await streamed.read():
                    continue
            for call, code in ((streamed, grpc.StatusCode.ABORTED), (whole, grpc.StatusCode.UNAVAILABLE)):
                assert await call.code() is code
                assert b"DRAINING" in dict(await call.trailing_metadata())["grpc-status-details-bin"]
        assert stack.process.wait(timeout=60) == 0
    told = capfd.readouterr().err
    assert "killed" not in told and "Traceback" not in told


def gone(descriptor, timeout_s=20):
    """Wait until the process behind a pidfd has ended."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    assert poll.poll(timeout_s * 1000), "still running"
    os.close(descriptor)
