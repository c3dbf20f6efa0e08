"""Bytes that mean no good, and the ways to throw them at a listening socket.

Each attack returns when the other end has taken the bytes: it answered, hung up, or acknowledged them.
"""

import gzip
import random
import socket
import ssl
import struct
from contextlib import ExitStack, contextmanager, suppress

import grpc
import zmq
from zmq.utils.monitor import recv_monitor_message

from kvtransfer import shm_ring, wire

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
ZMTP = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16 + 32)
CURVE = b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE" + bytes(15 + 32)
HANDSHAKES = (
    zmq.Event.HANDSHAKE_SUCCEEDED
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_AUTH
)
ANSWER_MS = 10_000
PIECE_BYTES = 60_000
METHODS = (
    "/crossdock.v1.InferenceService/Generate",
    "/crossdock.v1.InferenceService/GenerateStream",
    "/crossdock.v1.ControlService/Audit",
    "/crossdock.worker.v1.PrefillService/Attach",
    "/crossdock.worker.v1.DecodeService/Attach",
    "/grpc.health.v1.Health/Check",
    "/grpc.health.v1.Health/Watch",
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    "/no.such.Service/Method",
)


def pickles(command):
    """Messages that run a shell command in whoever unpickles them, one per protocol 0 to 5, and compressed."""
    text = command.encode()
    plain = b"cposix\nsystem\n(S'%s'\ntR." % text
    short = b"(X" + struct.pack("<I", len(text)) + text + b"tR."
    stacked = b"\x8c\x05posix\x8c\x06system\x93X" + struct.pack("<I", len(text)) + text + b"\x85R."
    made = [
        plain,
        b"cposix\nsystem\n" + short,
        b"\x80\x02cposix\nsystem\n" + short,
        b"\x80\x03cposix\nsystem\n" + short,
        b"\x80\x04\x95" + struct.pack("<Q", len(stacked)) + stacked,
        b"\x80\x05\x95" + struct.pack("<Q", len(stacked)) + stacked,
    ]
    return [*made, *map(gzip.compress, made)]


def noise():
    """No protocol's bytes, or the beginning of one and then something else."""
    dice = random.Random(1)
    garbage = dice.randbytes(100_000)
    return [
        b"\x00",
        garbage[:1],
        garbage[:100],
        garbage,
        bytes(100_000),
        b"\r\n" * 50_000,
        _tls_hello(),
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 1_000_000,
        b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 99999999999\r\n\r\n{",
        b"POST /tokenize HTTP/1.1\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"1\r\n{\r\n0\r\nX: " + b"x" * 1_000_000,
        b"POST /tokenize HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n",
        PREFACE + garbage,
        PREFACE + SETTINGS + garbage,
        PREFACE + SETTINGS + _frame(0, 1, length=(1 << 24) - 1) + bytes(1_000_000),
        PREFACE + SETTINGS + _frame(1, 1, b"\x82") + _frame(9, 1, b"\x82" * 16_000) * 60,
        PREFACE + SETTINGS * 10_000,
        PREFACE + SETTINGS + _frame(6, 0, bytes(8)) * 10_000,
        ZMTP + garbage,
        ZMTP + b"\x04\x05\x00",
        ZMTP + b"\x06" + b"\xff" * 8 + garbage,
        ZMTP + _ready() + b"\x02" + struct.pack(">Q", 1 << 62) + garbage,
        ZMTP + _ready() + (b"\x00\x01x" * 3) + b"\x01\x00" * 10_000,
        CURVE + garbage,
        CURVE + b"\x04\xc8\x05HELLO\x01\x00" + garbage[:192],
        b"\x01\x00" + garbage,
        b"\xff" + bytes(7) + b"\x01\x7f\x00" + garbage,
        b"\x91" * 100_000,
        b"\xdd\xff\xff\xff\xff" + garbage,
    ]


def throw(listener, data):
    """The bytes, and then the end of the stream; waits until the other end has hung up as well."""
    with listener.connect() as connection:
        try:
            for start in range(0, len(data), PIECE_BYTES):
                connection.sendall(data[start : start + PIECE_BYTES])
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(65_536):
                continue
        except TimeoutError:
            raise
        except OSError:  # cut off
            return


@contextmanager
def half_open(listener, count):
    """So many connections that say nothing, or stop in the middle of a word, while the block runs. They end
    with a reset."""
    words = (b"", b"\xff", PREFACE[:10], PREFACE + SETTINGS, b"GET / HT", ZMTP)
    with ExitStack() as open_connections:
        for number in range(count):
            connection = open_connections.enter_context(listener.connect())
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.sendall(words[number % len(words)])
        yield


@contextmanager
def unread(listener, spoken, count):
    """So many connections that ask for something, if that can be, and never read, while the block runs. They end with a
    reset. Where so many are not taken, those that are."""
    asked = {
        "grpc": PREFACE + SETTINGS,
        "http": b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 50,
        "zmq": ZMTP + _ready(),
    }
    with ExitStack() as open_connections:
        for _ in range(count):
            with suppress(OSError):
                connection = open_connections.enter_context(listener.connect())
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                connection.sendall(asked.get(spoken, b""))
        yield


def call(listener, data):
    """The bytes as the message of every method of ours, and of some that nobody has."""
    with grpc.insecure_channel(listener.grpc_target()) as channel:
        for method in METHODS:
            with suppress(grpc.RpcError, StopIteration):
                answers = channel.stream_stream(method)(iter([data, data]), timeout=ANSWER_MS / 1000)
                next(answers)
                answers.cancel()


def post(listener, data):
    """The bytes as the body of a request."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n"
    for content_type in (b"application/json", b"application/octet-stream"):
        throw(listener, head % (content_type, len(data)) + data)


def send(listener, data):
    """The bytes as messages of ZeroMQ: alone, as each part of three, and as many parts. A greeting that cannot
    be meant for the other end comes last: its answer says that all before it were taken."""
    with zmq.Context.instance().socket(zmq.DEALER) as raw:
        raw.setsockopt(zmq.LINGER, 0)
        # Who sends again what was cut off, and closes in the midst of it, is ended by an assertion in libzmq 4.3.5.
        raw.setsockopt(zmq.RECONNECT_IVL, 100 * ANSWER_MS)
        monitor = raw.get_monitor_socket(HANDSHAKES | zmq.Event.DISCONNECTED)
        monitor.setsockopt(zmq.RCVTIMEO, ANSWER_MS)
        raw.connect(listener.zmq_endpoint())
        if recv_monitor_message(monitor)["event"] == zmq.Event.HANDSHAKE_SUCCEEDED:
            for parts in ([data], [data, b"", b""], [b"", data, b""], [b"", b"", data], [data] * 100, [b""]):
                raw.send_multipart(parts)
            raw.send(_misdirected_greeting())
            answered, _, _ = zmq.select([raw, monitor], [], [], ANSWER_MS / 1000)
            assert answered, "neither an answer nor a hang-up"
        raw.disable_monitor()
        monitor.close(0)


def pack(listener, data):
    """The bytes as packets between processes of one host: about no slot, about one, and about none there is."""
    for slots in ((), (0,), (1 << 30,)):
        throw(listener, shm_ring.pack(data[: PIECE_BYTES - 8], slots))


def _misdirected_greeting():
    hello = wire.Hello(layout=(), fingerprint=bytes(32), source_id="nobody", target_id="nobody")
    return wire.encode(
        wire.Envelope(source_epoch=1, target_epoch=1, attempt=0, ticket_id=wire.NO_TICKET, message=hello)
    )


def _tls_hello():
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        ssl.create_default_context().wrap_bio(incoming, outgoing, server_hostname="x").do_handshake()
    return outgoing.read()


def _frame(kind, stream, payload=b"", *, length=None):
    """Of HTTP/2 (RFC 9113, section 4.1), without flags."""
    size = len(payload) if length is None else length
    return struct.pack(">I", size)[1:] + bytes([kind, 0]) + struct.pack(">I", stream) + payload


def _ready():
    """ZMTP 3 (https://rfc.zeromq.org/spec/23): the handshake's last command, from a DEALER."""
    body = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
    return b"\x04" + bytes([len(body)]) + body


def unknown_field(number, data):
    """On the wire, of the type "length-delimited"."""
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _varint(value):
    octets = b""
    while value > 0x7F:
        octets, value = octets + bytes([value & 0x7F | 0x80]), value >> 7
    return octets + bytes([value])
