"""What a gateway reports of the load behind it."""

import asyncio

from pytest import approx

from crossdock.mesh.v1 import load_report_pb2 as pb
from gateway.admission import Admission, Bounds
from gateway.attach import DECODE, PREFILL
from gateway.utilization import Utilization
from gateway.window import Window
from service.orca import TRAILER_KEY
from tests.fakes.places import entered
from tests.fakes.scripted_workers import BLOCK_SIZE, ScriptedWorker, make_pool, make_request


class Scene:
    """One prefill worker and two decode workers with 100 blocks and 8 seats each."""

    def __init__(self, branches=9):
        prefills, decodes = make_pool(PREFILL, ("p",)), make_pool(DECODE, ("d", "e"))
        self.p = ScriptedWorker(*prefills, PREFILL)
        self.d, self.e = (ScriptedWorker(record, DECODE) for record in decodes)
        self.now = 0.0
        window = Window(branches=branches, prompts=9, prompt_tokens=999)
        self.admission = Admission(Bounds(requests=10), clock=lambda: self.now, window=lambda: window)
        self.utilization = Utilization(prefills, decodes, self.admission, 10, lambda: self.now)


def test_a_gateway_with_nobody_behind_it_is_full():
    scene = Scene()
    assert scene.utilization.report().application_utilization == 1
    scene.p.join()
    report = scene.utilization.report()
    assert (report.utilization["prefill"], report.utilization["decode"]) == (0, 1)


async def test_shares_and_counts_are_those_of_the_workers_and_of_what_is_live():
    scene = Scene()
    for worker in (scene.p, scene.d, scene.e):
        worker.join()
    scene.p.load(free_blocks=100, running_sequences=1, waiting_sequences=1, waiting_tokens=500)
    scene.d.load(free_blocks=40, running_sequences=2)
    scene.e.load(free_blocks=80, running_sequences=4)
    with scene.admission.hold(""), scene.admission.hold(""):
        report = scene.utilization.report()
    assert dict(report.utilization) == approx({"prefill": 0.25, "decode": 0.55, "requests": 0.2})
    assert report.application_utilization == approx(0.55)
    assert dict(report.named_metrics) == approx(
        {
            "kv_cache_usage": 0.4,
            "num_requests_running": 7,
            "num_requests_waiting": 1,
            "waiting_tokens": 500,
            "live_requests": 2,
        }
    )


async def test_all_of_it_is_one_engine_to_who_knows_engines():
    scene = Scene(branches=1)
    for worker in (scene.p, scene.d, scene.e):
        worker.join()
    scene.p.load(free_blocks=100, waiting_tokens=500)
    scene.d.load(free_blocks=40)
    scene.e.load(free_blocks=80)
    async with entered(scene.admission, make_request()):
        waiting = asyncio.create_task(entered(scene.admission, make_request()).__aenter__())
        while not scene.admission.waiting:
            await asyncio.sleep(0)
        load = scene.utilization.engine()
        waiting.cancel()
    assert (load.running, load.waiting, load.seats) == (1, 1, 16)
    assert (load.used_tokens, load.tokens, load.waiting_tokens) == (80 * BLOCK_SIZE, 200 * BLOCK_SIZE, 500)
    assert load.utilization == approx(0.4)
    scene.d.load(free_blocks=40, frozen=True)
    assert (scene.utilization.engine().seats, scene.utilization.engine().tokens) == (8, 100 * BLOCK_SIZE)


def test_what_is_generated_and_found_in_caches_is_added_up_over_the_workers():
    scene = Scene()
    for worker in (scene.p, scene.d, scene.e):
        worker.join()
    assert (scene.utilization.engine().tokens_per_s, scene.utilization.engine().hit_rate) == (0, 0)
    scene.p.load(counts={"prefix_cache_queries": 300, "prefix_cache_hits": 60})
    scene.d.load(
        running_sequences=2, step_ms=20.0, counts={"prefix_cache_queries": 100, "prefix_cache_hits": 20}
    )
    scene.e.load(running_sequences=3, step_ms=60.0)
    load = scene.utilization.engine()
    assert (load.tokens_per_s, load.hit_rate) == approx((150, 0.2))
    scene.e.load(running_sequences=3, step_ms=60.0, frozen=True)
    assert scene.utilization.engine().tokens_per_s == approx(100)


def test_nobody_behind_a_gateway_is_an_engine_without_room():
    load = Scene().utilization.engine()
    assert (load.seats, load.tokens, load.utilization) == (0, 0, 1)


def test_a_frozen_worker_is_no_room():
    scene = Scene()
    for worker in (scene.p, scene.d, scene.e):
        worker.join()
    scene.d.load(free_blocks=100)
    scene.e.load(free_blocks=100, frozen=True)
    assert scene.utilization.report().utilization["decode"] == 0
    scene.d.load(free_blocks=100, frozen=True)
    assert scene.utilization.report().utilization["decode"] == 1


def test_each_call_counts_and_its_trailer_is_a_report():
    scene = Scene()
    for _ in range(3):
        scene.utilization.trailer(failed=False)
    ((key, value),) = scene.utilization.trailer(failed=True)
    report = pb.OrcaLoadReport.FromString(value)
    assert key == TRAILER_KEY
    assert report.rps_fractional == 4 * report.eps > 0
