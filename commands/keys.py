"""`crossdock keys`: makes the key pairs with which workers on different machines know each other."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from kvtransfer import keys
from kvtransfer.errors import KeysRefused
from service.startup import EXIT_CODE

_DESCRIPTION = """\
Makes FOLDER/NAME.secret and FOLDER/NAME.public for each NAME: a worker's id, or the first part of the ids of several
(the key `decode` serves decode-0, decode-1, ...). Copy all .public files to every worker's folder, but each .secret
file only to where that worker runs, and start the workers with --kv-key-folder.
"""


def main(argv: Sequence[str]) -> int:
    """Returns 0, or 2 when a pair cannot be made; those made before stay."""
    parser = argparse.ArgumentParser(prog="crossdock keys", description=_DESCRIPTION, allow_abbrev=False)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("names", nargs="+", metavar="NAME")
    flags = parser.parse_args(argv)
    try:
        for name in flags.names:
            keys.make(flags.folder, name)
            print(f"{flags.folder / name}.secret")
    except KeysRefused as error:
        print(f"crossdock keys: {error}", file=sys.stderr)
        return EXIT_CODE
    return 0
