"""Messages over ZeroMQ: a ROUTER on each target, one DEALER per connection of a source.

Owns sockets, their options and the zero-copy bookkeeping. A payload handed to `send` is read by libzmq's
own thread until its tracker is done; only then is `on_read` called. Queues of sockets are a backstop, the
byte credits above are the flow control. Never reconnects by itself once a connection was up, and never
takes over another's identity.

With a key ring every connection over tcp is CURVE in both directions, and nothing else is let in; without
one, tcp is for this machine alone."""

import errno
import os
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

import zmq

from kvtransfer.allow_list import NAME_PROPERTY, AllowList
from kvtransfer.bind_rules import HERE, BindRules
from kvtransfer.errors import BindRefused
from kvtransfer.identity import Identity
from kvtransfer.ipc_file import IpcFile, require_free
from kvtransfer.keys import KeyRing
from kvtransfer.transport import Arrival, Delivery, LinkStatus, NoKey, PeerGone, unread
from kvtransfer.watch import Watch
from kvtransfer.wire import RUN_BLOCKS_MAX
from kvtransfer.zmq_socket import (
    ANSWERS_HWM,
    Socket,
    ZmqOptions,
    configure,
    next_monitor_event,
    secure_source,
    secure_target,
)

LET_GO_S = 5.0
PEERS_MAX = 4096
PROBE = b""
"""An empty message: asks the socket whether the peer is still there. Swallowed by the other end."""

_TCP = "tcp://"
_SOURCE_EVENTS = (
    zmq.Event.HANDSHAKE_SUCCEEDED
    | zmq.Event.DISCONNECTED
    | zmq.Event.CONNECT_RETRIED
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_AUTH
)
_REFUSALS = zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.HANDSHAKE_FAILED_AUTH
"""No such mechanism there, and not on the allow-list. Who has another key than we think just hangs up."""


class ZmqSourceTransport:
    """See `transport.SourceTransport`. watch: where it is one of several transports. randomness(count): that
    many unpredictable bytes, for identities."""

    def __init__(
        self,
        options: ZmqOptions,
        *,
        keys: KeyRing | None = None,
        watch: Watch | None = None,
        randomness: Callable[[int], bytes] = os.urandom,
    ) -> None:
        self._context = zmq.Context()
        self._options = options
        self._keys = keys
        self._randomness = randomness
        self._watch = watch or Watch()
        self._connections: set[ZmqConnection] = set()
        self._reads: dict[ZmqConnection, deque[_Read]] = {}

    def dial(self, endpoint: str, source: Identity, target: Identity) -> "ZmqConnection":
        name = f"{source.worker_id}/{source.epoch}/".encode() + self._randomness(8).hex().encode()
        target_key = self._target_key(endpoint, target)
        try:
            connection = ZmqConnection(self, self._new_socket(name, target_key), endpoint)
        except zmq.ZMQError as error:
            raise ValueError("not an endpoint") from error
        self._connections.add(connection)
        return connection

    def wait(self, timeout_s: float) -> None:
        self._watch.wait(timeout_s)
        self.settle()

    def patience_s(self) -> float:
        return inf

    def settle(self) -> None:
        for connection, reads in list(self._reads.items()):
            # libzmq lets go of a connection's payloads in the order in which they were sent.
            while reads and reads[0].tracker.done:
                reads.popleft().on_read()
            if not reads:
                del self._reads[connection]

    def wake(self) -> None:
        self._watch.ring()

    def close(self) -> None:
        for connection in list(self._connections):
            connection.close()
        # A closed socket lets go of its memory in the next round of libzmq's thread.
        for reads in self._reads.values():
            for read in reads:
                read.tracker.wait(LET_GO_S)
        self._reads.clear()
        self._context.term()
        self._watch.close()

    def look_at(self, watched: Socket, flags: int) -> None:
        """For connections: watch a socket, 0 to stop."""
        self._watch.look_at(watched, flags)

    def ready(self, watched: Socket) -> bool:
        """For connections: whether the last wait found something there. Asking the socket itself costs an
        exception where there is nothing."""
        return self._watch.ready(watched)

    def reading(
        self, connection: "ZmqConnection", tracker: zmq.MessageTracker, on_read: Callable[[], None]
    ) -> None:
        """For connections: tell when the tracker is done."""
        self._reads.setdefault(connection, deque()).append(_Read(tracker, on_read))

    def closed(self, connection: "ZmqConnection") -> None:
        """For connections."""
        self._connections.discard(connection)

    def _target_key(self, endpoint: str, target: Identity) -> bytes | None:
        """What the target must prove to own, None where nothing is proven."""
        if self._keys is None or not endpoint.startswith(_TCP):
            return None
        key = self._keys.key_of(target.worker_id)
        if key is None:
            raise NoKey("no public key of the target")
        return key

    def _new_socket(self, name: bytes, target_key: bytes | None) -> Socket:
        options = self._options
        dealer = self._context.socket(zmq.DEALER)
        configure(dealer, options)
        dealer.setsockopt(zmq.ROUTING_ID, name[:255])
        dealer.setsockopt(zmq.IMMEDIATE, 1)
        dealer.setsockopt(zmq.SNDHWM, options.hwm_messages())
        dealer.setsockopt(zmq.RCVHWM, ANSWERS_HWM)
        dealer.setsockopt(zmq.RECONNECT_IVL, options.reconnect_ms)
        dealer.setsockopt(zmq.RECONNECT_IVL_MAX, options.reconnect_max_ms)
        if self._keys is not None and target_key is not None:
            secure_source(dealer, self._keys, target_key)
        return dealer


class ZmqConnection:
    """See `transport.Connection`."""

    def __init__(self, owner: ZmqSourceTransport, dealer: Socket, endpoint: str) -> None:
        self._owner = owner
        self._dealer = dealer
        self._status = LinkStatus.DIALLING
        self._monitor = dealer.get_monitor_socket(_SOURCE_EVENTS)
        try:
            dealer.connect(endpoint)
        except zmq.ZMQError:
            self._close_sockets()
            raise
        owner.look_at(dealer, zmq.POLLIN)
        owner.look_at(self._monitor, zmq.POLLIN)

    def status(self) -> LinkStatus:
        while self._status is not LinkStatus.LOST and self._owner.ready(self._monitor):
            found = next_monitor_event(self._monitor)
            if found is None:
                break
            self._status = _after(self._status, *found)
        return self._status

    def send(
        self, header: bytes, payloads: Sequence[memoryview] = (), on_read: Callable[[], None] = unread
    ) -> bool:
        if self._status is not LinkStatus.UP:
            return False
        try:
            if not payloads:
                self._dealer.send(header, zmq.NOBLOCK)
            else:
                # Tracks the last part: libzmq lets go of parts in the order in which they were sent.
                parts: tuple[bytes | memoryview, ...] = (header, *payloads)
                tracker = self._dealer.send_multipart(parts, zmq.NOBLOCK, copy=False, track=True)
                assert tracker is not None
                self._owner.reading(self, tracker, on_read)
        except zmq.Again:
            self._owner.look_at(self._dealer, zmq.POLLIN | zmq.POLLOUT)
            return False
        return True

    def receive(self) -> bytes | None:
        while self._status is not LinkStatus.LOST and self._owner.ready(self._dealer):
            try:
                parts = self._dealer.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return None
            if parts != [PROBE]:
                # More parts than a header make a message that no decoder takes.
                return parts[0] if len(parts) == 1 else PROBE
        return None

    def close(self) -> None:
        if not self._dealer.closed:
            self._owner.look_at(self._dealer, 0)
            self._owner.look_at(self._monitor, 0)
            self._close_sockets()
            self._owner.closed(self)
        self._status = LinkStatus.LOST

    def _close_sockets(self) -> None:
        self._dealer.disable_monitor()
        self._monitor.close(0)
        self._dealer.close(0)


class ZmqTargetTransport:
    """See `transport.TargetTransport`. binds: addresses, tcp:// or ipc://, best first; port 0 picks a free
    one. advertised: what sources dial instead, where they reach the binds by other addresses. keys: for tcp,
    without ipc beside it. watch: where it is one of several transports.

    Raises BindRefused for an address that the rules forbid, that cannot be bound, or that somebody has."""

    def __init__(
        self,
        options: ZmqOptions,
        binds: Sequence[str],
        *,
        advertised: Sequence[str] = (),
        keys: KeyRing | None = None,
        rules: BindRules = HERE,
        watch: Watch | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        for address in binds:
            rules.check(address)
            assert keys is None or address.startswith(_TCP), "keys are for tcp"
        self._clock = clock
        self._advertised = tuple(advertised)
        self._options = options
        self._watch = watch or Watch()
        self._context = zmq.Context()
        self._allow_list = None if keys is None else AllowList(self._context, keys.trusted)
        self._router = self._context.socket(zmq.ROUTER)
        configure(self._router, options)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._router.setsockopt(zmq.SNDHWM, ANSWERS_HWM)
        self._router.setsockopt(zmq.RCVHWM, options.hwm_messages())
        self._router.setsockopt(zmq.BACKLOG, 1024)
        if keys is not None:
            secure_target(self._router, keys)
        self._monitor = self._router.get_monitor_socket(zmq.Event.DISCONNECTED)
        self._files: list[IpcFile] = []
        try:
            self._endpoints = tuple(self._bind(address) for address in binds)
            for endpoint in self._endpoints:
                # Names, and short forms of "everywhere", show only now.
                rules.check(endpoint)
        except BindRefused:
            self.close()
            raise
        self._watch.look_at(self._router, zmq.POLLIN)
        self._watch.look_at(self._monitor, zmq.POLLIN)
        if self._allow_list is not None:
            self._watch.look_at(self._allow_list.socket, zmq.POLLIN)
        self._readable = False
        self._peers: OrderedDict[bytes, None] = OrderedDict()
        self._gone: deque[PeerGone] = deque()
        self._probe_until = self._probe_next = 0.0

    def endpoints(self) -> tuple[str, ...]:
        return self._advertised or self._endpoints

    def receive(self) -> Arrival | PeerGone | None:
        if self._gone:
            return self._gone.popleft()
        if not self._readable:
            return None
        try:
            name, *frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            self._readable = False
            return None
        peer = name.bytes
        self._peers[peer] = None
        if len(self._peers) > PEERS_MAX:
            self._peers.popitem(last=False)
        if not 1 <= len(frames) <= 1 + RUN_BLOCKS_MAX:
            return Arrival(peer=peer, header=b"")
        payloads = tuple([frame.buffer for frame in frames[1:]])
        proven = None if self._allow_list is None else str(frames[0].get(NAME_PROPERTY))
        return Arrival(peer=peer, header=frames[0].bytes, payloads=payloads, proven=proven)

    def send(self, peer: bytes, header: bytes) -> Delivery:
        try:
            self._router.send_multipart((peer, header), zmq.NOBLOCK)
        except zmq.Again:
            return Delivery.FULL
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return Delivery.GONE
        return Delivery.QUEUED

    def wait(self, timeout_s: float) -> None:
        self._watch.wait(min(timeout_s, self.patience_s()))
        self.settle()

    def patience_s(self) -> float:
        return self._options.probe_interval_ms / 1000 if self._clock() < self._probe_until else inf

    def settle(self) -> None:
        self._readable = self._readable or self._watch.ready(self._router)
        if self._allow_list is not None and self._watch.ready(self._allow_list.socket):
            self._allow_list.answer()
        while self._watch.ready(self._monitor) and next_monitor_event(self._monitor) is not None:
            self._probe_until = self._clock() + self._options.probe_ms / 1000
        self._probe_peers()

    def wake(self) -> None:
        self._watch.ring()

    def close(self) -> None:
        if not self._router.closed:
            for file in self._files:
                file.remove()
            self._router.disable_monitor()
            self._monitor.close(0)
            self._router.close(0)
            if self._allow_list is not None:
                self._allow_list.close()
            self._context.term()
            self._watch.close()

    def _bind(self, address: str) -> str:
        require_free(address)
        try:
            self._router.bind(address)
        except zmq.ZMQError as error:
            raise BindRefused(f"{address}: {error.strerror}") from error
        file = IpcFile.of(address)
        if file is not None:
            self._files.append(file)
        bound = self._router.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(bound, bytes)
        return bound.rstrip(b"\0").decode()

    def _probe_peers(self) -> None:
        """A lost connection does not say whose it was, and for some ms a send to it still succeeds: keep
        asking."""
        now = self._clock()
        if now >= self._probe_until or now < self._probe_next:
            return
        self._probe_next = now + self._options.probe_interval_ms / 1000
        for peer in list(self._peers):
            if self.send(peer, PROBE) is Delivery.GONE:
                del self._peers[peer]
                self._gone.append(PeerGone(peer=peer))


def _after(status: LinkStatus, event: int, number: int) -> LinkStatus:
    """number: of the event; where a handshake just ended, the error of the system."""
    if event & zmq.Event.HANDSHAKE_SUCCEEDED:
        return LinkStatus.UP
    if status is LinkStatus.UP:
        return LinkStatus.LOST if event & zmq.Event.DISCONNECTED else status
    hung_up = event & zmq.Event.HANDSHAKE_FAILED_NO_DETAIL and number != errno.EAGAIN  # that is silence
    if event & _REFUSALS or hung_up:
        return LinkStatus.REFUSED
    tried = event & ~zmq.Event.DISCONNECTED
    return LinkStatus.FAILING if tried and status is LinkStatus.DIALLING else status


@dataclass(frozen=True, slots=True)
class _Read:
    tracker: zmq.MessageTracker
    on_read: Callable[[], None]
