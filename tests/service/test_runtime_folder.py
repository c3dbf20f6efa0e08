"""The folder of one `serve`: its own while it lives, swept once it was killed, and nothing else ever is."""

import os
import signal
import socket
import subprocess
import sys

import pytest

from commands.runtime_folder import runtime_folder, sweep

LIVES = (
    "import sys\n"
    "from commands.runtime_folder import runtime_folder\n"
    "with runtime_folder([sys.argv[1]]) as folder:\n"
    "    print(folder, flush=True)\n"
    "    sys.stdin.read()\n"
)


def listen(path):
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))


@pytest.fixture
def killed(tmp_path):
    """A folder with a socket in it, whose process was killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", LIVES, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        folder = tmp_path / os.path.basename(process.stdout.readline().strip())
        listen(folder / "decode-0.grpc")
        sweep(tmp_path)
        assert (folder / "decode-0.grpc").exists(), "swept while its process lives"
        process.send_signal(signal.SIGKILL)
    return folder


def test_what_a_killed_serve_has_left_is_gone_with_the_next_one(killed, tmp_path):
    with runtime_folder([str(tmp_path)]) as folder:
        assert list(tmp_path.iterdir()) == [folder]
        assert folder.stat().st_mode & 0o777 == 0o700
    assert list(tmp_path.iterdir()) == []


def test_folders_that_live_stay_side_by_side(tmp_path):
    with runtime_folder([str(tmp_path)]) as first, runtime_folder([str(tmp_path)]) as second:
        assert first != second and first.exists() and second.exists()


def test_whatever_else_lies_there_is_left_alone(killed, tmp_path):
    (killed / "notes").write_text("mine")
    (killed / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").mkdir()
    listen(tmp_path / "elsewhere" / "x.grpc")
    os.rename(killed, tmp_path / "elsewhere" / "crossdock-killed_1")
    (tmp_path / "crossdock-12345678").symlink_to(tmp_path / "elsewhere" / "crossdock-killed_1")
    (tmp_path / "crossdock-abcdefgh").mkdir()
    listen(tmp_path / "crossdock-abcdefgh" / "decode-0.grpc")
    sweep(tmp_path)
    kept = tmp_path / "elsewhere" / "crossdock-killed_1"
    assert sorted(each.name for each in kept.iterdir()) == ["decode-0.grpc", "link", "notes", "serve.lock"]
    assert (tmp_path / "elsewhere" / "x.grpc").exists()
    assert (tmp_path / "crossdock-abcdefgh" / "decode-0.grpc").exists(), "no lock in it: not ours"


def test_a_folder_with_something_of_somebody_in_it_loses_its_sockets_alone(killed, tmp_path):
    (killed / "notes").write_text("mine")
    sweep(tmp_path)
    assert sorted(each.name for each in killed.iterdir()) == ["notes", "serve.lock"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_left_alone(killed, tmp_path):
    os.chown(killed, 12345, 12345)
    sweep(tmp_path)
    assert (killed / "decode-0.grpc").exists()


def test_a_place_whose_paths_would_be_too_long_for_sockets_is_not_used(tmp_path):
    deep = tmp_path / ("d" * 80)
    deep.mkdir()
    with runtime_folder([str(deep), str(tmp_path)]) as folder:
        assert folder.parent == tmp_path


def test_a_place_that_cannot_be_read_is_no_reason_not_to_start(tmp_path):
    sweep(str(tmp_path / "nowhere"))
