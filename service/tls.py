"""TLS from PEM files: what servers show and whom they trust, what a client trusts and shows.

A server's files may be replaced while it serves: connections that begin after `refresh` see the new ones. Owns no
socket and no timer; whoever serves says when to look.
"""

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import structlog

from service.startup import StartupError
from service.watched_files import WatchedFiles

_Certificates = grpc.ServerCertificateConfiguration


class ServerTls:
    """certificate, key: of this server, PEM. client_ca: who signs the certificates that every client must then bring;
    None for clients without. Raises StartupError when they cannot be used."""

    def __init__(self, certificate: Path, key: Path, client_ca: Path | None) -> None:
        self._certificate, self._key, self._client_ca = certificate, key, client_ca
        paths = [path for path in (certificate, key, client_ca) if path is not None]
        self._watched = WatchedFiles(paths)
        try:
            self._context = _context(certificate, key, client_ca)
            self._current = self._read()
        except (OSError, ssl.SSLError) as error:
            raise StartupError(f"--ssl-certfile, --ssl-keyfile, --ssl-ca-certs: {_reason(error)}") from error

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """gRPC asks for the certificates at each handshake, on a thread of its own."""
        given = self._current

        def fetch() -> Any:  # None for no change, which the types leave out
            nonlocal given
            if self._current is given:
                return None
            given = self._current
            return given

        return grpc.dynamic_ssl_server_credentials(given, fetch, self._client_ca is not None)

    def http_context(self) -> ssl.SSLContext:
        """For HTTP/1.1. A refresh changes what it shows, and adds to whom it trusts."""
        return self._context

    def refresh(self) -> None:
        """Take the files as they are now, if they changed. Files that do not fit together are left until they change,
        files that cannot be read until they can, and what was there goes on being used."""
        if not self._watched.changed():
            return
        try:
            _context(
                self._certificate, self._key, self._client_ca
            )  # that they fit is seen before they are used
            self._context.load_cert_chain(self._certificate, self._key)
            if self._client_ca is not None:
                self._context.load_verify_locations(self._client_ca)
            self._current = self._read()
        except OSError as error:
            again = not isinstance(error, ssl.SSLError)
            if not again or self._watched.unread(_reason(error)):
                structlog.get_logger().error("certificates not taken", why=_reason(error))
            return
        self._watched.read()
        structlog.get_logger().info("certificates taken")

    def _read(self) -> _Certificates:
        pair = (self._key.read_bytes(), self._certificate.read_bytes())
        roots = None if self._client_ca is None else self._client_ca.read_bytes()
        return grpc.ssl_server_certificate_configuration([pair], root_certificates=roots)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientTls:
    """ca: who signs the servers' certificates. certificate, key: our own, where servers ask for one."""

    ca: Path
    certificate: Path | None = None
    key: Path | None = None

    def grpc_credentials(self) -> grpc.ChannelCredentials:
        """From the files as they are now. Raises OSError."""
        key = None if self.key is None else self.key.read_bytes()
        chain = None if self.certificate is None else self.certificate.read_bytes()
        return grpc.ssl_channel_credentials(self.ca.read_bytes(), key, chain)


def server_tls(certificate: Path | None, key: Path | None, client_ca: Path | None) -> ServerTls | None:
    """What the --ssl-... flags mean together; None for no TLS. Raises StartupError."""
    if certificate is None and key is None and client_ca is None:
        return None
    if certificate is None or key is None:
        raise StartupError("--ssl-certfile, --ssl-keyfile: TLS needs both")
    return ServerTls(certificate, key, client_ca)


def client_tls(ca: Path | None, certificate: Path | None, key: Path | None) -> ClientTls | None:
    """What the --worker-ssl-... flags mean together; None for no TLS. Raises StartupError."""
    if ca is None and certificate is None and key is None:
        return None
    if ca is None or (certificate is None) != (key is None):
        raise StartupError(
            "--worker-ssl-ca-certs: TLS to workers needs it, and --worker-ssl-certfile with --worker-ssl-keyfile"
        )
    tls = ClientTls(ca=ca, certificate=certificate, key=key)
    try:
        tls.grpc_credentials()
    except OSError as error:
        raise StartupError(f"--worker-ssl-...: {_reason(error)}") from error
    return tls


def _context(certificate: Path, key: Path, client_ca: Path | None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    context.load_cert_chain(certificate, key)
    if client_ca is not None:
        context.load_verify_locations(client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _reason(error: OSError) -> str:
    """ssl.SSLError is an OSError whose text names lines of a source file."""
    if isinstance(error, ssl.SSLError):
        return "not a certificate and its key, or not a list of authorities"
    return f"{error.filename}: {error.strerror}"
