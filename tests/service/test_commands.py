"""The `crossdock` command: what it loads, and what it shows."""

import subprocess
import sys
from concurrent import futures

import grpc
import pytest

from commands.main import VERBS, main
from crossdock.client import AsyncClient, Client, FinishReason, Generation, Message, RequestError
from crossdock.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc
from service import status
from service.errors import Exhausted, FieldViolation, InvalidRequest


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False, timeout=60
    )


HEAVY = "{'torch', 'grpc', 'pydantic', 'google', 'numpy', 'engine', 'service'}"


@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_help_and_version_load_nothing_heavy(flag):
    result = python(
        "import sys; from commands.main import main; main(sys.argv[1:]);"
        f"print(sorted({HEAVY} & set(sys.modules)))",
        flag,
    )
    assert result.stdout.splitlines()[-1] == "[]", result.stderr


def test_help_names_every_command(capsys):
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert [verb for verb in VERBS if verb not in shown] == []


def test_an_unknown_command_is_one_line(capsys):
    assert main(["sereve"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


BASE_INSTALL = """
import sys
ALLOWED = sys.stdlib_module_names | {"grpc", "google", "crossdock", "commands", "typing_extensions"}

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] not in ALLOWED or name.startswith(("google.rpc", "google.api")):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
from commands.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("verb", [["generate", "hello"], ["audit"], ["status"]])
def test_light_commands_need_the_client_only(verb):
    result = python(BASE_INSTALL, *verb, "--target=127.0.0.1:1", "--timeout=20")
    assert result.returncode == 1, result.stderr
    assert "UNAVAILABLE" in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_command_that_is_not_installed_says_what_to_install():
    result = python(BASE_INSTALL, "serve")
    assert result.returncode == 2
    assert "crossdock[serve]" in result.stderr
    assert result.stderr.count("\n") == 1


class Inference(inference_pb2_grpc.InferenceServiceServicer):
    """Answers with two deltas; a top_p of 2 and a max_tokens of 999 are refused as the gateway would."""

    def __init__(self) -> None:
        self.specs = []

    def GenerateStream(self, request, context):
        self._check(request.spec, context)
        text = inference_pb2.SequenceDelta(text="Hé", token_ids=[5, 6])
        text.logprobs.token_logprobs.extend([-0.5, -1.0])
        text.logprobs.top_count = 1
        text.logprobs.top_token_ids.extend([5, 7])
        text.logprobs.top_logprobs.extend([-0.5, -0.75])
        yield inference_pb2.GenerateStreamResponse(deltas=[text], prompt_info={"prompt_tokens": 4})
        end = inference_pb2.SequenceDelta(text="llo", token_ids=[8], first_position=2)
        end.finish.reason = inference_pb2.FINISH_REASON_STOP
        usage = inference_pb2.Usage(prompt_tokens=4, completion_tokens=3)
        yield inference_pb2.GenerateStreamResponse(deltas=[end], usage=usage)

    def Generate(self, request, context):
        self._check(request.spec, context)
        output = inference_pb2.SequenceOutput(text="Hello", token_ids=[5, 6, 8])
        output.finish.reason = inference_pb2.FINISH_REASON_LENGTH
        return inference_pb2.GenerateResponse(
            request_id="r-1",
            outputs=[output, output],
            usage={"completion_tokens": 3},
            prompt_info={"seed": 9, "choice_seeds": [9, 10]},
        )

    def Tokenize(self, request, context):
        return inference_pb2.TokenizeResponse(token_ids=[len(request.text), len(request.chat.messages)])

    def Detokenize(self, request, context):
        return inference_pb2.DetokenizeResponse(text=" ".join(map(str, request.token_ids)))

    def ListModels(self, request, context):
        return inference_pb2.ListModelsResponse(
            models=[{"name": "m", "max_model_len": 8, "eos_token_ids": [2]}]
        )

    def _check(self, spec, context):
        self.specs.append(spec)
        if spec.sampling.top_p == 2:
            rule = FieldViolation(field="sampling.top_p", description="in (0, 1]")
            context.abort_with_status(status.to_status(InvalidRequest(rule)))
        if spec.sampling.max_tokens == 999:
            context.abort_with_status(status.to_status(Exhausted("full", retry_after_ms=70)))


class Control(control_pb2_grpc.ControlServiceServicer):
    """Answers with the books and the workers that it was given."""

    def __init__(self) -> None:
        self.audit = control_pb2.AuditResponse()
        self.workers = control_pb2.GetStatusResponse()
        self.metadata = {}

    def Audit(self, request, context):
        self.metadata = dict(context.invocation_metadata())
        return self.audit

    def GetStatus(self, request, context):
        return self.workers


@pytest.fixture(scope="module")
def gateway():
    """A fake gateway on loopback: its two services, and its address."""
    with futures.ThreadPoolExecutor(2) as threads:
        server = grpc.server(threads)
        server.inference, server.control = Inference(), Control()
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(server.inference, server)
        control_pb2_grpc.add_ControlServiceServicer_to_server(server.control, server)
        server.target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        yield server
        server.stop(None).wait()


def test_generate_streams_the_text(gateway, capsys):
    flags = [
        "--max-tokens",
        "7",
        "--top-k",
        "3",
        "--seed",
        "-4",
        "--stop",
        "a",
        "--stop",
        "b",
        "--temperature",
        "0.5",
    ]
    assert main(["generate", "hi there", "--target", gateway.target, *flags]) == 0
    assert capsys.readouterr().out == "Héllo\n"
    spec = gateway.inference.specs[-1]
    assert spec.text == "hi there"
    assert (spec.sampling.max_tokens, spec.sampling.top_k, spec.sampling.seed) == (7, 3, -4)
    assert (spec.sampling.temperature, list(spec.stop.strings)) == (0.5, ["a", "b"])
    assert not spec.sampling.HasField("top_p")


def test_generate_takes_penalties_and_biases(gateway, capsys):
    flags = ["--presence-penalty", "0.5", "--frequency-penalty", "-1", "--repetition-penalty", "1.5"]
    biases = ["--logit-bias", "5:-100", "--logit-bias", "7:2.5"]
    assert main(["generate", "hi", "--target", gateway.target, *flags, *biases]) == 0
    sampling = gateway.inference.specs[-1].sampling
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -1.0)
    assert (sampling.repetition_penalty, dict(sampling.logit_bias)) == (1.5, {5: -100.0, 7: 2.5})
    with pytest.raises(SystemExit):
        main(["generate", "hi", "--target", gateway.target, "--logit-bias", "5=1"])
    assert "argument --logit-bias: '5=1' is not ID:BIAS" in capsys.readouterr().err


def test_generate_is_greedy_unless_told(gateway):
    main(["generate", "hi", "--target", gateway.target])
    sampling = gateway.inference.specs[-1].sampling
    assert sampling.HasField("temperature")
    assert sampling.temperature == 0


def test_generate_takes_and_shows_token_ids(gateway, capsys):
    assert main(["generate", "1, 2 3", "--token-ids", "--target", gateway.target]) == 0
    assert list(gateway.inference.specs[-1].token_ids.ids) == [1, 2, 3]
    assert capsys.readouterr().out.split() == ["5", "6", "8"]


def test_generate_shows_logprobs_line_by_line(gateway, capsys):
    assert main(["generate", "x", "--logprobs", "1", "--target", gateway.target]) == 0
    assert capsys.readouterr().out.splitlines()[:2] == ["5\t-0.5000\t5:-0.5000", "6\t-1.0000\t7:-0.7500"]


def test_generate_can_be_a_conversation(gateway):
    main(["generate", "hi", "--system", "be brief", "--target", gateway.target])
    messages = gateway.inference.specs[-1].chat.messages
    assert [(message.role, message.content) for message in messages] == [
        ("system", "be brief"),
        ("user", "hi"),
    ]


def test_generate_names_the_field_that_was_refused(gateway, capsys):
    assert main(["generate", "x", "--top-p", "2", "--target", gateway.target]) == 1
    assert capsys.readouterr().err == "crossdock generate: INVALID_ARGUMENT: sampling.top_p: in (0, 1]\n"


def test_the_clients_errors_carry_reason_fields_and_delay(gateway):
    with Client(gateway.target) as client:
        with pytest.raises(RequestError) as refused:
            client.generate("x", Generation(top_p=2))
        with pytest.raises(RequestError) as full:
            list(client.stream("x", Generation(max_tokens=999)))
    assert (refused.value.code, refused.value.reason) == ("INVALID_ARGUMENT", "INVALID_REQUEST")
    assert [violation.field for violation in refused.value.violations] == ["sampling.top_p"]
    assert (full.value.reason, full.value.retry_after_ms) == ("QUEUE_FULL", 70)


def test_the_client_returns_values(gateway):
    with Client(gateway.target) as client:
        answer = client.generate([1, 2])
        assert (answer.text, answer.token_ids, answer.seed) == ("Hello", (5, 6, 8), 9)
        assert answer.finish is FinishReason.LENGTH
        assert [(choice.text, choice.seed) for choice in answer.choices] == [("Hello", 9), ("Hello", 10)]
        assert [delta.text for delta in client.stream("x")] == ["Hé", "llo"]
        assert client.tokenize("four") == (4, 0)
        assert client.tokenize([Message(role="user", content="x")]) == (0, 1)
        assert client.detokenize([7, 8]) == "7 8"
        assert [(model.name, model.max_model_len) for model in client.models()] == [("m", 8)]


async def test_the_asyncio_client_returns_the_same_values(gateway):
    async with AsyncClient(gateway.target) as client:
        assert (await client.generate("x")).text == "Hello"
        deltas = [delta async for delta in client.stream("x")]
        assert [delta.first_position for delta in deltas] == [0, 2]
        assert deltas[-1].finish is FinishReason.STOP
        assert deltas[-1].usage.completion_tokens == 3
        assert await client.tokenize("four") == (4, 0)
        assert await client.detokenize([7, 8]) == "7 8"
        assert (await client.models())[0].eos_token_ids == (2,)
        with pytest.raises(RequestError) as refused:
            await client.generate("x", Generation(top_p=2))
        assert refused.value.violations[0].description == "in (0, 1]"


SWAPPED = control_pb2.BlockOwner(kind="swapped", request_id="r", blocks=3)


def ledger(**blocks) -> control_pb2.WorkerLedger:
    return control_pb2.WorkerLedger(worker_id="decode-0", **blocks)


@pytest.mark.parametrize(
    ("books", "code", "shown"),
    [
        (
            {"ledgers": [ledger(total_blocks=8, free_blocks=6, cached_blocks=2)], "balanced": True},
            0,
            "balanced",
        ),
        (
            {
                "ledgers": [ledger(total_blocks=8, free_blocks=6, owned_blocks=2)],
                "balanced": True,
                "live_requests": 1,
            },
            0,
            "1 live requests; balanced",
        ),
        (
            {"ledgers": [ledger(total_blocks=8, free_blocks=6, owned_blocks=2)], "balanced": True},
            1,
            "2 blocks are owned, though nothing is live",
        ),
        (
            {"ledgers": [ledger(total_blocks=8, free_blocks=8, promised_blocks=3)], "balanced": True},
            1,
            "3 blocks are promised, though nothing is live",
        ),
        (
            {"ledgers": [ledger(total_blocks=8, free_blocks=8, owners=[SWAPPED])], "balanced": True},
            1,
            "3 blocks are swapped out, though nothing is live",
        ),
        (
            {"ledgers": [ledger(total_blocks=8, free_blocks=7)], "balanced": True},
            1,
            "7 blocks are accounted for, of 8",
        ),
        ({"ledgers": [ledger(violations=["block 3 has two owners"])], "balanced": True}, 1, "two owners"),
        ({"ledgers": [ledger(unreachable=True)], "balanced": True}, 1, "did not answer"),
        ({"ledgers": [], "balanced": False}, 1, "NOT balanced"),
    ],
)
def test_audit_fails_unless_the_books_balance(gateway, capsys, books, code, shown):
    gateway.control.audit = control_pb2.AuditResponse(**books)
    assert main(["audit", "--target", gateway.target]) == code
    assert shown in capsys.readouterr().out


def test_control_commands_carry_their_credential(gateway, tmp_path):
    (tmp_path / "token").write_text("s3cret\n")
    main(["audit", "--target", gateway.target, f"--control-token=@{tmp_path / 'token'}"])
    assert gateway.control.metadata["authorization"] == "Bearer s3cret"


def test_status_fails_while_a_worker_is_not_ready(gateway, capsys):
    worker = control_pb2.WorkerStatus(
        worker_id="prefill-0", role=control_pb2.WORKER_ROLE_PREFILL, reason="layout"
    )
    worker.state = control_pb2.WORKER_STATE_REFUSED
    gateway.control.workers = control_pb2.GetStatusResponse(workers=[worker])
    assert main(["status", "--target", gateway.target]) == 1
    assert "refused" in capsys.readouterr().out
    worker.state = control_pb2.WORKER_STATE_READY
    gateway.control.workers = control_pb2.GetStatusResponse(workers=[worker])
    assert main(["status", "--target", gateway.target]) == 0


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["serve", "--prefill=0"], "crossdock serve: --prefill: "),
        (["serve", "--model=/no/such.gguf"], "crossdock serve: --model: "),
        (["gateway", "--http-port=x"], "crossdock gateway: --http-port: "),
        (["decode-worker", "--dtype=int4"], "crossdock decode-worker: --dtype: "),
    ],
)
def test_a_process_that_cannot_start_exits_with_two(capfd, argv, line):
    assert main(argv) == 2
    assert line in capfd.readouterr().err
