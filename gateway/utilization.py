"""How busy what is behind this gateway is, as one report for clients and meshes.

Reads the workers' own reports and our admission; the process gives it to gRPC. Decides nothing by it.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from crossdock.mesh.v1 import load_report_pb2 as pb
from gateway.admission import Admission
from gateway.router import WorkerView
from gateway.worker_pool import WorkerPool
from service.orca import TRAILER_KEY, Rate, load_report
from service.worker_counts import PREFIX_HITS, PREFIX_QUERIES


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """All behind a gateway as if it were one engine. running, waiting: requests that are live. seats: sequences that
    generate at once. tokens, used_tokens: of KV, where sequences generate. waiting_tokens: of prompts, not computed
    yet. tokens_per_s: generated now, by what steps took lately. hit_rate: share of prompt tokens that were cached,
    since the workers' start. utilization: the largest of the shares."""

    running: int = 0
    waiting: int = 0
    seats: int = 0
    tokens: int = 0
    used_tokens: int = 0
    waiting_tokens: int = 0
    tokens_per_s: float = 0.0
    hit_rate: float = 0.0
    utilization: float = 0.0


class Utilization:
    """requests_max: that may be live here. clock: seconds, monotonic."""

    def __init__(
        self,
        prefills: WorkerPool,
        decodes: WorkerPool,
        admission: Admission,
        requests_max: int,
        clock: Callable[[], float],
    ) -> None:
        self._prefills = prefills
        self._decodes = decodes
        self._admission = admission
        self._requests_max = requests_max
        self._clock = clock
        self._calls, self._failures = Rate(), Rate()

    def trailer(self, *, failed: bool) -> tuple[tuple[str, bytes], ...]:
        """What a call that ends now tells in its trailing metadata. failed: through a fault of ours."""
        now = self._clock()
        self._calls.count(now)
        if failed:
            self._failures.count(now)
        return ((TRAILER_KEY, self.report().SerializeToString()),)

    def engine(self) -> EngineLoad:
        """The same for who knows engines."""
        serving = [each for each in self._decodes.views() if _serves(each)]
        used = sum((each.total_blocks - each.free_blocks) * each.block_size for each in serving)
        waiting = self._admission.waiting
        report = self.report()
        return EngineLoad(
            running=self._admission.live - waiting,
            waiting=waiting,
            seats=sum(each.seats for each in serving),
            tokens=sum(each.total_blocks * each.block_size for each in serving),
            used_tokens=used,
            waiting_tokens=round(report.named_metrics["waiting_tokens"]),
            tokens_per_s=sum(1000 * each.sequences / each.step_ms for each in serving if each.step_ms),
            hit_rate=self._counted(PREFIX_HITS) / max(1, self._counted(PREFIX_QUERIES)),
            utilization=report.application_utilization,
        )

    def report(self) -> pb.OrcaLoadReport:
        """Of the calls so far and the workers' latest reports."""
        prefills, decodes, now = self._prefills.views(), self._decodes.views(), self._clock()
        loads = [worker.load for pool in (self._prefills, self._decodes) for worker in pool]
        return load_report(
            shares={
                "prefill": _share(prefills),
                "decode": _share(decodes),
                "requests": self._admission.live / self._requests_max,
            },
            counts={
                "kv_cache_usage": _mean([_kv_usage(each) for each in decodes if each.ready]),
                "num_requests_running": sum(load.running_sequences for load in loads),
                "num_requests_waiting": sum(load.waiting_sequences for load in loads),
                "waiting_tokens": sum(load.waiting_tokens for load in loads),
                "live_requests": self._admission.live,
            },
            calls=self._calls.at(now),
            failures=self._failures.at(now),
        )

    def _counted(self, name: str) -> int:
        return sum(worker.counts.get(name, 0) for pool in (self._prefills, self._decodes) for worker in pool)


def _share(workers: Iterable[WorkerView]) -> float:
    """Of a pool that is taken: seats or blocks, whichever is scarcer. A pool in which nobody serves is full."""
    serving = [each for each in workers if _serves(each)]
    if not serving:
        return 1.0
    return _mean([max(_kv_usage(each), each.sequences / max(1, each.seats)) for each in serving])


def _serves(worker: WorkerView) -> bool:
    return worker.ready and not worker.frozen


def _kv_usage(worker: WorkerView) -> float:
    return 1 - worker.free_blocks / max(1, worker.total_blocks)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
