"""The process in which the gateway tries guides: python -m gateway.guide_process MODEL_PATH.

One guide at a time, a line of JSON in and a line out. It is a process of its own because a compiler may take for ever
or all memory over what strangers write. It ends by its own limits then, which are of what it used itself: how busy the
machine is says nothing of a guide. Ends with its parent.
"""

import os
import resource
import signal
import sys
from contextlib import suppress
from pathlib import Path

import orjson

from service.guide_compiler import GuideCompiler
from service.guides import Guide, GuideKind, GuideRefused
from service.parent import die_with_parent
from service.read_vocabulary import read_vocabulary

CPU_S = 2.0
"""Of its processor time, for one guide."""
MEMORY_BYTES_MAX = 4 << 30
NICE = 5
TOO_COMPLEX = f"takes more than {CPU_S:g} seconds of processor time or too much memory to compile"
OWN_ENDS = frozenset({-signal.SIGPROF, -signal.SIGABRT, -signal.SIGSEGV})
"""How it ends by its limits: of processor time, memory, its stack."""


def main(path: Path) -> None:
    """Says `null` once it is ready; then, of each guide, why it is refused, or null."""
    die_with_parent(pipe=None)
    os.nice(NICE)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX))
    compiler = GuideCompiler(lambda: read_vocabulary(path), compiled_max=1)
    with suppress(GuideRefused):  # then it refuses each guide so
        compiler.load()
    _say(None)
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, CPU_S)
        refusal = _refusal(compiler, orjson.loads(line))
        signal.setitimer(signal.ITIMER_PROF, 0)
        _say(refusal)


def _refusal(compiler: GuideCompiler, asked: dict[str, str]) -> str | None:
    guide = Guide(kind=GuideKind[asked["kind"]], text=asked["text"])
    try:
        compiler.matcher(guide).try_out()
    except GuideRefused as refused:
        return str(refused)
    except MemoryError:
        return TOO_COMPLEX
    return None


def _say(refusal: str | None) -> None:
    sys.stdout.buffer.write(orjson.dumps(refusal) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
