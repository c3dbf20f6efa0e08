"""Which addresses a worker may take KV blocks on. Reads an address, binds nothing, resolves no name."""

import ipaddress
from dataclasses import dataclass

from kvtransfer.errors import BindRefused

_WILDCARDS = frozenset({"*", "0.0.0.0", "::", ""})


@dataclass(frozen=True, slots=True, kw_only=True)
class BindRules:
    """allow_wildcard: every interface at once. allow_remote: interfaces that other machines reach."""

    allow_wildcard: bool = False
    allow_remote: bool = False

    def check(self, address: str) -> None:
        """Raises BindRefused. Ask again with the bound address: a name shows only then where it leads."""
        scheme, separator, rest = address.partition("://")
        if scheme not in ("tcp", "ipc") or not separator or not rest:
            raise BindRefused(f"{address}: only tcp://host:port and ipc://path can be bound")
        if scheme == "tcp":
            self._check_tcp(address, rest)

    def _check_tcp(self, address: str, rest: str) -> None:
        host, _, port = rest.rpartition(":")
        host = host.strip("[]")
        if not port.isdigit() and port != "*":
            raise BindRefused(f"{address}: no port")
        if host in _WILDCARDS and not self.allow_wildcard:
            raise BindRefused(f"{address}: would listen on every interface; name one, or allow it explicitly")
        if not self.allow_remote and not _only_here(host):
            raise BindRefused(
                f"{address}: other machines reach it; give --kv-key-folder, or --allow-insecure-kv"
            )


HERE = BindRules()
"""Only where no other machine reaches."""


def _only_here(host: str) -> bool:
    """Whether no other machine reaches it; a name is taken to be local until it is resolved."""
    if host in _WILDCARDS:
        return False
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return True
