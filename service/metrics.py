"""The numbers a process shows to Prometheus, in a registry of its own.

Names are those that vLLM users know, with a `pool` label; on wish the same numbers are there under vLLM's own names.
Owners of a number tell it here; nothing here measures, counts blocks or reads a clock. Gauges are set from a recount,
never added to.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from service.errors import ServiceError
from service.worker_counts import WorkerCounts

Pool = Literal["gateway", "prefill", "decode"]
Names = Literal["native", "vllm"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_PREFIX = "crossdock_"
_FIRST_TOKEN_SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)
_PER_TOKEN_SECONDS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.5, 1, 2)
_WHOLE_SECONDS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300)
_VLLM = {
    "num_requests_running": "num_requests_running",
    "num_requests_waiting": "num_requests_waiting",
    "kv_cache_usage_perc": "kv_cache_usage_perc",
    "cache_config_info": "cache_config_info",
    "num_preemptions": "num_preemptions",
    "prefix_cache_queries": "prefix_cache_queries",
    "prefix_cache_hits": "prefix_cache_hits",
    "prompt_tokens": "prompt_tokens",
    "generation_tokens": "generation_tokens",
    "time_to_first_token_seconds": "time_to_first_token_seconds",
    "inter_token_latency_seconds": "inter_token_latency_seconds",
    "time_per_output_token_seconds": "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds": "e2e_request_latency_seconds",
}
"""What vLLM has too, and its name there."""


class Metrics:
    """One per process. names: under which every number is shown."""

    def __init__(self, names: tuple[Names, ...] = ("native",)) -> None:
        self._registry = CollectorRegistry(auto_describe=True)
        self._shown = [self._registry] if "native" in names else []
        if "vllm" in names:
            self._shown.append(CollectorRegistry())
            self._shown[-1].register(_VllmNames(self._registry))
        self._running = self._gauge("num_requests_running", "Sequences in the running batch")
        self._waiting = self._gauge("num_requests_waiting", "Sequences not yet scheduled")
        self._usage = self._gauge("kv_cache_usage_perc", "KV blocks in use, 1 is all of them")
        self._borrowed = self._gauge(
            "borrowed_core_seconds", "What cores of other workers have computed for this one"
        )
        self._cache = Gauge(
            _PREFIX + "cache_config_info",
            "Of what a worker's KV cache is made",
            ["pool", "worker", "block_size", "num_gpu_blocks"],
            registry=self._registry,
        )
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "From acceptance to the first token", _FIRST_TOKEN_SECONDS
        )
        self._per_token = self._histogram(
            "time_per_output_token_seconds", "Mean over an answer, after its first token", _PER_TOKEN_SECONDS
        )
        self._whole = self._histogram(
            "e2e_request_latency_seconds", "From acceptance to the end of the answer", _WHOLE_SECONDS
        )
        self._gaps = _Gaps(_PREFIX + "inter_token_latency_seconds", _PER_TOKEN_SECONDS)
        self._registry.register(self._gaps)
        self._counts = WorkerCounts(_PREFIX)
        self._registry.register(self._counts)
        self._requests = self._counter("requests", "Requests that have ended", ["outcome"])
        self._prompt_tokens = self._counter("prompt_tokens", "Tokens in prompts", ["pool"])
        self._generated = self._counter("generation_tokens", "Tokens generated", ["pool"])

    def set_load(
        self, pool: Pool, worker: str, *, running: int, waiting: int, kv_usage: float, borrowed_s: float
    ) -> None:
        """kv_usage: in [0, 1]. borrowed_s: seconds of one core."""
        self._running.labels(pool, worker).set(running)
        self._waiting.labels(pool, worker).set(waiting)
        self._usage.labels(pool, worker).set(kv_usage)
        self._borrowed.labels(pool, worker).set(borrowed_s)

    def set_cache(self, pool: Pool, worker: str, *, block_size: int, blocks: int) -> None:
        """block_size: tokens in a block; blocks: in all."""
        self._cache.labels(pool, worker, str(block_size), str(blocks)).set(1)

    def set_counts(self, pool: Pool, worker: str, counts: Mapping[str, int]) -> None:
        """What a worker has counted since its start, by the names of `service.worker_counts`."""
        self._counts.put(pool, worker, counts)

    def forget(self, pool: Pool, worker: str) -> None:
        """Shows a worker that is gone no longer."""
        for gauge in (self._running, self._waiting, self._usage, self._borrowed):
            gauge.remove(pool, worker)
        self._cache.remove_by_labels({"pool": pool, "worker": worker})
        self._counts.forget(pool, worker)

    def observe_first_token(self, pool: Pool, seconds: float) -> None:
        self._first_token.labels(pool).observe(seconds)

    def observe_per_token(self, pool: Pool, seconds: float) -> None:
        self._per_token.labels(pool).observe(seconds)

    def observe_gap(self, seconds: float) -> None:
        """Between two messages with tokens of one answer. Cheap: it is called for each of them."""
        self._gaps.observe(seconds)

    def observe_whole(self, pool: Pool, seconds: float) -> None:
        self._whole.labels(pool).observe(seconds)

    def count_request(self, outcome: str) -> None:
        """outcome: "stop", "length", "cancelled", or an error's reason in lower case."""
        self._requests.labels(outcome).inc()

    def count_refusal(self, error: ServiceError) -> None:
        """Of a call of which no request was accepted."""
        self.count_request(error.reason.lower())

    def count_tokens(self, pool: Pool, *, prompt: int = 0, generated: int = 0) -> None:
        self._prompt_tokens.labels(pool).inc(prompt)
        self._generated.labels(pool).inc(generated)

    def render(self) -> bytes:
        """The text that a scrape gets, of CONTENT_TYPE."""
        return b"".join(generate_latest(registry) for registry in self._shown)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(_PREFIX + name, text, ["pool", "worker"], registry=self._registry)

    def _counter(self, name: str, text: str, labels: list[str]) -> Counter:
        return Counter(_PREFIX + name, text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(_PREFIX + name, text, ["pool"], registry=self._registry, buckets=buckets)


class _Gaps(Collector):
    """A histogram of the gateway's own that costs next to nothing to add to, from one thread."""

    def __init__(self, name: str, bounds: Sequence[float]) -> None:
        self._name, self._bounds = name, tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._sum += seconds

    def collect(self) -> Iterator[Metric]:
        limits = [*map(str, map(float, self._bounds)), "+Inf"]
        buckets = list(zip(limits, map(float, accumulate(self._counts)), strict=True))
        text = "Between two messages with tokens of one answer"
        family = HistogramMetricFamily(self._name, text, labels=["pool"])
        family.add_metric(["gateway"], buckets, self._sum)
        yield family


class _VllmNames(Collector):
    """The families of another registry that vLLM has too, under its names."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            known = _VLLM.get(family.name.removeprefix(_PREFIX))
            if known is None:
                continue
            renamed = Metric(f"vllm:{known}", family.documentation, family.type)
            renamed.samples = [
                sample._replace(name=sample.name.replace(family.name, renamed.name, 1))
                for sample in family.samples
            ]
            yield renamed
