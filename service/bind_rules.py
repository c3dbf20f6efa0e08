"""Which addresses a process may listen on for gRPC and HTTP. Reads an address, resolves its name, asks whether
somebody listens at a path; binds nothing."""

import ipaddress
import socket
from dataclasses import dataclass
from urllib.parse import unquote

from service.startup import StartupError


class BindError(StartupError):
    """The address cannot be listened on, or must not be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BindRules:
    """allow_wildcard: every interface at once. allow_insecure: without TLS where other machines reach it."""

    allow_wildcard: bool = False
    allow_insecure: bool = False

    def check(self, address: str, *, encrypted: bool) -> None:
        """address: host:port or unix:path. Raises BindError."""
        if not self.allow_wildcard and is_wildcard(address):
            raise BindError(
                f"{address}: listens on every interface; say --allow-wildcard-bind if that is meant"
            )
        if not (encrypted or self.allow_insecure or _only_here(address)):
            raise BindError(
                f"{address}: other machines reach it; give --ssl-certfile and --ssl-keyfile, or --allow-insecure"
            )


LOOPBACK = BindRules()
"""Without TLS, only where no other machine reaches."""


def require_free(address: str) -> None:
    """Raises BindError where somebody listens at a unix:path: gRPC would take it over without a word, and remove it in
    the end. What a dead process has left there is free. Two that ask within the same millisecond may both be told so.
    A port is the kernel's to give."""
    if address.startswith("unix:") and _listened_at(unquote(address.removeprefix("unix:"))):
        raise BindError(f"{address}: cannot listen there; somebody else does")


def is_wildcard(address: str) -> bool:
    """Whether host:port means every interface."""
    host = _host(address)
    if address.startswith("unix:"):
        return False
    if host in ("", "*"):
        return True
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return _legacy_zero(host)
    return (getattr(ip, "ipv4_mapped", None) or ip).is_unspecified


def _only_here(address: str) -> bool:
    """Whether no other machine reaches it. A name is what it leads to, all of it; one that leads nowhere is not."""
    if address.startswith("unix:"):
        return True
    if is_wildcard(address):
        return False
    try:
        found = {
            str(each[4][0]) for each in socket.getaddrinfo(_host(address), None, type=socket.SOCK_STREAM)
        }
    except OSError:
        return False
    return all(ipaddress.ip_address(each.partition("%")[0]).is_loopback for each in found)


def _host(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")


def _legacy_zero(host: str) -> bool:
    """inet_aton reads "0", "0.0" and "0x0" as 0.0.0.0, and so does whoever binds."""
    try:
        return socket.inet_aton(host) == bytes(4)
    except OSError:
        return False


def _listened_at(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as caller:
        caller.setblocking(False)  # one that is frozen answers nobody, and is there all the same
        try:
            caller.connect(path)
        except (ConnectionRefusedError, FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            return error.errno is not None  # too long for a socket's path: nobody can listen there
    return True
