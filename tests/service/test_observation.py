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


def test_a_worker_that_is_gone_is_not_shown():
    metrics = Metrics()
    metrics.set_load("decode", "decode-0", running=3, waiting=2, kv_usage=0.25, borrowed_s=1.5)
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
