"""How a worker takes its KV transports from its settings, and what it says when it cannot have them."""

from types import SimpleNamespace

import pytest

from commands import process, worker
from decode_worker.role import DecodeRole
from kvtransfer import keys
from kvtransfer.identity import Identity
from service import config
from service.config import DecodeWorkerOptions
from tests.fakes.hash_model import hash_layout

DECODE = ["--worker-id=decode-0", "--listen=127.0.0.1:0", f"--ticket-key={'0f' * 32}"]


@pytest.fixture
def engine(monkeypatch):
    """Of a worker that needs no model to find out that it cannot start."""
    engine = SimpleNamespace(
        cache=SimpleNamespace(layout=hash_layout()),
        core=None,
        note="",
        device="cpu",
        config=SimpleNamespace(vocab_size=49152),
    )
    monkeypatch.setattr(worker, "assemble", lambda *arguments, **options: engine)
    monkeypatch.setattr(process.logs, "configure", lambda **options: None)
    return engine


@pytest.fixture
def folder(tmp_path):
    for name in ("prefill", "decode"):
        keys.make(tmp_path / "ring", name)
    return tmp_path / "ring"


def schemes(engine, *argv):
    options = config.load(DecodeWorkerOptions, [*DECODE, *argv], {})
    identity = Identity(worker_id=options.worker_id, epoch=1)
    target = DecodeRole().transport(options, engine, identity, lambda event: None)
    try:
        return [endpoint.partition("://")[0] for endpoint in target.endpoints()]
    finally:
        target.close()


def test_a_decode_worker_offers_the_fastest_way_first(engine, tmp_path):
    listen = f"--kv-listen=tcp://127.0.0.1:0,ipc://{tmp_path}/kv"
    assert schemes(engine, listen) == ["shm", "ipc", "tcp"]
    assert schemes(engine, listen, "--no-kv-shared-memory") == ["ipc", "tcp"]


def test_with_keys_it_listens_over_tcp_and_ipc(engine, tmp_path, folder):
    listen = f"--kv-listen=tcp://127.0.0.1:0,ipc://{tmp_path}/kv"
    assert schemes(engine, listen, f"--kv-key-folder={folder}") == ["shm", "ipc", "tcp"]


@pytest.mark.parametrize("verb", ["prefill", "decode"])
def test_a_bad_key_folder_is_one_line_and_exit_code_2(engine, folder, capsys, verb):
    (folder / f"{verb}.secret").chmod(0o644)
    main = {"prefill": process.prefill_worker_main, "decode": process.decode_worker_main}[verb]
    listen = ["--kv-listen=tcp://127.0.0.1:0"] if verb == "decode" else []
    arguments = [*DECODE, *listen, f"--worker-id={verb}-0", f"--kv-key-folder={folder}"]
    assert main(arguments) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith(f"crossdock {verb}-worker: {folder}/{verb}.secret: ")


REFUSED_WITHOUT_AN_ENGINE = [
    (["--kv-listen=tcp://0.0.0.0:5555"], "would listen on every interface"),
    (["--kv-listen=tcp://192.0.2.1:5555"], "other machines reach it"),
    (["--kv-listen=tcp://127.0.0.1:0", "--kv-transports=nccl"], "nccl"),
    (
        ["--kv-listen=tcp://127.0.0.1:0", "--kv-transports=gloo", "--kv-group-address=x"],
        "needs an IP address",
    ),
    (["--kv-listen=tcp://127.0.0.1:0", "--kv-key-folder=/no/where"], "no such folder"),
    (["--kv-listen=ipc:///x", "--kv-advertise=tcp://a:1"], "advertised"),
    (["--kv-listen=ipc:///dev/null"], "no socket"),
    (["--kv-listen=ipc:///x", "--listen=0.0.0.0:0"], "--allow-wildcard-bind"),
    (["--kv-listen=ipc:///x", "--listen=192.0.2.1:0"], "--allow-insecure"),
    (["--kv-listen=ipc:///x", "--ssl-certfile=/no/where"], "TLS needs both"),
]


@pytest.mark.parametrize(("flags", "why"), REFUSED_WITHOUT_AN_ENGINE)
def test_what_can_be_told_before_the_model_is_loaded_is_refused_before(monkeypatch, capsys, flags, why):
    monkeypatch.setattr(worker, "assemble", lambda *arguments, **options: pytest.fail("loaded"))
    monkeypatch.setattr(process.logs, "configure", lambda **options: None)
    assert process.decode_worker_main([*DECODE, *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert why in line


def test_a_prefill_worker_is_refused_before_the_model_is_loaded_as_well(monkeypatch, capsys):
    monkeypatch.setattr(worker, "assemble", lambda *arguments, **options: pytest.fail("loaded"))
    monkeypatch.setattr(process.logs, "configure", lambda **options: None)
    assert process.prefill_worker_main([*DECODE, "--kv-transports=nccl"]) == 2
    assert "nccl" in capsys.readouterr().err


def test_tcp_that_other_machines_reach_needs_keys_or_leave(engine, folder, capsys):
    arguments = [*DECODE, "--kv-listen=tcp://192.0.2.1:5555"]
    for allowed, complaint in [
        ([], "--kv-key-folder"),
        (["--allow-insecure-kv"], "tcp://192.0.2.1:5555: Cannot assign"),
        ([f"--kv-key-folder={folder}"], "tcp://192.0.2.1:5555: Cannot assign"),
    ]:
        assert process.decode_worker_main([*arguments, *allowed]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert complaint in line
