"""Who started `serve` is its operator: by a token that is found on that machine by that user, and by nobody else."""

import os

import pytest

from commands import operator_token, serve
from commands.runtime_folder import runtime_folder, sweep
from service import config
from service.config import GatewayOptions, ServeOptions

ADDRESS, TOKEN = "127.0.0.1:50051", "s3cret"


@pytest.fixture
def places(tmp_path):
    return [str(tmp_path)]


@pytest.fixture
def left(places):
    """The file, in the folder of a `serve` that lives."""
    with runtime_folder(places) as folder:
        operator_token.leave(folder, ADDRESS, TOKEN)
        yield folder / "operator-token"


@pytest.mark.parametrize(
    ("address", "target", "found"),
    [
        (ADDRESS, ADDRESS, True),
        (ADDRESS, "localhost:50051", True),
        ("[::1]:50051", "localhost:50051", True),
        ("0.0.0.0:50051", ADDRESS, True),
        ("10.0.0.7:50051", "10.0.0.7:50051", True),
        (ADDRESS, "127.0.0.1:50052", False),
        (ADDRESS, "10.0.0.7:50051", False),
        ("10.0.0.7:50051", "localhost:50051", False),
        ("0.0.0.0:50051", "elsewhere.example:50051", False),
        (ADDRESS, "127.0.0.1:50051,127.0.0.1:50052", False),
        (ADDRESS, "", False),
    ],
)
def test_the_token_is_found_by_the_address_of_its_gateway(places, address, target, found):
    with runtime_folder(places) as other, runtime_folder(places) as folder:
        operator_token.leave(other, "127.0.0.1:9", "other")
        operator_token.leave(folder, address, TOKEN)
        assert operator_token.find(target, places) == (TOKEN if found else "")


def test_only_its_user_can_read_it_and_it_goes_with_serve(places):
    with runtime_folder(places) as folder:
        operator_token.leave(folder, ADDRESS, TOKEN)
        assert (folder / "operator-token").stat().st_mode & 0o777 == 0o600
    assert operator_token.find(ADDRESS, places) == ""


def test_what_a_killed_serve_has_left_is_swept(places, tmp_path):
    folder = tmp_path / "crossdock-abcd1234"
    folder.mkdir()
    (folder / "serve.lock").touch()
    operator_token.leave(folder, ADDRESS, TOKEN)
    sweep(places[0])
    assert not folder.exists()


@pytest.mark.parametrize("content", ["", "x", f"{ADDRESS} a b", "\xff", "x" * 10_000])
def test_what_is_no_such_file_is_passed_over(left, places, content):
    left.write_bytes(content.encode("latin-1"))
    assert operator_token.find(ADDRESS, places) == ""


def test_no_link_and_no_pipe_is_followed(left, places, tmp_path):
    left.rename(tmp_path / "elsewhere")
    left.symlink_to(tmp_path / "elsewhere")
    assert operator_token.find(ADDRESS, places) == ""
    left.unlink()
    os.mkfifo(left)
    assert operator_token.find(ADDRESS, places) == ""


def test_serve_deals_its_gateways_a_token_unless_it_is_given_one(tmp_path):
    for argv, token in (([], "dealt"), (["--control-token=given"], "given")):
        options = config.load(ServeOptions, argv, {})
        *workers, front = serve.plan(options, tmp_path, {}, "ab" * 32, control_token="dealt")
        gateway = config.load(GatewayOptions, front.argv[4:], front.environ)
        assert gateway.control_token.get_secret_value() == token
        assert not [spec for spec in workers if token in " ".join((*spec.argv, *spec.environ.values()))]
        assert token not in front.argv
