"""What `serve` plans: processes that fit together, with cores of their own and no secret in sight."""

import re

import pytest

from commands import serve
from service import config
from service.config import DecodeWorkerOptions, GatewayOptions, ServeOptions, WorkerOptions
from service.flags import ConfigError

KEY = "ab" * 32


def read_back(spec, model):
    """The options that a planned process will have."""
    return config.load(model, spec.argv[4:], spec.environ)


def test_serve_plans_processes_that_fit_together(tmp_path):
    argv = [
        "--prefill=2",
        "--decode-threads=2",
        "--cores=4,5,6",
        "--decode-max-num-seqs=9",
        "--control-token=tok",
    ]
    options = config.load(ServeOptions, argv, {})
    first, second, target, front = serve.plan(options, tmp_path, {"CROSSDOCK_SEED": "5", "PATH": "/bin"}, KEY)
    prefills = [read_back(spec, WorkerOptions) for spec in (first, second)]
    decode, gateway = read_back(target, DecodeWorkerOptions), read_back(front, GatewayOptions)
    assert gateway.prefill_workers == tuple(worker.listen for worker in prefills)
    assert gateway.decode_workers == (decode.listen,)
    assert [worker.cores for worker in (*prefills, decode)] == [(4,), (5,), (6, 4)]
    assert (prefills[0].max_num_seqs, decode.max_num_seqs, decode.seed) == (64, 9, 0)
    assert {worker.ticket_key for worker in (*prefills, decode)} == {gateway.ticket_key}
    assert gateway.control_token.get_secret_value() == "tok"
    assert front.stage > target.stage


@pytest.mark.parametrize(
    ("argv", "dealt"),
    [
        (["--cores=0,1"], [(0,), (1,)]),
        (["--cores=0"], [(0,), (0,)]),
        (["--cores=0-2,5"], [(0, 1), (2, 5)]),
        (["--cores=0,1,2,3,4"], [(0, 1, 2), (3, 4)]),
        (["--cores=0,1,2,3,4,5", "--decode-threads=1"], [(0, 1, 2, 3, 4), (5,)]),
        (["--cores=0,1,2,3", "--threads=1"], [(0,), (1,)]),
        (["--cores=2,3", "--threads=4"], [(2, 3), (2, 3)]),
        (["--cores=0,1", "--prefill=2", "--decode=2"], [(0,), (1,), (0,), (1,)]),
    ],
)
def test_serve_deals_all_cores_unless_told_how_many(argv, dealt):
    assert list(serve.deal(config.load(ServeOptions, argv, {})).values()) == dealt


def test_serve_gives_every_worker_a_seat_of_its_own_on_the_board(tmp_path):
    options = config.load(ServeOptions, ["--prefill=2"], {})
    *specs, _ = serve.plan(options, tmp_path, {}, KEY, tmp_path / "board")
    models = {"prefill-worker": WorkerOptions, "decode-worker": DecodeWorkerOptions}
    workers = [read_back(spec, models[spec.argv[3]]) for spec in specs]
    assert [(worker.core_board, worker.core_seat) for worker in workers] == [
        (tmp_path / "board", seat) for seat in range(3)
    ]


def test_cores_are_lent_unless_somebody_minds_or_there_are_too_many_workers():
    for argv, lent in (([], True), (["--no-lend-cores"], False), (["--prefill=40", "--decode=40"], False)):
        with serve.core_board(config.load(ServeOptions, argv, {})) as board:
            assert (board is not None) == lent, argv


def test_what_a_dead_worker_left_on_the_board_is_cleared_and_what_others_left_is_not():
    options = config.load(ServeOptions, ["--cores=0,1"], {})
    seats = tuple(serve.deal(options))
    with serve.core_board(options) as board:
        at_rest = board.path.read_bytes()
        board.compute(seats.index("decode-0"))
        busy = board.path.read_bytes()
        for name in ("gateway", "prefill-0"):
            serve.vacate(board, seats, name)
            assert board.path.read_bytes() == busy != at_rest
        serve.vacate(board, seats, "decode-0")
        assert board.path.read_bytes() == at_rest


def test_serve_puts_no_secret_on_a_command_line(tmp_path):
    options = config.load(ServeOptions, ["--control-token=hush"], {})
    for spec in serve.plan(options, tmp_path, {}, KEY):
        assert not [argument for argument in spec.argv if KEY in argument or "hush" in argument]
        assert spec.environ["CROSSDOCK_TICKET_KEY"] == KEY


def test_workers_do_not_learn_the_control_token(tmp_path):
    options = config.load(ServeOptions, ["--control-token=hush"], {})
    *workers, front = serve.plan(options, tmp_path, {}, KEY)
    assert "CROSSDOCK_CONTROL_TOKEN" in front.environ
    assert not [spec for spec in workers if "CROSSDOCK_CONTROL_TOKEN" in spec.environ]


def test_serve_hands_the_gateway_all_that_keeps_its_door(tmp_path):
    argv = [
        "--tenant-weights=acme=4,batch=0.5",
        "--api-keys=/x/keys",
        "--ssl-certfile=/x/c",
        "--ssl-keyfile=/x/k",
        "--control-identities=a,b",
        "--queue-bytes-max=1GiB",
    ]
    *_, front = serve.plan(config.load(ServeOptions, argv, {}), tmp_path, {}, KEY)
    gateway = read_back(front, GatewayOptions)
    assert dict(gateway.tenant_weights) == {"acme": 4.0, "batch": 0.5}
    assert [str(path) for path in (gateway.api_keys, gateway.ssl_certfile, gateway.ssl_keyfile)] == [
        "/x/keys",
        "/x/c",
        "/x/k",
    ]
    assert (gateway.control_identities, gateway.queue_bytes_max) == (("a", "b"), 1 << 30)


@pytest.mark.parametrize("weights", ["acme", "acme=0", "=3", "acme=-1", "a b=1"])
def test_a_weight_that_is_none_is_refused_by_name(weights):
    with pytest.raises(ConfigError, match="--tenant-weights: a weight is name=number"):
        config.load(ServeOptions, [f"--tenant-weights={weights}"], {})


def test_cores_that_are_not_there_are_refused_before_anything_starts(capsys):
    assert serve.main(["--cores=0,9999"]) == 2
    assert re.fullmatch(r"crossdock serve: --cores: no core 9999 here: .*\n", capsys.readouterr().err)
