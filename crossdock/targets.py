"""Where a client's calls go: one address, several, or all that a name stands for; and how they are spread.

The client opens a channel with what it finds here. Everything else is gRPC's: it dials, balances and watches health.
Dials nothing.
"""

import ipaddress
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from crossdock.values import RequestError

Target: TypeAlias = str | Sequence[str]

_SERVICE = "crossdock.v1.InferenceService"
_OPTIONS: tuple[tuple[str, str | int], ...] = (
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
)
_BALANCED = {
    "loadBalancingConfig": [{"round_robin": {}}],
    "healthCheckConfig": {"serviceName": _SERVICE},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialling:
    """What a channel is opened with. target: as gRPC names it. options: of the channel."""

    target: str
    options: tuple[tuple[str, str | int], ...]


def dialling(target: Target) -> Dialling:
    """target: host:port, unix:path, dns:///name:port for every address behind a name, or several addresses, in a
    sequence or with commas between them. Several share the calls, those that are not healthy left out.

    Raises RequestError.
    """
    addresses = target.split(",") if isinstance(target, str) else list(target)
    name = addresses[0] if len(addresses) == 1 else _together(addresses)
    spread = len(addresses) > 1 or name.startswith("dns:")
    config = (("grpc.service_config", json.dumps(_BALANCED)),) if spread else ()
    return Dialling(target=name, options=(*_OPTIONS, *config))


def _together(addresses: Sequence[str]) -> str:
    """The one name of several addresses."""
    versions = {_version(address) for address in addresses}
    if len(versions) != 1 or None in versions:
        rule = "several addresses must be ip:port, all IPv4 or all IPv6; for a name there is dns:///name:port"
        raise RequestError("INVALID_ARGUMENT", f"target: {rule}")
    return f"ipv{versions.pop()}:{','.join(addresses)}"


def _version(address: str) -> int | None:
    try:
        return ipaddress.ip_address(address.rpartition(":")[0].strip("[]")).version
    except ValueError:
        return None
