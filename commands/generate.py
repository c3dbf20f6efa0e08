"""`crossdock generate`: one prompt's answer, streamed to the terminal. Needs the client only."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from commands import connection
from crossdock.client import Client, Delta, Generation, Message, Prompt, RequestError


def main(argv: Sequence[str]) -> int:
    """Returns 0 when the answer is complete, 1 with one line on standard error when it is not."""
    flags = _parser().parse_args(argv)
    try:
        with Client(flags.target, credentials=connection.credentials(flags)) as client:
            for delta in client.stream(_prompt(flags), _generation(flags)):
                _show(delta, flags)
        if flags.logprobs is None:
            print()
    except (RequestError, connection.FlagError) as error:
        print(f"crossdock generate: {_one_line(error)}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # Whoever read our output has gone; Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="crossdock generate",
        description="Streams a prompt's answer to the terminal.",
        allow_abbrev=False,
    )
    parser.add_argument("prompt", help='the text; "-" reads standard input')
    connection.add_flags(parser, key_flag="--api-key", key_help="where the gateway asks for one")
    parser.add_argument("--model", default="", help="served model name (default: the server's)")
    parser.add_argument("--max-tokens", type=int, default=256, help="(default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default: %(default)s)")
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--min-p", type=float)
    parser.add_argument("--presence-penalty", type=float)
    parser.add_argument("--frequency-penalty", type=float)
    parser.add_argument("--repetition-penalty", type=float)
    parser.add_argument(
        "--logit-bias",
        type=_bias,
        action="append",
        metavar="ID:BIAS",
        help="added to a token's logit; repeatable",
    )
    parser.add_argument("--seed", type=int)
    parser.add_argument("--stop", action="append", default=[], help="string that ends the answer; repeatable")
    parser.add_argument("--ignore-eos", action="store_true", help="go on after the end-of-sequence token")
    parser.add_argument("--chat", action="store_true", help="the prompt is a user's message")
    parser.add_argument("--system", help="system message; implies --chat")
    parser.add_argument(
        "--token-ids", action="store_true", help="the prompt is token ids, and so is the answer"
    )
    parser.add_argument("--logprobs", type=int, metavar="N", help="a line per token: logprob, N alternatives")
    guide = parser.add_mutually_exclusive_group()
    guide.add_argument("--json-schema", metavar="FILE", help="the answer is JSON of the schema in this file")
    guide.add_argument("--json", action="store_true", help="the answer is a JSON object")
    guide.add_argument("--regex", help="the answer matches this expression")
    guide.add_argument("--choice", action="append", help="the answer is one of these strings; repeatable")
    guide.add_argument("--grammar", metavar="FILE", help="the answer follows the grammar (Lark) in this file")
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="for the whole answer")
    return parser


def _bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition(":")
    try:
        return int(token), float(bias)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not ID:BIAS") from None


def _prompt(flags: argparse.Namespace) -> Prompt:
    text: str = sys.stdin.read() if flags.prompt == "-" else flags.prompt
    if flags.token_ids:
        try:
            return [int(part) for part in text.replace(",", " ").split()]
        except ValueError:
            raise RequestError("INVALID_ARGUMENT", "prompt: token ids are numbers") from None
    if flags.chat or flags.system is not None:
        system = [Message(role="system", content=flags.system)] if flags.system is not None else []
        return [*system, Message(role="user", content=text)]
    return text


def _generation(flags: argparse.Namespace) -> Generation:
    return Generation(
        model=flags.model,
        temperature=flags.temperature,
        top_p=flags.top_p,
        top_k=flags.top_k,
        min_p=flags.min_p,
        presence_penalty=flags.presence_penalty,
        frequency_penalty=flags.frequency_penalty,
        repetition_penalty=flags.repetition_penalty,
        logit_bias=None if flags.logit_bias is None else dict(flags.logit_bias),
        seed=flags.seed,
        max_tokens=flags.max_tokens,
        stop=tuple(flags.stop),
        ignore_eos=flags.ignore_eos,
        logprobs=flags.logprobs,
        timeout_s=flags.timeout,
        json_schema=_content(flags.json_schema, "--json-schema"),
        json_object=flags.json,
        regex=flags.regex,
        choice=None if flags.choice is None else tuple(flags.choice),
        grammar=_content(flags.grammar, "--grammar"),
    )


def _content(path: str | None, flag: str) -> str | None:
    """Of a file that a flag names. Raises RequestError."""
    try:
        return None if path is None else Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        raise RequestError("INVALID_ARGUMENT", f"{flag}: {path}: cannot be read as text") from None


def _show(delta: Delta, flags: argparse.Namespace) -> None:
    if flags.logprobs is not None:
        for token in delta.logprobs:
            top = " ".join(f"{other}:{logprob:.4f}" for other, logprob in token.top)
            print(f"{token.token_id}\t{token.logprob:.4f}\t{top}".rstrip(), flush=True)
    elif flags.token_ids:
        print("".join(f"{token} " for token in delta.token_ids), end="", flush=True)
    else:
        print(delta.text, end="", flush=True)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
