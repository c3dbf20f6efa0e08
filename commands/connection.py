"""The flags by which a command reaches a gateway and says who it is. Needs the client only."""

import argparse
from pathlib import Path

from crossdock.client import DEFAULT_TARGET
from crossdock.credentials import Credentials


class FlagError(Exception):
    """A file of a flag cannot be read, or a flag is missing beside another. One line."""


def add_flags(parser: argparse.ArgumentParser, *, key_flag: str, key_help: str) -> None:
    """--target, the credential under its own name, and TLS."""
    parser.add_argument(
        "--target",
        default=DEFAULT_TARGET,
        help="gateway, or several ip:port with commas (default: %(default)s)",
    )
    parser.add_argument(key_flag, default="", dest="key", metavar="KEY", help=f"{key_help}, or @file")
    parser.add_argument(
        "--ssl-ca-certs", metavar="FILE", help="authorities of the gateway's certificate; TLS"
    )
    parser.add_argument("--ssl-certfile", metavar="FILE", help="our own certificate")
    parser.add_argument("--ssl-keyfile", metavar="FILE", help="its key")


def credentials(flags: argparse.Namespace) -> Credentials:
    """Raises FlagError."""
    if (flags.ssl_certfile is None) != (flags.ssl_keyfile is None):
        raise FlagError("--ssl-certfile and --ssl-keyfile go together")
    if flags.ssl_certfile is not None and flags.ssl_ca_certs is None:
        raise FlagError("--ssl-certfile: needs --ssl-ca-certs")
    key: str = flags.key
    if key.startswith("@"):
        key = (_read(key[1:]) or b"").decode("utf-8", "replace").strip()
    return Credentials(
        key=key,
        ca=_read(flags.ssl_ca_certs),
        certificate=_read(flags.ssl_certfile),
        private_key=_read(flags.ssl_keyfile),
    )


def _read(path: str | None) -> bytes | None:
    try:
        return None if path is None else Path(path).read_bytes()
    except OSError as error:
        raise FlagError(f"{path}: {error.strerror}") from None
