"""The `crossdock` command: finds the verb and hands the rest of the line over.

Imports a verb's module only when it is called: help and version must answer at once, and the light verbs must
work where only the client is installed. It parses no flag of any verb.
"""

import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import crossdock


@dataclass(frozen=True, slots=True)
class Verb:
    """function: takes the arguments after the verb, returns the exit code."""

    module: str
    function: str
    summary: str


VERBS = {
    "serve": Verb("commands.serve", "main", "gateway and workers on this machine"),
    "gateway": Verb("commands.process", "gateway_main", "one gateway"),
    "prefill-worker": Verb("commands.process", "prefill_worker_main", "one prefill worker"),
    "decode-worker": Verb("commands.process", "decode_worker_main", "one decode worker"),
    "generate": Verb("commands.generate", "main", "a prompt's answer, streamed to the terminal"),
    "keys": Verb("commands.keys", "main", "keys for KV blocks between machines, and API keys"),
    "proto": Verb("commands.proto", "main", "the .proto files, for stubs in other languages"),
    "status": Verb("commands.status", "main", "what runs where"),
    "audit": Verb("commands.audit", "main", "whether every worker's block ledger balances"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """argv: arguments after the command's own name; those of this process if absent. Returns the exit
    code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    match arguments:
        case [] | ["-h" | "--help" | "help", *_]:
            print(_usage())
            return 0 if arguments else 2
        case ["--version" | "-V", *_]:
            print(f"crossdock {crossdock.__version__}")
            return 0
        case [name, *rest] if name in VERBS:
            return _run(VERBS[name], rest)
    print(f"crossdock: {arguments[0]}: no such command; see crossdock --help", file=sys.stderr)
    return 2


def _run(verb: Verb, arguments: list[str]) -> int:
    try:
        module = importlib.import_module(verb.module)
    except ModuleNotFoundError as error:
        print(f"crossdock: {error.name} is missing; install crossdock[serve]", file=sys.stderr)
        return 2
    function: Callable[[list[str]], int] = getattr(module, verb.function)
    try:
        return function(arguments)
    except KeyboardInterrupt:
        return 130


def _usage() -> str:
    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {name:<{width}}  {verb.summary}" for name, verb in VERBS.items())
    return f"usage: crossdock <command> [flags]\n\n{verbs}\n\nFlags of a command: crossdock <command> --help"


if __name__ == "__main__":
    sys.exit(main())
