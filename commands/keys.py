"""`crossdock keys`: makes the key pairs with which workers on different machines know each other, and API keys."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from kvtransfer import keys
from kvtransfer.errors import KeysRefused
from service.startup import EXIT_CODE, StartupError

_DESCRIPTION = """\
Makes PATH/NAME.secret and PATH/NAME.public for each NAME: a worker's id, or the first part of the ids of several
(the key `decode` serves decode-0, decode-1, ...). Copy all .public files to every worker's folder, but each .secret
file only to where that worker runs, and start the workers with --kv-key-folder.

With --api makes an API key for each NAME, a tenant, and prints it, once: the file PATH gets its hash, and a gateway
with --api-keys PATH takes it within a second. A tenant may have several keys; a line deleted is a key revoked.
"""


def main(argv: Sequence[str]) -> int:
    """Returns 0, or 2 when a key cannot be made; those made before stay."""
    parser = argparse.ArgumentParser(prog="crossdock keys", description=_DESCRIPTION, allow_abbrev=False)
    parser.add_argument("--api", action="store_true", help="API keys, in the file PATH")
    parser.add_argument("path", type=Path, metavar="PATH", help="folder; with --api a file")
    parser.add_argument("names", nargs="+", metavar="NAME")
    flags = parser.parse_args(argv)
    try:
        for name in flags.names:
            print(_make_api_key(flags.path, name) if flags.api else _make_pair(flags.path, name))
    except (KeysRefused, StartupError) as error:
        print(f"crossdock keys: {error}", file=sys.stderr)
        return EXIT_CODE
    return 0


def _make_pair(folder: Path, name: str) -> Path:
    keys.make(folder, name)
    return folder / f"{name}.secret"


def _make_api_key(path: Path, tenant: str) -> str:
    from gateway import api_keys

    return api_keys.make(path, tenant)
