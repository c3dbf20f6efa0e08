"""The process in which the gateway tries guides: python -m gateway.guide_process MODEL_PATH.

One guide at a time, a line of JSON in and a line out. It is a process of its own because a compiler may take for ever
or all memory over what strangers write: whoever started it kills it then. Ends with its parent.
"""

import os
import resource
import sys
from contextlib import suppress
from pathlib import Path

import orjson

from service.guide_compiler import GuideCompiler
from service.guides import Guide, GuideKind, GuideRefused
from service.parent import die_with_parent
from service.read_vocabulary import read_vocabulary

MEMORY_BYTES_MAX = 4 << 30
NICE = 5


def main(path: Path) -> None:
    """Says `null` once it is ready; then, of each guide, why it is refused, or null."""
    die_with_parent(pipe=None)
    os.nice(NICE)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX))
    compiler = GuideCompiler(lambda: read_vocabulary(path))
    with suppress(GuideRefused):  # then it refuses each guide so
        compiler.load()
    _say(None)
    for line in sys.stdin.buffer:
        _say(_refusal(compiler, orjson.loads(line)))


def _refusal(compiler: GuideCompiler, asked: dict[str, str]) -> str | None:
    guide = Guide(kind=GuideKind[asked["kind"]], text=asked["text"])
    try:
        compiler.matcher(guide).try_out()
    except GuideRefused as refused:
        return str(refused)
    return None


def _say(refusal: str | None) -> None:
    sys.stdout.buffer.write(orjson.dumps(refusal) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
