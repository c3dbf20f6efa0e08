"""Certificates from files: which are taken, and when."""

import errno
import shutil
import ssl
from contextlib import suppress
from pathlib import Path

import pytest

from service.startup import StartupError
from service.tls import ClientTls, ServerTls, client_tls, server_tls
from tests.security.certificates import Authority


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def files(authority, tmp_path):
    made = authority.issue("server")
    return tuple(Path(shutil.copy(path, tmp_path)) for path in (made.path, made.key))


def test_without_a_flag_there_is_no_tls():
    assert server_tls(None, None, None) is None and client_tls(None, None, None) is None


def test_half_of_a_pair_is_refused(files, authority):
    certificate, key = files
    for flags in ((certificate, None, None), (None, key, None), (None, None, authority.path)):
        with pytest.raises(StartupError, match="both"):
            server_tls(*flags)
    for flags in ((None, certificate, key), (authority.path, certificate, None), (authority.path, None, key)):
        with pytest.raises(StartupError, match="--worker-ssl-ca-certs"):
            client_tls(*flags)


def test_files_that_are_not_there_or_not_a_pair_are_refused_in_one_line(files, authority, tmp_path):
    certificate, key = files
    other = authority.issue("other")
    for pair in ((certificate, tmp_path / "no"), (certificate, other.key), (key, certificate)):
        with pytest.raises(StartupError) as refusal:
            ServerTls(*pair, None)
        assert "\n" not in str(refusal.value) and "BEGIN" not in str(refusal.value)
    with pytest.raises(StartupError, match="No such file"):
        client_tls(tmp_path / "no", None, None)


def test_what_is_in_use_is_what_last_fitted_together(files, authority):
    certificate, key = files
    tls = ServerTls(certificate, key, None)
    first = shown(tls, authority)
    tls.refresh()
    assert shown(tls, authority) == first
    renewed = authority.issue("renewed")
    shutil.copy(renewed.path, certificate)
    tls.refresh()
    assert shown(tls, authority) == first
    shutil.copy(renewed.key, key)
    tls.refresh()
    assert shown(tls, authority) == ssl.PEM_cert_to_DER_cert(renewed.pem().decode())


def test_files_that_cannot_be_read_for_a_moment_are_read_the_next_time(files, authority, monkeypatch):
    certificate, key = files
    tls = ServerTls(certificate, key, None)
    renewed = authority.issue("again")
    shutil.copy(renewed.path, certificate)
    shutil.copy(renewed.key, key)
    with monkeypatch.context() as patch:

        def read_bytes(path):
            raise OSError(errno.EMFILE, "Too many open files", str(path))

        patch.setattr(Path, "read_bytes", read_bytes)
        tls.refresh()
    tls.refresh()
    assert shown(tls, authority) == ssl.PEM_cert_to_DER_cert(renewed.pem().decode())


def shown(tls, authority):
    """The certificate that a new connection sees; the handshake is in memory."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    trusting = ssl.create_default_context(cafile=authority.path)
    server = tls.http_context().wrap_bio(to_server, to_client, server_side=True)
    client = trusting.wrap_bio(to_client, to_server, server_hostname="localhost")
    for end in (client, server, client, server):
        with suppress(ssl.SSLWantReadError):
            end.do_handshake()
    return client.getpeercert(binary_form=True)


def test_a_clients_files_are_read_at_each_use(files, authority, tmp_path):
    certificate, key = files
    tls = ClientTls(ca=authority.path, certificate=certificate, key=key)
    tls.grpc_credentials()
    shutil.move(key, tmp_path / "away")
    with pytest.raises(OSError, match="No such file"):
        tls.grpc_credentials()
