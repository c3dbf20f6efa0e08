"""Who may connect over tcp when there are keys, and who may listen when there are none."""

import stat
from dataclasses import replace

import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from commands import keys as keys_command
from kvtransfer import keys, wire
from kvtransfer.bind_rules import BindRules
from kvtransfer.errors import BindRefused, KeysRefused, Reason
from kvtransfer.identity import Identity
from kvtransfer.refusals import ENDPOINTS_MAX, Refusals
from kvtransfer.source_io import SourceLimits
from tests.kvtransfer.conftest import receive_all, send_all

REFUSED = (
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_AUTH
)


@pytest.fixture
def world(patient):
    return patient


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "ring"
    for name in ("source", "target", "other"):
        keys.make(folder, name)
    return folder


def null(raw, ring):
    """No security at all."""


def plain(raw, ring):
    raw.plain_username, raw.plain_password = b"source", b"password"


def wrong_server_key(raw, ring):
    raw.curve_secretkey, raw.curve_publickey = ring.secret, ring.public
    raw.curve_serverkey, _ = zmq.curve_keypair()


def unknown_client_key(raw, ring):
    raw.curve_publickey, raw.curve_secretkey = zmq.curve_keypair()
    raw.curve_serverkey = ring.trusted["target"]


def stolen_public_key(raw, ring):
    """Somebody else's public key without its secret half."""
    _, raw.curve_secretkey = zmq.curve_keypair()
    raw.curve_publickey, raw.curve_serverkey = ring.trusted["source"], ring.trusted["target"]


@pytest.mark.parametrize(
    "secure", [null, plain, wrong_server_key, unknown_client_key, stolen_public_key], ids=lambda f: f.__name__
)
def test_a_stranger_is_refused_before_any_message_and_others_go_on(world, ends, folder, large, secure):
    target, on_target = ends.new_target(keys=folder, layout=large)
    source, on_source = ends.new_source(keys=folder, layout=large)
    ring = keys.load(folder, "source")
    greeting = wire.Envelope(
        source_epoch=11, target_epoch=22, attempt=0, ticket_id=wire.NO_TICKET, message=world.hello()
    )
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        stranger.setsockopt(zmq.HANDSHAKE_IVL, 500)
        secure(stranger, ring)
        with stranger.get_monitor_socket(REFUSED | zmq.Event.HANDSHAKE_SUCCEEDED) as monitor:
            monitor.linger = 0
            stranger.connect(target.endpoints()[0])
            stranger.send(wire.encode(greeting))
            stranger.send(b"\xc1")
            assert monitor.poll(10_000)
            assert recv_monitor_message(monitor)["event"] & REFUSED
            ticket = world.ticket(layout=large)
            target.expect(ticket)
            sent = send_all(world, source, ticket, target.endpoints(), large)
            assert receive_all(target, on_target, ticket, large) == sent
            on_source.wait("Committed", ticket)
            assert stranger.poll(0) == 0
            stranger.disable_monitor()
    assert target.counters() == {"blocks_placed": 5}


def test_without_keys_or_with_unknown_ones_a_source_gives_up_rather_than_send(world, ends, folder, tmp_path):
    secured, _ = ends.new_target(keys=folder)
    open_to_all, _ = ends.new_target(kind="tcp")
    lonely = tmp_path / "lonely"
    for name in ("source", "somebody"):
        keys.make(lonely, name)
    check, no_key = "the handshake was refused: check the keys on both sides", "no public key of the target"
    cases = [
        (None, secured, check),
        (lonely, secured, no_key),
        (folder, open_to_all, check),
        (lonely, open_to_all, no_key),
    ]
    for source_keys, target, why in cases:
        warnings = []
        limits = SourceLimits(connect_ms=2000)
        source, on_source = ends.new_source(keys=source_keys, limits=limits, warn=warnings.append)
        for _ in range(2):
            ticket = world.ticket()
            source.open(world.seal(ticket), ticket, target.endpoints())
            failed = on_source.wait("Failed", ticket)
            assert failed.reason is Reason.HANDSHAKE_REFUSED
            assert failed.detail.startswith(why)
        assert warnings == [f"{target.endpoints()[0]}: {failed.detail}"], "once for each endpoint"
    assert secured.counters() == open_to_all.counters() == {}


def forge(folder, tmp_path, *, of):
    """A source's folder in which one end has another key than the other end thinks."""
    forged = tmp_path / "forged"
    keys.make(forged, of)
    kept = {"source": ["target.public"], "target": ["source.public", "source.secret"]}[of]
    for name in kept:
        (forged / name).write_bytes((folder / name).read_bytes())
        (forged / name).chmod(0o600)
    return forged


@pytest.mark.parametrize("of", ["source", "target"])
def test_keys_that_do_not_fit_are_told_to_the_operator(world, ends, folder, tmp_path, of):
    target, _ = ends.new_target(keys=folder)
    warnings = []
    limits = SourceLimits(connect_ms=2000)
    source, on_source = ends.new_source(
        keys=forge(folder, tmp_path, of=of), limits=limits, warn=warnings.append
    )
    ticket = world.ticket()
    source.open(world.seal(ticket), ticket, target.endpoints())
    failed = on_source.wait("Failed", ticket)
    assert (failed.reason, warnings) == (
        Reason.HANDSHAKE_REFUSED,
        [f"{target.endpoints()[0]}: the handshake was refused: check the keys on both sides"],
    )


def test_a_handshake_that_succeeds_again_is_told_once():
    told = []
    refusals = Refusals(told.append)
    for _ in range(2):
        refusals.refused("tcp://a:1", "no")
    refusals.refused("tcp://b:1", "no")
    for _ in range(2):
        refusals.succeeded("tcp://a:1")
    refusals.refused("tcp://a:1", "no")
    assert told == [
        "tcp://a:1: no",
        "tcp://b:1: no",
        "tcp://a:1: the handshake succeeds again",
        "tcp://a:1: no",
    ]


def test_endpoints_that_were_refused_are_bounded():
    told = []
    refusals = Refusals(told.append)
    for number in range(ENDPOINTS_MAX + 1):
        refusals.refused(f"tcp://a:{number}", "no")
    refusals.succeeded("tcp://a:0")
    assert len(told) == ENDPOINTS_MAX + 1


def test_a_worker_cannot_greet_under_the_name_of_another(world, ends, folder):
    target, _ = ends.new_target(keys=folder)
    impostor = folder.parent / "impostor"
    impostor.mkdir(mode=0o700)
    for file in folder.glob("*.public"):
        (impostor / file.name).write_bytes(file.read_bytes())
    stolen = impostor / "source.secret"
    stolen.write_bytes((folder / "other.secret").read_bytes())
    stolen.chmod(0o600)
    (impostor / "source.public").write_bytes((folder / "other.public").read_bytes())
    source, on_source = ends.new_source(keys=impostor)
    ticket = world.ticket()
    source.open(world.seal(ticket), ticket, target.endpoints())
    failed = on_source.wait("Failed", ticket)
    assert (failed.reason, failed.detail) == (Reason.HANDSHAKE_REFUSED, "source_id")


def test_a_key_serves_the_worker_of_its_name_and_its_replicas(folder):
    keys.make(folder, "source-a")
    for worker_id, name in [("source", "source"), ("source-b", "source"), ("source-a-1", "source-a")]:
        assert keys.load(folder, worker_id).public == (folder / f"{name}.public").read_bytes().strip()
    ring = keys.load(folder, "target-7")
    assert ring.key_of("source-a") == ring.trusted["source-a"] != ring.key_of("source-b")
    assert ring.key_of("sources") is None
    assert keys.serves("source", "source-b") and not keys.serves("source-b", "source")


def test_a_secret_key_is_not_shown(folder):
    ring = keys.load(folder, "source")
    assert ring.secret.decode() not in repr(ring)


def spoil_nothing_there(folder):
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()


def spoil_writable_by_others(folder):
    folder.chmod(0o777)


def spoil_no_secret(folder):
    (folder / "source.secret").unlink()


def spoil_readable_secret(folder):
    (folder / "source.secret").chmod(0o640)


def spoil_not_a_key(folder):
    (folder / "source.secret").write_text("secret")


def spoil_not_a_public_key(folder):
    (folder / "other.public").write_bytes(b"\xff" * 40)


def spoil_unreadable(folder):
    (folder / "broken.public").symlink_to(folder / "nowhere")


def spoil_pair(folder):
    (folder / "source.public").write_bytes((folder / "target.public").read_bytes())


def spoil_nobody_else(folder):
    for name in ("target", "other"):
        (folder / f"{name}.public").unlink()


@pytest.mark.parametrize(
    "spoil",
    [
        spoil_nothing_there,
        spoil_writable_by_others,
        spoil_no_secret,
        spoil_readable_secret,
        spoil_not_a_key,
        spoil_not_a_public_key,
        spoil_unreadable,
        spoil_pair,
        spoil_nobody_else,
    ],
    ids=lambda f: f.__name__,
)
def test_a_folder_that_cannot_be_used_is_refused_in_one_line_without_a_key_in_it(folder, spoil):
    secret = (folder / "source.secret").read_text().strip()
    spoil(folder)
    with pytest.raises(KeysRefused) as refused:
        keys.load(folder, "source")
    line = str(refused.value)
    assert line.startswith(str(folder)) and "\n" not in line and secret not in line


def test_the_command_makes_pairs_that_work_and_overwrites_none(tmp_path, capsys):
    folder = tmp_path / "new" / "keys"
    assert keys_command.main([str(folder), "prefill", "decode"]) == 0
    assert stat.S_IMODE(folder.stat().st_mode) & 0o077 == 0
    assert stat.S_IMODE((folder / "decode.secret").stat().st_mode) == 0o600
    ring = keys.load(folder, "decode-0")
    assert ring.key_of("prefill-3") == keys.load(folder, "prefill-3").public
    secret = (folder / "decode.secret").read_bytes()
    for bad in ("decode", "../outside", ""):
        assert keys_command.main([str(folder), bad]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert (folder / "decode.secret").read_bytes() == secret
    assert sorted(file.name for file in folder.iterdir()) == [
        "decode.public",
        "decode.secret",
        "prefill.public",
        "prefill.secret",
    ]


@pytest.mark.parametrize("address", ["tcp://10.1.2.3:5555", "tcp://[fe80::1%eth0]:0", "tcp://8.8.8.8:*"])
def test_without_keys_no_address_that_other_machines_reach_is_bound(ends, address):
    with pytest.raises(BindRefused, match="--kv-key-folder"):
        ends.new_target(address)
    BindRules(allow_wildcard=False, allow_remote=True).check(address)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:0", "tcp://127.9.9.9:1", "tcp://[::1]:0", "ipc:///x"])
def test_without_keys_this_machine_may_still_connect(address):
    BindRules(allow_wildcard=False, allow_remote=False).check(address)


def test_a_wildcard_is_refused_even_where_other_machines_may_connect():
    with pytest.raises(BindRefused, match="every interface"):
        BindRules(allow_wildcard=False, allow_remote=True).check("tcp://*:1")
    with pytest.raises(BindRefused, match="other machines"):
        BindRules(allow_wildcard=True, allow_remote=False).check("tcp://0.0.0.0:1")


def test_tcp_and_ipc_of_one_target_are_secured_apart(world, ends, folder, tmp_path):
    """A source without keys gets in through the socket that only this user can open, and not over tcp."""
    target, on_target = ends.new_target(f"ipc://{tmp_path}/kv", "tcp://127.0.0.1:0", keys=folder)
    over_ipc, over_tcp = target.endpoints()
    for endpoint, reason in [(over_tcp, Reason.HANDSHAKE_REFUSED), (over_ipc, None)]:
        source, on_source = ends.new_source(limits=SourceLimits(connect_ms=2000))
        ticket = world.ticket()
        target.expect(ticket)
        send_all(world, source, ticket, (endpoint,), world.layout)
        if reason is not None:
            assert on_source.wait("Failed", ticket).reason is reason
        else:
            receive_all(target, on_target, ticket, world.layout)
            on_source.wait("Committed", ticket)


def test_another_target_with_a_trusted_key_is_not_taken_for_the_one_meant(world, ends, folder):
    """The key is pinned by the target's name: `other` cannot answer for `target-b`, whatever it says."""
    posing = Identity(worker_id="other-1", epoch=22)
    target, _ = ends.new_target(keys=folder, identity=posing)
    source, on_source = ends.new_source(keys=folder, limits=SourceLimits(connect_ms=2000))
    ticket = replace(world.ticket(), target_epoch=22)
    source.open(world.seal(ticket), ticket, target.endpoints())
    assert on_source.wait("Failed", ticket).reason is Reason.HANDSHAKE_REFUSED
    assert target.counters() == {}
