"""Whether a file is still what it was."""

import os

import pytest

from service.watched_files import WatchedFiles


@pytest.fixture
def path(tmp_path):
    made = tmp_path / "keys"
    made.write_text("a")
    return made


def replaced(path):
    other = path.with_name("other")
    other.write_text("b")
    other.replace(path)


@pytest.mark.parametrize(
    "change",
    [
        replaced,
        lambda path: path.unlink(),
        lambda path: path.write_text("longer"),
        lambda path: os.utime(path, ns=(1, 1)),
        lambda path: path.chmod(0o600 ^ (path.stat().st_mode & 0o777)),
    ],
)
def test_every_change_is_seen_once(path, change):
    watched = WatchedFiles([path])
    assert not watched.changed()
    change(path)
    assert watched.changed() and not watched.changed()


def test_what_could_not_be_read_is_looked_at_again_until_it_is_and_its_reason_told_once(path):
    watched = WatchedFiles([path])
    replaced(path)
    assert watched.changed() and watched.unread("full")
    assert watched.changed() and not watched.unread("full")
    assert watched.changed() and watched.unread("gone")
    path.write_text("another")
    assert watched.changed() and watched.unread("gone"), "of another file"
    watched.read()
    assert not watched.changed()
