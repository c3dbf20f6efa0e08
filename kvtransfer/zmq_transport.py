"""Messages over ZeroMQ: a ROUTER on each target, one DEALER per connection of a source.

Owns sockets, their options and the zero-copy bookkeeping. A payload handed to `send` is read by libzmq's
own thread until its tracker is done; only then is `on_read` called. Queues of sockets are a backstop, the
byte credits above are the flow control. Never reconnects by itself once a connection was up, and never
takes over another's identity."""

import os
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil

import zmq

from kvtransfer.errors import BindRefused
from kvtransfer.identity import Identity
from kvtransfer.transport import Arrival, Delivery, LinkStatus, PeerGone
from kvtransfer.zmq_socket import ANSWERS_HWM, Bell, Socket, ZmqOptions, configure, next_monitor_event

LET_GO_S = 5.0
PEERS_MAX = 4096
PROBE = b""
"""An empty message: asks the socket whether the peer is still there. Swallowed by the other end."""

_WILDCARDS = frozenset({"*", "0.0.0.0", "::", ""})
_SOURCE_EVENTS = (
    zmq.Event.HANDSHAKE_SUCCEEDED
    | zmq.Event.DISCONNECTED
    | zmq.Event.CONNECT_RETRIED
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_AUTH
)
_FAILED_TRY = _SOURCE_EVENTS & ~(zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED)


class ZmqSourceTransport:
    """See `transport.SourceTransport`. randomness(count): that many unpredictable bytes, for identities."""

    def __init__(
        self,
        options: ZmqOptions,
        randomness: Callable[[int], bytes] = os.urandom,
    ) -> None:
        self._context = zmq.Context()
        self._options = options
        self._randomness = randomness
        self._bell = Bell()
        self._poller = zmq.Poller()
        self._poller.register(self._bell.fileno(), zmq.POLLIN)
        self._connections: set[ZmqConnection] = set()
        self._reads: list[_Read] = []

    def dial(self, endpoint: str, source: Identity) -> "ZmqConnection":
        name = f"{source.worker_id}/{source.epoch}/".encode() + self._randomness(8).hex().encode()
        try:
            connection = ZmqConnection(self, self._new_socket(name), endpoint)
        except zmq.ZMQError as error:
            raise ValueError("not an endpoint") from error
        self._connections.add(connection)
        return connection

    def wait(self, timeout_s: float) -> None:
        ready = self._poller.poll(ceil(timeout_s * 1000))
        if any(each == self._bell.fileno() for each, _ in ready):
            self._bell.silence()
        reads, self._reads = self._reads, []
        for read in reads:
            if read.tracker.done:
                read.on_read()
            else:
                self._reads.append(read)

    def wake(self) -> None:
        self._bell.ring()

    def close(self) -> None:
        for connection in list(self._connections):
            connection.close()
        # A closed socket lets go of its memory in the next round of libzmq's thread.
        for read in self._reads:
            read.tracker.wait(LET_GO_S)
        self._reads.clear()
        self._context.term()
        self._bell.close()

    def poll(self, watched: Socket, flags: int) -> None:
        """For connections: watch a socket, 0 to stop."""
        self._poller.register(watched, flags)

    def reading(self, tracker: zmq.MessageTracker, on_read: Callable[[], None]) -> None:
        """For connections: tell when the tracker is done."""
        self._reads.append(_Read(tracker, on_read))

    def closed(self, connection: "ZmqConnection") -> None:
        """For connections."""
        self._connections.discard(connection)

    def _new_socket(self, name: bytes) -> Socket:
        options = self._options
        dealer = self._context.socket(zmq.DEALER)
        configure(dealer, options)
        dealer.setsockopt(zmq.ROUTING_ID, name[:255])
        dealer.setsockopt(zmq.IMMEDIATE, 1)
        dealer.setsockopt(zmq.SNDHWM, options.hwm_messages)
        dealer.setsockopt(zmq.RCVHWM, ANSWERS_HWM)
        dealer.setsockopt(zmq.RECONNECT_IVL, options.reconnect_ms)
        dealer.setsockopt(zmq.RECONNECT_IVL_MAX, options.reconnect_max_ms)
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
        owner.poll(dealer, zmq.POLLIN)
        owner.poll(self._monitor, zmq.POLLIN)

    def status(self) -> LinkStatus:
        while self._status is not LinkStatus.LOST:
            event = next_monitor_event(self._monitor)
            if event is None:
                break
            if event & zmq.Event.HANDSHAKE_SUCCEEDED:
                self._status = LinkStatus.UP
            elif event & zmq.Event.DISCONNECTED and self._status is LinkStatus.UP:
                self._status = LinkStatus.LOST
            elif event & _FAILED_TRY and self._status is LinkStatus.DIALLING:
                self._status = LinkStatus.FAILING
        return self._status

    def send(self, header: bytes, payload: memoryview | None, on_read: Callable[[], None] | None) -> bool:
        if self._status is not LinkStatus.UP:
            return False
        try:
            if payload is None:
                self._dealer.send(header, zmq.NOBLOCK)
            else:
                parts = (header, payload)
                tracker = self._dealer.send_multipart(parts, zmq.NOBLOCK, copy=False, track=True)
                assert tracker is not None and on_read is not None
                self._owner.reading(tracker, on_read)
        except zmq.Again:
            self._owner.poll(self._dealer, zmq.POLLIN | zmq.POLLOUT)
            return False
        self._owner.poll(self._dealer, zmq.POLLIN)
        return True

    def receive(self) -> bytes | None:
        while self._status is not LinkStatus.LOST:
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
            self._owner.poll(self._dealer, 0)
            self._owner.poll(self._monitor, 0)
            self._close_sockets()
            self._owner.closed(self)
        self._status = LinkStatus.LOST

    def _close_sockets(self) -> None:
        self._dealer.disable_monitor()
        self._monitor.close(0)
        self._dealer.close(0)


class ZmqTargetTransport:
    """See `transport.TargetTransport`. binds: addresses, tcp:// or ipc://, best first; port 0 picks a free
    one.

    Raises BindRefused for an address on every interface, unless allow_wildcard, and for one that cannot be
    bound."""

    def __init__(
        self,
        options: ZmqOptions,
        binds: Sequence[str],
        *,
        allow_wildcard: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        for address in binds:
            _require_bindable(address, allow_wildcard)
        self._clock = clock
        self._options = options
        self._bell = Bell()
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        configure(self._router, options)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._router.setsockopt(zmq.SNDHWM, ANSWERS_HWM)
        self._router.setsockopt(zmq.RCVHWM, options.hwm_messages)
        self._router.setsockopt(zmq.BACKLOG, 1024)
        self._monitor = self._router.get_monitor_socket(zmq.Event.DISCONNECTED)
        try:
            self._endpoints = tuple(_bind(self._router, address) for address in binds)
            for endpoint in self._endpoints:
                # Names and short forms of "everywhere" show only now.
                _require_bindable(endpoint, allow_wildcard)
        except BindRefused:
            self.close()
            raise
        self._poller = zmq.Poller()
        self._poller.register(self._bell.fileno(), zmq.POLLIN)
        self._poller.register(self._router, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._peers: OrderedDict[bytes, None] = OrderedDict()
        self._gone: deque[PeerGone] = deque()
        self._probe_until = self._probe_next = 0.0

    def endpoints(self) -> tuple[str, ...]:
        return self._endpoints

    def receive(self) -> Arrival | PeerGone | None:
        if self._gone:
            return self._gone.popleft()
        try:
            name, *frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        peer = name.bytes
        self._peers[peer] = None
        if len(self._peers) > PEERS_MAX:
            self._peers.popitem(last=False)
        if len(frames) not in (1, 2):
            return Arrival(peer=peer, header=b"", payload=None)
        payload = frames[1].buffer if len(frames) == 2 else None
        return Arrival(peer=peer, header=frames[0].bytes, payload=payload)

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
        if self._clock() < self._probe_until:
            timeout_s = min(timeout_s, self._options.probe_interval_ms / 1000)
        ready = self._poller.poll(ceil(timeout_s * 1000))
        if any(each == self._bell.fileno() for each, _ in ready):
            self._bell.silence()
        while next_monitor_event(self._monitor) is not None:
            self._probe_until = self._clock() + self._options.probe_ms / 1000
        self._probe_peers()

    def wake(self) -> None:
        self._bell.ring()

    def close(self) -> None:
        if not self._router.closed:
            self._router.disable_monitor()
            self._monitor.close(0)
            self._router.close(0)
            self._context.term()
            self._bell.close()

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


@dataclass(frozen=True, slots=True)
class _Read:
    tracker: zmq.MessageTracker
    on_read: Callable[[], None]


def _require_bindable(address: str, allow_wildcard: bool) -> None:
    scheme, separator, rest = address.partition("://")
    if scheme not in ("tcp", "ipc") or not separator or not rest:
        raise BindRefused(f"{address}: only tcp://host:port and ipc://path can be bound")
    if scheme == "tcp":
        host, _, port = rest.rpartition(":")
        if not port.isdigit() and port != "*":
            raise BindRefused(f"{address}: no port")
        if host.strip("[]") in _WILDCARDS and not allow_wildcard:
            raise BindRefused(f"{address}: would listen on every interface; name one, or allow it explicitly")


def _bind(router: Socket, address: str) -> str:
    try:
        router.bind(address)
    except zmq.ZMQError as error:
        raise BindRefused(f"{address}: {error.strerror}") from error
    bound = router.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(bound, bytes)
    return bound.rstrip(b"\0").decode()
