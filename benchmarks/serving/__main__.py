"""Load on one or two servers with the OpenAI completions API, and what it did.

    python -m benchmarks.serving [--url http://127.0.0.1:8000] [--url http://other:8000] run [--concurrency 8]
    python -m benchmarks.serving ... run --rate 2 [--mix]
    python -m benchmarks.serving ... prefill [--lengths 1024 4096]
    python -m benchmarks.serving ... interference [--streams 8] [--long-prompt 4096]
    python -m benchmarks.serving ... sweep [--rates 0.5 1 2] [--ttft-ms 2000] [--tpot-ms 100]

run: closed loop (so many requests at once) or open loop (Poisson arrivals). prefill: a lone prompt with an answer
of one token. interference: running streams before and while long prompts come back to back. sweep: an open loop of
a mix like ShareGPT's at rising rates, and the highest at which p99 keeps both limits. Definitions: `figures.py`.
With two urls each is measured in turn, `--rounds` times, medians are shown, and the second in parts of the first.
Needs aiohttp. Prompts are token ids where the server has /tokenize; else give its tokenizer.json.
"""

import argparse
import asyncio
import json
import random
from pathlib import Path
from statistics import median

from benchmarks.serving import prompts
from benchmarks.serving.client import Server
from benchmarks.serving.figures import Answer, Figures, Limits, flat, spread_ms, summary, window
from benchmarks.serving.load import Load, Size, beside, mix

WARM_UP = Size(prompt=16, answer=4)


async def run(load: Load, options: argparse.Namespace) -> Figures:
    requests = options.requests or (options.concurrency * 4 if options.rate is None else 30 * options.rate)
    sizes = [Size(prompt=options.prompt, answer=options.answer)] * max(1, round(requests))
    if options.mix:
        sizes = mix(len(sizes), options.seed)
    if options.rate is None:
        answers = await load.closed(sizes, options.concurrency)
    else:
        answers = await load.open(sizes, options.rate, options.seed)
    return summary(answers, _limits(options))


async def prefill(load: Load, options: argparse.Namespace) -> Figures:
    figures: Figures = {}
    for length in options.lengths:
        for _ in range(options.repeat):
            await load.ask(Size(prompt=length, answer=1))
        answers = load.take()
        first = spread_ms(answer.first_token_s for answer in answers if answer.whole)
        rate = round(length / first["p50"] * 1e3, 1) if first else None
        failures = sorted({answer.failure or "no token came" for answer in answers if not answer.whole})
        figures[f"{length} tokens"] = {"ttft_ms": first, "prompt_tokens_per_s": rate, "failures": failures}
    return figures


async def interference(load: Load, options: argparse.Namespace) -> Figures:
    size = Size(prompt=options.prompt, answer=options.answer)
    long = Size(prompt=options.long_prompt, answer=options.long_answer)
    seen = await beside(
        load, streams=options.streams, size=size, long=long, count=options.longs, before_s=options.before_s
    )
    whole = [answer for answer in seen.long if answer.whole]
    if not whole:
        return {"failures": sorted({answer.failure or "no token came" for answer in seen.long})}
    during = (min(answer.sent for answer in whole), max(answer.chunks[-1].at for answer in whole))
    return {
        "before": window(seen.streams, *seen.quiet, overlapping=False),
        "during": window(seen.streams, *during, overlapping=True),
        "long_ttft_ms": spread_ms(answer.first_token_s for answer in whole),
        "failures": sorted(
            {one.failure for one in (*seen.long, *seen.streams) if one.failure not in {None, "cut"}}
        ),
    }


async def sweep(load: Load, options: argparse.Namespace) -> Figures:
    figures: Figures = {"best_rate": 0.0}
    for rate in options.rates:
        answers = await load.open(mix(round(rate * options.seconds), options.seed), rate, options.seed)
        at_rate = figures[f"{rate}/s"] = summary(answers, _limits(options))
        if not _kept(at_rate, answers, options):
            break
        figures["best_rate"] = rate
    return figures


def _kept(figures: Figures, answers: list[Answer], options: argparse.Namespace) -> bool:
    per_token = figures.get("tpot_ms") or {"p99": 0.0}
    return (
        all(answer.whole for answer in answers)
        and figures["ttft_ms"]["p99"] <= options.ttft_ms
        and per_token["p99"] <= options.tpot_ms
    )


def _limits(options: argparse.Namespace) -> Limits:
    return Limits(first_token_ms=options.ttft_ms, per_token_ms=options.tpot_ms)


async def measure(options: argparse.Namespace) -> list[list[Figures]]:
    """For each url, the figures of each round. Rounds go over the urls in turn, so that both meet the same machine."""
    rounds: list[list[Figures]] = [[] for _ in options.url]
    for _ in range(options.rounds):
        for place, url in enumerate(options.url):
            async with Server(url, options.model, options.key) as server:
                made = (
                    prompts.from_tokenizer(options.tokenizer)
                    if options.tokenizer
                    else await prompts.from_server(server.tokenize)
                )
                load = Load(server, made, random.SystemRandom().getrandbits(48))
                await load.ask(WARM_UP)
                (warm,) = load.take()
                if not warm.whole:
                    raise SystemExit(f"{url}: {warm.failure or 'no token came'}")
                rounds[place].append(await options.way(load, options))
    return rounds


def report(options: argparse.Namespace, rounds: list[list[Figures]]) -> None:
    columns = [_medians(each) for each in rounds]
    names = list(dict.fromkeys(name for column in columns for name in column))
    for number, url in enumerate(options.url, 1):
        print(f"{number}: {url}")
    for name in names:
        values = [column.get(name) for column in columns]
        shown = " ".join("-".rjust(12) if value is None else f"{value:12.2f}" for value in values)
        first, last = values[0], values[-1]
        ratio = f" {last / first:9.2f}x" if len(values) > 1 and first and last is not None else ""
        print(f"{name:44} {shown}{ratio}")
    for url, each in zip(options.url, rounds, strict=True):
        for figures in each:
            if figures.get("failures"):
                print(f"failures at {url}: {figures['failures']}")


def _medians(rounds: list[Figures]) -> dict[str, float]:
    numbers = [flat(figures) for figures in rounds]
    names = dict.fromkeys(name for each in numbers for name in each)
    return {name: median(each[name] for each in numbers if name in each) for name in names}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.serving",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--url", action="append", help="of a server, without /v1; twice to compare")
    made.add_argument("--model", help="default: the first that the server lists")
    made.add_argument("--key", help="API key")
    made.add_argument("--tokenizer", help="the model's tokenizer.json, for a server without /tokenize")
    made.add_argument("--rounds", type=int, default=1)
    made.add_argument(
        "--seed", type=int, default=0, help="of sizes and arrival times; prompts are always new"
    )
    made.add_argument("--out", type=Path, help="JSON file for all figures of all rounds")
    ways = made.add_subparsers(required=True)
    for way in (run, prefill, interference, sweep):
        one = ways.add_parser(way.__name__)
        one.set_defaults(way=way)
        _options_of(one, way.__name__)
    return made


def _options_of(one: argparse.ArgumentParser, way: str) -> None:
    if way in {"run", "interference"}:
        one.add_argument("--prompt", type=int, default=128, help="tokens")
        one.add_argument("--answer", type=int, default=128 if way == "run" else 512, help="tokens")
    if way in {"run", "sweep"}:
        one.add_argument("--ttft-ms", type=float, default=2000.0, help="limit for a good answer")
        one.add_argument("--tpot-ms", type=float, default=100.0, help="limit for a good answer")
    match way:
        case "run":
            one.add_argument("--concurrency", type=int, default=8)
            one.add_argument("--rate", type=float, help="requests per second: open loop")
            one.add_argument("--requests", type=int, help="default: four per client, or 30 s at the rate")
            one.add_argument("--mix", action="store_true", help="lengths like ShareGPT's")
        case "prefill":
            one.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096])
            one.add_argument("--repeat", type=int, default=3)
        case "interference":
            one.add_argument("--streams", type=int, default=8)
            one.add_argument("--long-prompt", type=int, default=4096)
            one.add_argument("--long-answer", type=int, default=2)
            one.add_argument("--longs", type=int, default=3)
            one.add_argument("--before-s", type=float, default=10.0)
        case "sweep":
            one.add_argument("--rates", type=float, nargs="+", default=[0.5, 1, 2, 3, 4, 5, 6, 8])
            one.add_argument("--seconds", type=float, default=60.0, help="of each rate")


def main(argv: list[str] | None = None) -> None:
    options = parser().parse_args(argv)
    options.url = options.url or ["http://127.0.0.1:8000"]
    rounds = asyncio.run(measure(options))
    report(options, rounds)
    if options.out:
        results = [{"url": url, "rounds": each} for url, each in zip(options.url, rounds, strict=True)]
        options.out.write_text(json.dumps({"way": options.way.__name__, "results": results}, indent=1))


if __name__ == "__main__":
    main()
