"""Logs, metrics and the timeline of a request."""

import io
import json
import logging

import pytest
import structlog
from prometheus_client.parser import text_string_to_metric_families

from service import logs
from service.metrics import Metrics
from service.timeline import Instant, Timeline


@pytest.fixture
def written():
    """Configures logging into a buffer; the process's own set-up is back afterwards."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level

    def configure(log_format: str, level: str = "info") -> io.StringIO:
        stream = io.StringIO()
        fields = {"pool": "decode", "worker_id": "decode-0"}
        logs.configure(level=level, log_format=log_format, fields=fields, stream=stream)
        return stream

    yield configure
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def test_our_events_and_those_of_libraries_have_one_shape(written):
    stream = written("json")
    structlog.stdlib.get_logger("ours").info("request ended", request_id="r-1", tokens=3)
    logging.getLogger("theirs").warning("port %d\nis odd", 7)
    ours, theirs = (json.loads(line) for line in stream.getvalue().splitlines())
    assert (ours["msg"], ours["request_id"], ours["tokens"], ours["level"]) == (
        "request ended",
        "r-1",
        3,
        "info",
    )
    assert (theirs["msg"], theirs["level"], theirs["logger"]) == ("port 7\nis odd", "warning", "theirs")
    assert {event["worker_id"] for event in (ours, theirs)} == {"decode-0"}


def test_text_is_one_line_per_event_even_with_a_traceback(written):
    stream = written("text")
    try:
        raise ValueError("broken")
    except ValueError:
        structlog.stdlib.get_logger("ours").exception("step failed", worker="a b")
    assert len(stream.getvalue().splitlines()) == 1
    for part in ("error", "step failed", "pool=decode", "worker='a b'", "ValueError: broken"):
        assert part in stream.getvalue()


def test_events_under_the_level_are_not_written(written):
    stream = written("text", level="warning")
    structlog.stdlib.get_logger("ours").info("quiet")
    assert stream.getvalue() == ""


def samples(metrics: Metrics) -> dict[tuple[str, ...], float]:
    families = text_string_to_metric_families(metrics.render().decode())
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }


def test_a_scrape_shows_the_names_that_users_know():
    metrics = Metrics()
    metrics.set_load("decode", "decode-0", running=3, waiting=2, kv_usage=0.25, borrowed_s=1.5)
    metrics.observe_first_token("gateway", 0.3)
    metrics.observe_per_token("gateway", 0.02)
    metrics.count_request("stop")
    metrics.count_tokens("gateway", prompt=10, generated=4)
    shown = samples(metrics)
    assert shown["crossdock_num_requests_running", "decode", "decode-0"] == 3
    assert shown["crossdock_num_requests_waiting", "decode", "decode-0"] == 2
    assert shown["crossdock_kv_cache_usage_perc", "decode", "decode-0"] == 0.25
    assert shown["crossdock_borrowed_core_seconds", "decode", "decode-0"] == 1.5
    assert shown["crossdock_time_to_first_token_seconds_count", "gateway"] == 1
    assert shown["crossdock_time_per_output_token_seconds_sum", "gateway"] == pytest.approx(0.02)
    assert shown["crossdock_requests_total", "stop"] == 1
    assert shown["crossdock_prompt_tokens_total", "gateway"] == 10
    assert shown["crossdock_generation_tokens_total", "gateway"] == 4


def test_what_a_worker_has_counted_is_shown_as_counters_and_what_is_unknown_is_not():
    metrics = Metrics()
    counts = {
        "preemptions": 3,
        "swap_outs": 1,
        "prefix_cache_queries": 50,
        "prefix_cache_hits": 40,
        "transfer_bytes": 2**40,
        "transfers.shm": 8,
        "transfers.gloo+tcp": 9,
        "transfer_failures.stalled": 5,
        "transfer_events.damaged_block": 6,
        "transfer_events.refused_spent": 7,
    }
    metrics.set_counts("decode", "d", {"odd": 1, "preemptions.odd": 1, "transfer_failures": 1})
    assert not [labels for labels in samples(metrics) if "d" in labels]
    metrics.set_counts("decode", "d", counts)
    shown = {labels: value for labels, value in samples(metrics).items() if "d" in labels}
    assert shown == {
        ("crossdock_num_preemptions_total", "decode", "d"): 3,
        ("crossdock_num_swap_outs_total", "decode", "d"): 1,
        ("crossdock_prefix_cache_queries_total", "decode", "d"): 50,
        ("crossdock_prefix_cache_hits_total", "decode", "d"): 40,
        ("crossdock_kv_transfer_bytes_total", "decode", "d"): 2**40,
        ("crossdock_kv_transfers_total", "decode", "shm", "d"): 8,
        ("crossdock_kv_transfers_total", "decode", "gloo+tcp", "d"): 9,
        ("crossdock_kv_transfer_failures_total", "decode", "stalled", "d"): 5,
        ("crossdock_kv_transfer_events_total", "damaged_block", "decode", "d"): 6,
        ("crossdock_kv_transfer_events_total", "refused_spent", "decode", "d"): 7,
    }


def test_a_worker_cannot_fill_a_scrape():
    metrics = Metrics()
    metrics.set_counts("decode", "d", {f"transfer_events.{number}": 1 for number in range(10_000)})
    metrics.set_counts("decode", "e", {f"transfer_events.{'x' * 10_000}": 1})
    assert len(metrics.render()) < 50_000


def test_gaps_between_messages_fall_into_the_buckets_that_hold_them():
    metrics = Metrics()
    for gap in (0.001, 0.005, 0.006, 100.0):
        metrics.observe_gap(gap)
    shown = samples(metrics)
    name = "crossdock_inter_token_latency_seconds"
    bucket = {limit: shown[f"{name}_bucket", limit, "gateway"] for limit in ("0.005", "0.01", "2.0", "+Inf")}
    assert bucket == {"0.005": 2, "0.01": 3, "2.0": 3, "+Inf": 4}
    assert (shown[f"{name}_count", "gateway"], shown[f"{name}_sum", "gateway"]) == (4, pytest.approx(100.012))


def test_the_same_numbers_are_there_under_the_names_of_vllm_when_these_are_wished():
    native, both, vllm = Metrics(), Metrics(("native", "vllm")), Metrics(("vllm",))
    for metrics in (native, both, vllm):
        metrics.set_load("decode", "d", running=3, waiting=2, kv_usage=0.25, borrowed_s=1.5)
        metrics.set_cache("decode", "d", block_size=16, blocks=100)
        metrics.set_counts("decode", "d", {"preemptions": 4, "prefix_cache_hits": 5})
        metrics.observe_first_token("gateway", 0.3)
        metrics.observe_gap(0.01)
        metrics.observe_whole("gateway", 2.5)
        metrics.count_tokens("gateway", prompt=10, generated=4)
    theirs = samples(vllm)
    assert samples(both).keys() == samples(native).keys() | theirs.keys()
    assert all(labels[0].startswith("vllm:") for labels in theirs)
    assert theirs["vllm:num_requests_running", "decode", "d"] == 3
    assert theirs["vllm:num_requests_waiting", "decode", "d"] == 2
    assert theirs["vllm:kv_cache_usage_perc", "decode", "d"] == 0.25
    assert theirs["vllm:cache_config_info", "16", "100", "decode", "d"] == 1
    assert theirs["vllm:num_preemptions_total", "decode", "d"] == 4
    assert theirs["vllm:prefix_cache_hits_total", "decode", "d"] == 5
    assert theirs["vllm:time_to_first_token_seconds_count", "gateway"] == 1
    assert theirs["vllm:inter_token_latency_seconds_count", "gateway"] == 1
    assert theirs["vllm:e2e_request_latency_seconds_sum", "gateway"] == 2.5
    assert theirs["vllm:prompt_tokens_total", "gateway"] == 10
    assert theirs["vllm:generation_tokens_total", "gateway"] == 4


def test_a_worker_that_is_gone_is_not_shown():
    metrics = Metrics()
    metrics.set_load("decode", "decode-0", running=3, waiting=2, kv_usage=0.25, borrowed_s=1.5)
    metrics.set_cache("decode", "decode-0", block_size=16, blocks=100)
    metrics.set_counts("decode", "decode-0", {"preemptions": 4})
    metrics.forget("decode", "decode-0")
    assert not [labels for labels in samples(metrics) if "decode-0" in labels]


def test_two_engines_in_one_process_do_not_share_numbers():
    first, second = Metrics(), Metrics()
    first.count_request("stop")
    assert ("crossdock_requests_total", "stop") not in samples(second)


def test_latencies_follow_from_the_instants():
    timeline = Timeline()
    timeline.mark(Instant.ACCEPTED, 10.0)
    assert timeline.time_to_first_token() is None
    timeline.mark(Instant.FIRST_TOKEN, 10.5)
    timeline.mark(Instant.FINISHED, 12.5)
    assert timeline.time_to_first_token() == 0.5
    assert timeline.time_per_output_token(5) == 0.5
    assert timeline.time_per_output_token(1) is None


def test_a_later_attempt_moves_no_instant():
    timeline = Timeline()
    timeline.mark(Instant.FIRST_TOKEN, 1.0)
    timeline.mark(Instant.FIRST_TOKEN, 9.0)
    assert timeline.at(Instant.FIRST_TOKEN) == 1.0
