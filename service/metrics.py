"""The numbers a process shows to Prometheus, in a registry of its own.

Names are those that vLLM users know, with a `pool` label. Owners of a number tell it here; nothing here
measures, counts blocks or reads a clock. Gauges are set from a recount, never added to.
"""

from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

Pool = Literal["gateway", "prefill", "decode"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_FIRST_TOKEN_SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)
_PER_TOKEN_SECONDS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.5, 1, 2)


class Metrics:
    """One per process."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry(auto_describe=True)
        self._running = self._gauge("crossdock_num_requests_running", "Sequences in the running batch")
        self._waiting = self._gauge("crossdock_num_requests_waiting", "Sequences not yet scheduled")
        self._usage = self._gauge("crossdock_kv_cache_usage_perc", "KV blocks in use, 1 is all of them")
        self._borrowed = self._gauge(
            "crossdock_borrowed_core_seconds", "What cores of other workers have computed for this one"
        )
        self._first_token = Histogram(
            "crossdock_time_to_first_token_seconds",
            "From acceptance to the first token",
            ["pool"],
            registry=self._registry,
            buckets=_FIRST_TOKEN_SECONDS,
        )
        self._per_token = Histogram(
            "crossdock_time_per_output_token_seconds",
            "Mean over an answer, after its first token",
            ["pool"],
            registry=self._registry,
            buckets=_PER_TOKEN_SECONDS,
        )
        self._requests = self._counter("crossdock_requests", "Requests that have ended", ["outcome"])
        self._prompt_tokens = self._counter("crossdock_prompt_tokens", "Tokens in prompts", ["pool"])
        self._generated = self._counter("crossdock_generation_tokens", "Tokens generated", ["pool"])

    def set_load(
        self, pool: Pool, worker: str, *, running: int, waiting: int, kv_usage: float, borrowed_s: float
    ) -> None:
        """kv_usage: in [0, 1]. borrowed_s: seconds of one core."""
        self._running.labels(pool, worker).set(running)
        self._waiting.labels(pool, worker).set(waiting)
        self._usage.labels(pool, worker).set(kv_usage)
        self._borrowed.labels(pool, worker).set(borrowed_s)

    def forget(self, pool: Pool, worker: str) -> None:
        """Shows a worker that is gone no longer."""
        for gauge in (self._running, self._waiting, self._usage, self._borrowed):
            gauge.remove(pool, worker)

    def observe_first_token(self, pool: Pool, seconds: float) -> None:
        self._first_token.labels(pool).observe(seconds)

    def observe_per_token(self, pool: Pool, seconds: float) -> None:
        self._per_token.labels(pool).observe(seconds)

    def count_request(self, outcome: str) -> None:
        """outcome: "stop", "length", "cancelled", or an error's reason in lower case."""
        self._requests.labels(outcome).inc()

    def count_tokens(self, pool: Pool, *, prompt: int = 0, generated: int = 0) -> None:
        self._prompt_tokens.labels(pool).inc(prompt)
        self._generated.labels(pool).inc(generated)

    def render(self) -> bytes:
        """The text that a scrape gets, of CONTENT_TYPE."""
        return generate_latest(self._registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, ["pool", "worker"], registry=self._registry)

    def _counter(self, name: str, text: str, labels: list[str]) -> Counter:
        return Counter(name, text, labels, registry=self._registry)
