"""One call to a gateway's control service, for the commands that show its answer. Needs the client only."""

import argparse
import sys
from collections.abc import Callable
from typing import TypeVar

import grpc

from commands import connection, operator_token
from crossdock.client import request_error
from crossdock.credentials import Credentials
from crossdock.v1 import control_pb2_grpc as pb_grpc

_Response = TypeVar("_Response")


class Control:
    """The stub, and the credential and deadline that each call carries."""

    def __init__(self, channel: grpc.Channel, credentials: Credentials, timeout_s: float) -> None:
        self.stub = pb_grpc.ControlServiceStub(channel)
        self._metadata = credentials.metadata()
        self._timeout_s = timeout_s

    def call(self, method: Callable[..., _Response], request: object) -> _Response:
        return method(request, timeout=self._timeout_s, metadata=self._metadata)


def parser(verb: str, description: str, exit_codes: str) -> argparse.ArgumentParser:
    """A parser with the flags that every control command takes. exit_codes: what they mean, in a line."""
    parser = argparse.ArgumentParser(
        prog=f"crossdock {verb}", description=description, epilog=exit_codes, allow_abbrev=False
    )
    connection.add_flags(
        parser,
        key_flag="--control-token",
        key_help="credential; default: the one that your own `crossdock serve` on this machine has left for you",
    )
    parser.add_argument(
        "--timeout", type=float, default=10.0, metavar="SECONDS", help="(default: %(default)s)"
    )
    return parser


def run(flags: argparse.Namespace, show: Callable[[Control], int], *, unanswered: int = 1) -> int:
    """What `show` returns, or `unanswered` with one line on standard error when the gateway refuses or is not there."""
    try:
        flags.key = flags.key or operator_token.find(flags.target)
        credentials = connection.credentials(flags)
        with credentials.channel(flags.target) as channel:
            return show(Control(channel, credentials, flags.timeout))
    except grpc.RpcError as error:
        print(f"crossdock: {' '.join(str(request_error(error)).split())}", file=sys.stderr)
    except connection.FlagError as error:
        print(f"crossdock: {error}", file=sys.stderr)
    return unanswered
