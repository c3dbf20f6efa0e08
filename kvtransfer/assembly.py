"""The transports of one worker, as its settings wish: shared memory, ipc and tcp under one roof.

The one place that knows which transports there are. Opens sockets; starts no thread.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self

from kvtransfer import ipc_file, keys, shm_transport
from kvtransfer.bind_rules import BindRules
from kvtransfer.errors import BindRefused
from kvtransfer.identity import Identity
from kvtransfer.joined_transport import JoinedSource, JoinedTarget, SourceWay, TargetWay
from kvtransfer.shm_transport import ShmSourceTransport, ShmTargetTransport
from kvtransfer.source_io import SourceLimits
from kvtransfer.transport import SourceTransport, TargetTransport
from kvtransfer.watch import Watch
from kvtransfer.zmq_socket import ZmqOptions
from kvtransfer.zmq_transport import ZmqSourceTransport, ZmqTargetTransport

if TYPE_CHECKING:
    from kvtransfer.dist_transport import DistOptions


class TransportFlags(Protocol):
    """What an operator may set."""

    @property
    def kv_key_folder(self) -> Path | None: ...
    @property
    def kv_shared_memory(self) -> bool: ...
    @property
    def kv_group_address(self) -> str: ...
    @property
    def allow_wildcard_bind(self) -> bool: ...
    @property
    def allow_insecure_kv(self) -> bool: ...
    def kv_backends(self) -> tuple[str, ...]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportWishes:
    """block_bytes: of one block; 0 while nobody knows. key_folder: with it, tcp is CURVE both ways; see `keys`.
    advertised: what sources are told to dial over tcp, () for the addresses that were bound.
    shared_memory: use it between processes of this host. allow_wildcard, allow_insecure: see
    `bind_rules.BindRules`; the latter allows tcp to other machines without keys. backends: of
    torch.distributed, tried before everything else. group_address, group_device: see `dist_group.GroupOptions`."""

    block_bytes: int = 0
    key_folder: Path | None = None
    advertised: tuple[str, ...] = ()
    shared_memory: bool = True
    allow_wildcard: bool = False
    allow_insecure: bool = False
    backends: tuple[str, ...] = ()
    group_address: str = "127.0.0.1"
    group_device: str = "cuda:0"

    @classmethod
    def of(
        cls,
        flags: TransportFlags,
        block_bytes: int = 0,
        device: str = "cpu",
        advertised: tuple[str, ...] = (),
    ) -> Self:
        """What an operator's flags mean. device: that the engine computes on."""
        return cls(
            block_bytes=block_bytes,
            key_folder=flags.kv_key_folder,
            advertised=advertised,
            shared_memory=flags.kv_shared_memory,
            allow_wildcard=flags.allow_wildcard_bind,
            allow_insecure=flags.allow_insecure_kv,
            backends=flags.kv_backends(),
            group_address=flags.kv_group_address,
            group_device=device if device.startswith("cuda") else "cuda:0",
        )


def require_allowed(wishes: TransportWishes, worker_id: str, binds: Sequence[str] = ()) -> None:
    """Raises what making the transport would, BindRefused or KeysRefused, as far as that can be told without opening a
    socket and before the size of a block is known."""
    ring = _key_ring(wishes, worker_id)
    if wishes.backends:
        _dist_options(wishes)
    _require_advertised_is_bound(wishes, binds)
    for address in binds:
        _bind_rules(wishes, ring).check(address)
        ipc_file.require_free(address)


def source_limits(wishes: TransportWishes) -> SourceLimits:
    """How patient a source must be with these transports."""
    if not wishes.backends:
        return SourceLimits()
    from kvtransfer.dist_group import CONNECT_MS

    return SourceLimits(connect_ms=CONNECT_MS)


def source_transport(wishes: TransportWishes, source: Identity) -> SourceTransport:
    """Dials whatever a target offers. Raises KeysRefused, and BindRefused for a backend or its address."""
    if wishes.backends:
        from kvtransfer.dist_transport import DistSourceTransport

        return DistSourceTransport(_dist_options(wishes), _joined_source(wishes, source))
    return _joined_source(wishes, source)


def target_transport(
    wishes: TransportWishes, target: Identity, binds: Sequence[str], randomness: Callable[[int], bytes]
) -> TargetTransport:
    """Listens on binds, and for sources on this host; what is fastest is offered first. Raises BindRefused
    and KeysRefused. randomness(count): that many unpredictable bytes."""
    if wishes.backends:
        from kvtransfer.dist_target import DistTargetTransport

        return DistTargetTransport(_dist_options(wishes), _joined_target(wishes, target, binds, randomness))
    return _joined_target(wishes, target, binds, randomness)


def _joined_source(wishes: TransportWishes, source: Identity) -> JoinedSource:
    ring = _key_ring(wishes, source.worker_id)
    watch = Watch()
    over_zmq = ZmqSourceTransport(ZmqOptions(block_bytes=wishes.block_bytes), keys=ring, watch=watch)
    ways: dict[str, SourceWay] = {"ipc": over_zmq, "tcp": over_zmq}
    if wishes.shared_memory and shm_transport.available():
        ways[shm_transport.SCHEME] = ShmSourceTransport(watch)
    return JoinedSource(watch, ways)


def _joined_target(
    wishes: TransportWishes, target: Identity, binds: Sequence[str], randomness: Callable[[int], bytes]
) -> JoinedTarget:
    ring = _key_ring(wishes, target.worker_id)
    watch = Watch()
    ways: list[TargetWay] = []
    over_ipc = [address for address in binds if address.startswith("ipc:")]
    over_tcp = [address for address in binds if address not in over_ipc]
    try:
        _require_advertised_is_bound(wishes, binds)
        if wishes.shared_memory and shm_transport.available():
            name = f"crossdock-{target.worker_id}-{randomness(8).hex()}"
            ways.append(ShmTargetTransport(name, wishes.block_bytes, watch))
        if over_ipc:
            ways.append(_zmq_target(wishes, over_ipc, (), None, watch))
        if over_tcp:
            ways.append(_zmq_target(wishes, over_tcp, wishes.advertised, ring, watch))
    except BindRefused:
        JoinedTarget(watch, ways).close()
        raise
    return JoinedTarget(watch, ways)


def _require_advertised_is_bound(wishes: TransportWishes, binds: Sequence[str]) -> None:
    if wishes.advertised and not any(address.startswith("tcp:") for address in binds):
        raise BindRefused("nothing listens over tcp for the endpoints that are advertised")


def _bind_rules(wishes: TransportWishes, ring: keys.KeyRing | None) -> BindRules:
    return BindRules(
        allow_wildcard=wishes.allow_wildcard, allow_remote=wishes.allow_insecure or ring is not None
    )


def _zmq_target(
    wishes: TransportWishes,
    binds: Sequence[str],
    advertised: Sequence[str],
    ring: keys.KeyRing | None,
    watch: Watch,
) -> ZmqTargetTransport:
    return ZmqTargetTransport(
        ZmqOptions(block_bytes=wishes.block_bytes),
        binds,
        advertised=advertised,
        keys=ring,
        rules=_bind_rules(wishes, ring),
        watch=watch,
    )


def _dist_options(wishes: TransportWishes) -> "DistOptions":
    # Imported only where it is asked for: most workers never load torch.distributed's backends.
    from kvtransfer.dist_group import GroupOptions
    from kvtransfer.dist_transport import DistOptions

    group = GroupOptions(
        address=wishes.group_address, allow_remote=wishes.allow_insecure, device=wishes.group_device
    )
    return DistOptions(backends=wishes.backends, block_bytes=wishes.block_bytes, group=group)


def _key_ring(wishes: TransportWishes, worker_id: str) -> keys.KeyRing | None:
    return None if wishes.key_folder is None else keys.load(wishes.key_folder, worker_id)
