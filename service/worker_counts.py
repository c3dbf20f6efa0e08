"""What workers count since their start, as a scrape shows it: preemptions, cached prefixes, what hand-offs met.

Workers name their counts; "family.kind" is one kind of a family. Whoever hears of them puts them here as they come; a
worker that starts again begins at 0, which is what Prometheus expects of a counter. Adds nothing up.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.metrics_core import CounterMetricFamily
from prometheus_client.registry import Collector

COUNTS_MAX = 128
NAME_CHARS_MAX = 64
PREEMPTIONS = "preemptions"
SWAP_OUTS = "swap_outs"
PREFIX_QUERIES = "prefix_cache_queries"
PREFIX_HITS = "prefix_cache_hits"
TRANSFER_BYTES = "transfer_bytes"
TRANSFERS = "transfers"
TRANSFER_FAILURES = "transfer_failures"
TRANSFER_EVENTS = "transfer_events"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """kind: the label that the part of a name after the dot becomes, None where there is none."""

    name: str
    text: str
    kind: str | None = None


_FAMILIES = {
    PREEMPTIONS: _Family(name="num_preemptions", text="Sequences given up for want of blocks"),
    SWAP_OUTS: _Family(name="num_swap_outs", text="Of these, sequences that went to host memory"),
    PREFIX_QUERIES: _Family(
        name="prefix_cache_queries", text="Prompt tokens looked for among cached prefixes"
    ),
    PREFIX_HITS: _Family(name="prefix_cache_hits", text="Prompt tokens found among cached prefixes"),
    TRANSFER_BYTES: _Family(name="kv_transfer_bytes", text="KV sent by a prefill, placed by a decode worker"),
    TRANSFERS: _Family(
        name="kv_transfers", text="Hand-offs that were committed, at the prefill worker", kind="transport"
    ),
    TRANSFER_FAILURES: _Family(name="kv_transfer_failures", text="Hand-offs that failed", kind="reason"),
    TRANSFER_EVENTS: _Family(name="kv_transfer_events", text="What hand-offs met", kind="event"),
}


class WorkerCounts(Collector):
    """prefix: of every name. Counts of names that are not known here are not shown."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._counts: dict[tuple[str, str], Mapping[str, int]] = {}

    def put(self, pool: str, worker: str, counts: Mapping[str, int]) -> None:
        """The latest counts of a worker. What is too many or too long is left out."""
        short = {name: count for name, count in counts.items() if len(name) <= NAME_CHARS_MAX}
        self._counts[pool, worker] = dict(list(short.items())[:COUNTS_MAX])

    def forget(self, pool: str, worker: str) -> None:
        self._counts.pop((pool, worker), None)

    def collect(self) -> Iterator[CounterMetricFamily]:
        for family, shown in _FAMILIES.items():
            labels = ["pool", "worker"] + ([shown.kind] if shown.kind else [])
            metric = CounterMetricFamily(self._prefix + shown.name, shown.text, labels=labels)
            for (pool, worker), counts in self._counts.items():
                for name, count in counts.items():
                    of, _, kind = name.partition(".")
                    if of == family and bool(kind) == bool(shown.kind):
                        metric.add_metric([pool, worker, *([kind] if kind else [])], count)
            yield metric
