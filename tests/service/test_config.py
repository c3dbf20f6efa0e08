"""Settings: where they come from, which source wins, and how mistakes are told."""

import pytest
from pydantic import ValidationError

from service import config
from service.config import DecodeWorkerOptions, GatewayOptions, ServeOptions, WorkerOptions
from service.flags import ConfigError

KEY = "0f" * 32
WORKER = ["--listen=unix:/run/x.grpc", "--worker-id=decode-0"]


def mistakes(model, argv, environ=None) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as raised:
        config.load(model, argv, environ or {})
    return raised.value.lines


@pytest.fixture
def file(tmp_path):
    def write(text: str, name: str = "serve.toml") -> str:
        path = tmp_path / name
        path.write_text(text)
        return f"--config={path}"

    return write


def test_without_any_source_the_defaults_hold():
    options = config.load(ServeOptions, [], {})
    assert (options.grpc_port, options.http_port) == (50051, 8000)
    assert (options.prefill, options.decode, options.threads) == (1, 1, None)
    assert (options.max_num_seqs, options.max_num_batched_tokens, options.block_size) == (64, 256, 16)


def test_a_flag_wins_over_the_environment_and_that_over_the_file(file):
    path = file("block-size = 32\nmax_num_seqs = 5\nseed = 7\n")
    environ = {"CROSSDOCK_MAX_NUM_SEQS": "6", "CROSSDOCK_SEED": "8"}
    options = config.load(ServeOptions, [path, "--seed", "9"], environ)
    assert (options.block_size, options.max_num_seqs, options.seed) == (32, 6, 9)


@pytest.mark.parametrize("name", ["serve.toml", "serve.yaml", "serve.yml"])
def test_files_are_toml_or_yaml_by_their_name(file, name):
    text = "max-num-seqs = 3" if name.endswith("toml") else "max-num-seqs: 3"
    assert config.load(ServeOptions, [file(text, name)], {}).max_num_seqs == 3


def test_a_pool_takes_the_shared_engine_except_where_it_says_otherwise(file):
    path = file("prefill-block-size = 32\n")
    argv = [path, "--max-num-seqs=8", "--decode-max-num-seqs=128", "--prefill-max-num-batched-tokens=2k"]
    options = config.load(ServeOptions, argv, {"CROSSDOCK_DECODE_SEED": "4"})
    prefill, decode = options.prefill_engine, options.decode_engine
    assert (prefill.max_num_seqs, prefill.max_num_batched_tokens, prefill.block_size) == (8, 2000, 32)
    assert (decode.max_num_seqs, decode.max_num_batched_tokens, decode.block_size) == (128, 256, 16)
    assert (prefill.seed, decode.seed) == (0, 4)


@pytest.mark.parametrize(
    ("text", "tokens"), [("32768", 32768), ("32k", 32000), ("32K", 32768), ("1.5k", 1500), ("1m", 1_000_000)]
)
def test_token_counts_take_suffixes(text, tokens):
    assert config.load(ServeOptions, ["--max-model-len", text], {}).max_model_len == tokens


@pytest.mark.parametrize(
    ("text", "size"),
    [("2GiB", 2 << 30), ("2G", 2 << 30), ("2GB", 2_000_000_000), ("2g", 2_000_000_000), ("512", 512)],
)
def test_sizes_take_suffixes(text, size):
    assert config.load(ServeOptions, ["--kv-cache-memory-bytes", text], {}).kv_cache_memory_bytes == size


def test_every_mistake_of_every_source_is_told_at_once(file):
    path = file("max-num-seqs = 0\nmax_nun_seqs = 1\n")
    lines = mistakes(
        ServeOptions,
        [path, "--prefil", "2", "--block-size=x", "--decode-threads=0", "extra"],
        {"CROSSDOCK_SEED": "abc", "CROSSDOCK_SEEED": "1"},
    )
    expected = [
        ("--prefil:", "did you mean --prefill?"),
        ("extra:", "unexpected"),
        ("serve.toml: max_nun_seqs:", "did you mean --max-num-seqs?"),
        ("CROSSDOCK_SEEED:", "unknown"),
        ("--max-num-seqs", "serve.toml"),
        ("--seed", "CROSSDOCK_SEED"),
        ("--block-size:", "integer"),
        ("--decode-threads:", "greater"),
    ]
    for parts in expected:
        assert [line for line in lines if all(part in line for part in parts)], (parts, lines)
    assert len(lines) == len(expected)
    assert all("\n" not in line for line in lines)


def test_a_shared_setting_that_is_wrong_is_told_once():
    assert len(mistakes(ServeOptions, ["--max-num-seqs=0"])) == 1


def test_what_is_required_is_named():
    lines = mistakes(DecodeWorkerOptions, [])
    assert {line.split(":")[0] for line in lines} == {
        "--listen",
        "--worker-id",
        "--ticket-key",
        "--kv-listen",
    }


def test_ways_of_blocks_besides_the_automatic_ones_are_in_the_order_given():
    worker = [*WORKER, f"--ticket-key={KEY}"]
    options = config.load(WorkerOptions, [*worker, "--kv-transports=nccl,auto,gloo,nccl"], {})
    assert options.kv_backends() == ("nccl", "gloo")
    assert config.load(WorkerOptions, worker, {}).kv_backends() == ()
    assert mistakes(WorkerOptions, [*worker, "--kv-transports=mpi"])[0].startswith("--kv-transports")


def test_a_variable_of_another_command_is_no_mistake():
    environ = {"CROSSDOCK_HTTP_PORT": "80", "CROSSDOCK_TICKET_KEY": KEY, "HOME": "/"}
    assert config.load(WorkerOptions, WORKER, environ).worker_id == "decode-0"


@pytest.mark.parametrize(
    ("argv", "name"),
    [
        (["--listen=nowhere"], "--listen"),
        (["--listen=host:70000"], "--listen"),
        (["--ticket-key=0f0f"], "--ticket-key"),
        (["--ticket-key=@/nowhere/key"], "--ticket-key"),
        (["--worker-id=a b"], "--worker-id"),
        (["--dtype=int8"], "--dtype"),
        (["--max-model-len=many"], "--max-model-len"),
        (["--kv-cache-memory-bytes=2 apples"], "--kv-cache-memory-bytes"),
        (["--cores=0,x"], "--cores"),
        (["--cores=3-1"], "--cores"),
        (["--seed"], "--seed"),
    ],
)
def test_a_bad_value_is_refused_by_its_flags_name(argv, name):
    lines = mistakes(WorkerOptions, [*WORKER, *argv], {"CROSSDOCK_TICKET_KEY": KEY})
    assert len(lines) == 1
    assert lines[0].startswith(name)


@pytest.mark.parametrize(
    ("flag", "rule"),
    [
        ("--kv-listen=http://x", "an endpoint is tcp://host:port, with a port up to 65535, or ipc://path"),
        ("--kv-listen=udp://", "an endpoint is tcp://host:port, with a port up to 65535, or ipc://path"),
        ("--kv-listen=tcp://host", "an endpoint is tcp://host:port, with a port up to 65535, or ipc://path"),
        (
            "--kv-listen=tcp://h:99999",
            "an endpoint is tcp://host:port, with a port up to 65535, or ipc://path",
        ),
        (
            "--kv-listen=tcp://unix:x",
            "an endpoint is tcp://host:port, with a port up to 65535, or ipc://path",
        ),
        ("--kv-listen=", "at least one is needed"),
        ("--kv-advertise=ipc:///x", "an endpoint that others dial is tcp://host:port"),
        ("--kv-advertise=tcp://host:0", "an endpoint that others dial is tcp://host:port"),
    ],
)
def test_a_bad_endpoint_is_refused_once_by_its_flags_name_and_rule(flag, rule):
    listen = [] if flag.startswith("--kv-listen") else ["--kv-listen=ipc:///x"]
    lines = mistakes(DecodeWorkerOptions, [*WORKER, *listen, flag], {"CROSSDOCK_TICKET_KEY": KEY})
    assert lines == (f"{flag.partition('=')[0]}: {rule}",)


def test_each_wrong_item_of_a_list_is_told_and_nothing_besides():
    lines = mistakes(
        GatewayOptions, ["--prefill-workers=a:1", "--decode-workers=x,y"], {"CROSSDOCK_TICKET_KEY": KEY}
    )
    rule = "--decode-workers: an address is host:port, with a port up to 65535, or unix:path"
    assert lines == (rule, rule)


@pytest.mark.parametrize("flag", ["--kv-listen=tcp://127.0.0.1:0", "--kv-advertise=tcp://a:1"])
def test_a_prefill_worker_takes_no_flag_for_endpoints_that_it_has_not(flag):
    (line,) = mistakes(WorkerOptions, [*WORKER, flag], {"CROSSDOCK_TICKET_KEY": KEY})
    assert line.startswith(f"{flag.partition('=')[0]}: unknown flag")


@pytest.mark.parametrize("text", ["= 3", "a = [", "- 1\n"])
def test_a_broken_file_is_one_line(file, text):
    name = "x.yaml" if text.startswith("-") else "x.toml"
    assert [line for line in mistakes(ServeOptions, [file(text, name)]) if line.startswith("--config")]


def test_a_missing_file_is_one_line(tmp_path):
    lines = mistakes(ServeOptions, [f"--config={tmp_path / 'none.toml'}"])
    assert len(lines) == 1
    assert "No such file" in lines[0]


def test_options_cannot_be_changed():
    options = config.load(ServeOptions, [], {})
    with pytest.raises(ValidationError):
        options.grpc_port = 1


def test_secrets_come_from_files_and_are_not_shown(tmp_path):
    (tmp_path / "key").write_text(KEY + "\n")
    options = config.load(WorkerOptions, [*WORKER, f"--ticket-key=@{tmp_path / 'key'}"], {})
    assert options.ticket_key.get_secret_value() == bytes.fromhex(KEY)
    assert "0f0f" not in repr(options)


def test_a_bad_secret_is_not_repeated():
    lines = mistakes(WorkerOptions, WORKER, {"CROSSDOCK_TICKET_KEY": "topsecret"})
    assert not [line for line in lines if "topsecret" in line]


@pytest.mark.parametrize(
    ("model", "argv"),
    [
        (
            ServeOptions,
            [
                "--prefill=2",
                "--decode-max-num-seqs=3",
                "--cores=0,1",
                "--no-enable-reflection",
                "--async-scheduling",
            ],
        ),
        (GatewayOptions, ["--prefill-workers=a:1,b:2", "--decode-workers=unix:/x", "--decode-workers=c:3"]),
        (DecodeWorkerOptions, [*WORKER, "--kv-listen=tcp://127.0.0.1:0,ipc:///x", "--seed=-4"]),
    ],
)
def test_flags_written_from_options_give_the_options_again(model, argv):
    secrets = {} if model is ServeOptions else {"CROSSDOCK_TICKET_KEY": KEY}
    options = config.load(model, argv, secrets)
    written = config.to_argv(options)
    assert config.load(model, written, secrets) == options
    assert not [argument for argument in written if KEY in argument]


def test_a_child_inherits_no_setting_but_the_secrets():
    environ = {"PATH": "/bin", "CROSSDOCK_SEED": "3", "CROSSDOCK_TICKET_KEY": "old"}
    child = config.child_environment(environ, {"ticket_key": KEY})
    assert child["PATH"] == "/bin"
    assert {name: value for name, value in child.items() if name.startswith("CROSSDOCK_")} == {
        "CROSSDOCK_TICKET_KEY": KEY
    }


def test_help_names_every_flag(capsys):
    with pytest.raises(SystemExit) as ended:
        config.load(ServeOptions, ["--help"], {})
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    for name in (
        "--max-num-seqs",
        "--grpc-port",
        "--config",
        "--prefill-<engine flag>",
        "--decode-<engine flag>",
    ):
        assert name in shown
