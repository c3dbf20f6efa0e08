"""How we dial our own workers over gRPC. A caller owns the channel and closes it; nothing is dialled
here."""

import grpc

from service.tls import ClientTls

# A worker that is frozen or cut off is noticed within the sum of both. The server side of `service.server`
# allows pings this frequent, and notices a frozen gateway by the same two numbers.
KEEPALIVE_MS = 2_000
PING_TIMEOUT_MS = 2_000

# Far above what a prompt or a step's outputs need, and still a bound.
MESSAGE_BYTES_MAX = 64 << 20

_OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", PING_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    # Without this one grpc 1.81 does not notice a frozen peer, whatever the keepalive says.
    ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 300),
    # A long-lived stream is never retried by the library: what a retry means is the gateway's to say.
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
)
# The path of a socket is no name that HTTP/2 takes. With TLS the name is what the certificate is checked for.
_PLAIN_OPTIONS = (*_OPTIONS, ("grpc.default_authority", "crossdock"))


def open_channel(address: str, tls: ClientTls | None = None) -> grpc.aio.Channel:
    """A channel to a worker at host:port or unix:path. To be called in the running event loop. tls: for all that is not
    a socket of this machine, with the files as they are now. Raises OSError when these cannot be read."""
    if tls is None or address.startswith("unix:"):
        return grpc.aio.insecure_channel(address, options=_PLAIN_OPTIONS)
    return grpc.aio.secure_channel(address, tls.grpc_credentials(), options=_OPTIONS)
