"""What runs behind the gateway: load, speed, and which upstreams are left out and come back."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from presage.errors import InputError
from presage.gateway.monitor.fleet_monitor import (
    DEAD,
    HANGS,
    LIES,
    SILENT,
    UNKNOWN_CACHE,
    FleetMonitor,
    FleetUpstream,
    MonitorSettings,
    Poll,
)
from presage.gateway.monitor.polling import poll, watch
from presage.gateway.monitor.upstream_speed import LARGEST_BIAS, UpstreamSpeed
from presage.serving_hooks.engine_file import read_engine
from presage.serving_hooks.engine_metrics import EngineLoad, read_engine_load
from presage.serving_hooks.policies.routing.chimera import last_token_s

A, B = FleetUpstream("a", "http://a", ("small",)), FleetUpstream("b", "http://b/", ("large",))
ALIVE = Poll("alive")


class Clock:
    """Shows the time it is told to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


PAGE = b"""\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m {1}"} 3.0
vllm:num_requests_running{engine="1",model_name="m {1}"} 4.0
vllm:num_requests_waiting{engine="0",model_name="m {1}"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 99.0
vllm:kv_cache_usage_perc{engine="0",model_name="m {1}"} 0.5 1767225600000
vllm:kv_cache_usage_perc{engine="1",model_name="m {1}"} 0.25
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="1000",prefix_caching_hash_algo="sha256"} 1.0
vllm:cache_config_info{block_size="16",engine="1",num_gpu_blocks="1000",prefix_caching_hash_algo="sha256"} 1.0
"""


def watched(*upstreams: FleetUpstream, **settings: float) -> tuple[FleetMonitor, Clock]:
    clock = Clock()
    return FleetMonitor(upstreams or (A, B), clock, MonitorSettings(**settings)), clock


def opened(monitor: FleetMonitor) -> dict[str, bool]:
    monitor.refresh()
    return {row.name: row.open for row in monitor.engines}


def serves(monitor: FleetMonitor, clock: Clock, upstream: str, prompt: int, first_s: float, token_s: float) -> None:
    """One request of 101 output tokens, alone."""
    monitor.sent(upstream, "r", prompt)
    clock.now += first_s
    monitor.first_token(upstream, "r")
    clock.now += 100 * token_s
    monitor.answered(upstream, "r", 101)


def test_a_page_of_vllm_is_summed_over_its_engines() -> None:
    assert read_engine_load(PAGE) == EngineLoad(7, 2, 0.375, 32_000)


def test_a_page_without_vllms_names_is_of_a_router() -> None:
    assert read_engine_load(b'vllm_router_requests_total{policy="kv_aware"} 3\n') is None
    assert read_engine_load(b"") is None
    unresolved = b'vllm:num_requests_running 1\nvllm:cache_config_info{num_gpu_blocks="None",block_size="16"} 1.0\n'
    assert read_engine_load(unresolved) == EngineLoad(1, 0)


@pytest.mark.parametrize("value", ["NaN", "-1", "1e300", "+Inf", "many", "", '"3"'])
@pytest.mark.parametrize("name", ["num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"])
def test_what_no_engine_can_have_is_an_error(name: str, value: str) -> None:
    with pytest.raises(InputError, match=name):
        read_engine_load(f'vllm:{name}{{engine="0"}} {value}\n'.encode())


def test_a_cache_beyond_any_machine_is_an_error() -> None:
    line = b'vllm:num_requests_running 1\nvllm:cache_config_info{num_gpu_blocks="999999999999",block_size="16"} 1.0\n'
    with pytest.raises(InputError, match="cache"):
        read_engine_load(line)


@given(st.binary(max_size=400), st.integers(0, 10))
def test_any_page_is_a_load_unknown_or_an_error(noise: bytes, cut: int) -> None:
    for page in (noise, PAGE[: len(PAGE) // (cut + 1)] + noise, PAGE.replace(b"0", noise[:3])):
        try:
            load = read_engine_load(page)
        except InputError:
            continue
        assert load is None or (load.running >= 0 and load.waiting >= 0 and 0 <= (load.cache_usage or 0) <= 1)


def test_requests_in_flight_and_their_tokens_are_counted_until_they_end() -> None:
    monitor, _ = watched()
    for request, tokens in (("r1", 100.0), ("r2", 50.0), ("r3", 25.0)):
        monitor.sent("a", request, 1000, tokens, cached_tokens=400)
    monitor.refresh()
    assert (monitor.engines[0].requests, monitor.engines[0].predicted_tokens) == (3, 175)
    assert monitor.prefill_tokens("a") == 1800
    monitor.first_token("a", "r1")
    assert monitor.prefill_tokens("a") == 1200
    monitor.answered("a", "r1", 90)
    monitor.failed("a", "r2")
    monitor.failed("a", "r2")  # told twice
    monitor.refresh()
    assert (monitor.engines[0].requests, monitor.engines[0].predicted_tokens) == (1, 25)
    assert monitor.prefill_tokens("a") == 600
    monitor.answered("a", "r3", None)
    monitor.refresh()
    assert (monitor.engines[0].requests, monitor.engines[0].predicted_tokens, monitor.prefill_tokens("a")) == (0, 0, 0)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["sent", "first", "answered", "failed", "gone"]),
            st.sampled_from("ab"),
            st.integers(0, 5),
            st.floats(0, 1e6),
        ),
        max_size=60,
    )
)
def test_whatever_happens_in_whatever_order_rows_are_numbers_and_nothing_stays(events: list) -> None:
    monitor, clock = watched()
    for what, upstream, request, number in events:
        clock.now += number / 1e5
        if what == "sent":
            monitor.sent(upstream, request, number, number)
        elif what == "first":
            monitor.first_token(upstream, request)
        elif what == "answered":
            monitor.answered(upstream, request, int(number))
        else:
            monitor.failed(upstream, request, connect=what == "gone")
        monitor.refresh()
        for row in monitor.engines:
            assert row.requests >= 0
            assert 0 <= last_token_s(row, 100, 100) < math.inf
    for upstream in "ab":
        for request in range(6):
            monitor.failed(upstream, request)
    monitor.refresh()
    assert [(row.requests, row.predicted_tokens) for row in monitor.engines] == [(0, 0), (0, 0)]
    assert monitor.prefill_tokens("a") == monitor.prefill_tokens("b") == 0


def test_what_others_sent_counts_beside_our_own() -> None:
    monitor, clock = watched()
    monitor.sent("a", "r", 100, 100.0)
    for running in (4, 6):
        clock.now += 1.0
        monitor.polled("a", Poll("alive", EngineLoad(running, 5)))
    monitor.refresh()
    row = monitor.engines[0]
    assert row.requests == 11
    assert row.predicted_tokens == 100 + 10 * monitor.mean_output
    assert row.most_requests == 6  # since others wait for so long


def test_old_figures_are_unknown_and_taken_for_the_mean_of_the_known() -> None:
    monitor, clock = watched(stale_polls=3)
    for upstream, running in (("a", 4), ("b", 8)):
        monitor.polled(upstream, Poll("alive", EngineLoad(running, 0, 0.5, 1000)))
    monitor.refresh()
    assert [row.requests for row in monitor.engines] == [4, 8]
    clock.now = 3.5
    monitor.polled("b", Poll("alive", EngineLoad(8, 0, 0.5, 1000)))
    monitor.polled("a", ALIVE)
    assert monitor.load("a") is None
    assert monitor.status()["a"]["running"] is None
    assert [row.requests for row in monitor.engines] == [8, 8]
    assert monitor.engines[0].cache_tokens == 1000
    assert opened(monitor) == {"a": True, "b": True}


def test_a_router_is_judged_by_our_own_account_alone() -> None:
    monitor, _ = watched(A)
    monitor.polled("a", Poll("alive", without_load=True))
    monitor.sent("a", "r", 10, 5.0)
    monitor.refresh()
    assert (monitor.engines[0].requests, monitor.engines[0].cache_tokens) == (1, UNKNOWN_CACHE)
    assert opened(monitor) == {"a": True}


def test_an_upstream_of_several_models_has_a_row_for_each() -> None:
    monitor, _ = watched(FleetUpstream("router", "http://r", ("small", "large")), FleetUpstream("any", "http://x"))
    assert [(row.name, row.model) for row in monitor.engines] == [("router", "small"), ("router", "large"), ("any", "")]


def test_an_engine_file_gives_the_speeds_of_a_full_engine() -> None:
    file = read_engine("h100-8b-datasheet")
    monitor, clock = watched(FleetUpstream("a", "http://a", engine=file))
    row = monitor.engines[0]
    assert row.token_s == pytest.approx(file.cost.seconds(0, file.most_requests, file.cache_tokens))
    assert (row.prefill_token_s, row.most_requests) == (
        pytest.approx(file.cost.prefill_token_s),
        file.most_requests,
    )
    assert row.cache_tokens == file.cache_tokens
    before = monitor.status()["a"]["bias"]
    for _ in range(40):
        serves(monitor, clock, "a", 1000, 2.0, row.token_s)
    assert monitor.status()["a"]["bias"] > before  # 2 s to a first token is more than the file has


def test_without_one_speeds_are_measured() -> None:
    monitor, clock = watched()
    for _ in range(20):
        serves(monitor, clock, "a", 2000, 2000 * 5e-4 + 0.03, 0.03)
    row = monitor.engines[0]
    monitor.refresh()
    assert row.token_s == pytest.approx(0.03, rel=0.05)
    assert row.prefill_token_s == pytest.approx(5e-4, rel=0.05)
    assert last_token_s(row, 2000, 101) == pytest.approx(2000 * 5e-4 + 101 * 0.03, rel=0.1)


def test_prompts_behind_others_and_short_ones_do_not_measure_prefill() -> None:
    monitor, clock = watched()
    monitor.sent("a", "first", 1000)
    monitor.sent("a", "behind", 1000)
    monitor.sent("b", "short", 10)
    clock.now = 10.0
    for upstream, request in (("a", "behind"), ("b", "short")):
        monitor.first_token(upstream, request)
    assert [of["measured"]["prefill"] for of in monitor.status().values()] == [0, 0]


def test_the_estimate_is_corrected_by_what_answers_took_within_bounds_and_forgets() -> None:
    speed = UpstreamSpeed(None)
    for _ in range(60):
        speed.answered(1.0, 3.0, 0.0)
    assert speed.bias(0.0) == pytest.approx(3.0, rel=0.02)
    assert 1.0 < speed.bias(600.0) < 1.8
    assert speed.bias(1e9) == pytest.approx(1.0)
    for took_s in (1e12, 1e-12, 0.0, math.nan, math.inf):
        for _ in range(100):
            speed.answered(1.0, took_s, 0.0)
        assert 1 / LARGEST_BIAS <= speed.bias(0.0) <= LARGEST_BIAS


def test_rows_of_a_callers_fleet_are_described_without_its_requests() -> None:
    monitor, _ = watched()
    other = FleetMonitor((A,), Clock()).engines
    other[0].requests, other[0].predicted_tokens = 7, 70.0
    monitor.sent("a", "r", 1)
    monitor.failed("a", "r", connect=True)
    monitor.describe(other)
    assert (other[0].open, other[0].requests, other[0].predicted_tokens) == (False, 7, 70)


def test_one_that_refuses_a_connection_is_left_out_and_comes_back_by_a_probe() -> None:
    monitor, clock = watched(first_wait_s=1.0, longest_wait_s=8.0)
    monitor.sent("a", "r", 1)
    monitor.failed("a", "r", connect=True)
    assert opened(monitor) == {"a": False, "b": True}
    assert monitor.outage("a") == monitor.status()["a"]["reason"] == DEAD
    waits = []
    for _ in range(6):
        waits.append(monitor.due_s("a"))
        clock.now += monitor.due_s("a")
        monitor.polled("a", Poll("dead"))
    assert waits == [1, 2, 4, 8, 8, 8]
    monitor.polled("a", ALIVE)  # a poll from before the wait
    assert opened(monitor)["a"] is False
    clock.now += monitor.due_s("a")
    monitor.polled("a", ALIVE)
    assert opened(monitor)["a"] is True


def test_one_late_health_check_is_nothing_and_a_second_one_is_an_outage() -> None:
    monitor, clock = watched()
    monitor.polled("a", Poll("hangs"))
    assert opened(monitor)["a"]
    monitor.polled("a", ALIVE)
    monitor.polled("a", Poll("hangs"))
    assert opened(monitor)["a"]
    monitor.polled("a", Poll("unknown"))
    clock.now += 1
    for _ in range(2):
        monitor.polled("a", Poll("hangs"))
    assert monitor.outage("a") == HANGS


def test_a_liar_is_left_out_until_its_page_is_right() -> None:
    monitor, clock = watched()
    monitor.polled("a", Poll("alive", lies=True))
    assert monitor.outage("a") == LIES
    clock.now += monitor.due_s("a")
    monitor.polled("a", Poll("alive", EngineLoad(0, 0)))
    assert monitor.outage("a") is None


def test_an_engine_that_loses_its_figures_is_taken_for_a_router_after_a_probe() -> None:
    monitor, clock = watched()
    monitor.polled("a", Poll("alive", EngineLoad(0, 0)))
    monitor.polled("a", Poll("alive", without_load=True))
    assert monitor.outage("a") == LIES
    clock.now += monitor.due_s("a")
    monitor.polled("a", Poll("alive", without_load=True))
    assert monitor.outage("a") is None


def test_one_that_gives_no_first_token_while_others_answer_is_left_out() -> None:
    monitor, clock = watched(silence_s=10.0)
    monitor.sent("a", "stuck", 1)
    monitor.sent("a", "whole answer", 1, streams=False)
    clock.now = 20.0
    assert opened(monitor)["a"]  # nobody else answers either
    serves(monitor, clock, "b", 1, 0.1, 0.01)
    assert opened(monitor) == {"a": False, "b": True}
    assert monitor.outage("a") == SILENT
    clock.now += monitor.due_s("a")
    monitor.polled("a", ALIVE)
    assert opened(monitor)["a"]
    clock.now += 11.0
    serves(monitor, clock, "b", 1, 0.1, 0.01)
    assert not opened(monitor)["a"]
    assert monitor.due_s("a") == 2  # the wait has doubled


def test_a_long_answer_that_is_not_streamed_is_no_silence() -> None:
    monitor, clock = watched(silence_s=10.0)
    monitor.sent("a", "whole answer", 1, streams=False)
    clock.now = 20.0
    serves(monitor, clock, "b", 1, 0.1, 0.01)
    assert opened(monitor)["a"]


def answering(handler: Callable[[httpx.Request], httpx.Response]) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.MockTransport(handler))


def polled(page: httpx.Response | Exception, health: int | Exception = 200, **settings: float) -> Poll:
    def handler(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/health":
            if isinstance(health, Exception):
                raise health
            return httpx.Response(health)
        assert request.url.path == "/metrics"
        if isinstance(page, Exception):
            raise page
        return page

    return asyncio.run(poll(B, answering(handler), MonitorSettings(**settings)))


def test_a_poll_reads_health_and_metrics() -> None:
    assert polled(httpx.Response(200, content=PAGE)) == Poll("alive", EngineLoad(7, 2, 0.375, 32_000))
    assert polled(httpx.Response(404)) == ALIVE
    assert polled(httpx.Response(200, content=b"other 1\n"), 404) == Poll("alive", without_load=True)
    assert polled(httpx.ReadError("cut")) == ALIVE
    assert polled(httpx.Response(200), 503) == Poll("dead")
    assert polled(httpx.Response(200), httpx.ConnectError("refused")) == Poll("dead")
    assert polled(httpx.Response(200), httpx.ReadTimeout("late")) == Poll("hangs")
    assert polled(httpx.Response(200), httpx.PoolTimeout("ours")) == Poll("unknown")
    assert polled(httpx.Response(200), RuntimeError("ours")) == Poll("unknown")


@pytest.mark.parametrize("page", [b"\xff\xfe\x00garbage", b"vllm:num_requests_running NaN\n", b"x" * 5_000])
def test_a_page_that_is_garbage_impossible_or_too_large_lies(page: bytes) -> None:
    assert polled(httpx.Response(200, content=page), most_bytes=4_000) == Poll("alive", lies=True)


def test_a_page_without_end_is_read_no_further_than_allowed() -> None:
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while True:
            sent += 1 << 16
            yield b"#" * (1 << 16)

    assert polled(httpx.Response(200, content=endless())).lies
    assert sent <= 3 << 20


def test_a_compressed_page_is_not_unpacked() -> None:
    page = httpx.Response(200, headers={"content-encoding": "x-bomb"}, content=b"")
    assert polled(page) == Poll("alive", lies=True)


def test_a_health_check_that_drips_is_cut_off() -> None:
    async def hangs() -> Poll:
        async def handler(request: httpx.Request) -> httpx.Response:
            await asyncio.Event().wait()
            raise AssertionError

        client = httpx.AsyncClient(transport=httpx.MockTransport(handler))
        return await poll(A, client, MonitorSettings(timeout_s=0.01))

    assert asyncio.run(hangs()) == Poll("hangs")


def test_the_loop_polls_each_upstream_by_itself() -> None:
    monitor, clock = watched()
    rounds = 0

    async def handler(request: httpx.Request) -> httpx.Response:
        if request.url.host == "a":
            await asyncio.Event().wait()
        return httpx.Response(200, content=PAGE if request.url.path == "/metrics" else b"")

    async def sleep(seconds: float) -> None:
        nonlocal rounds
        rounds += 1
        clock.now += seconds
        await asyncio.sleep(0)

    async def polls() -> None:
        client = httpx.AsyncClient(transport=httpx.MockTransport(handler))
        task = asyncio.create_task(watch(monitor, client, sleep))
        while rounds < 20:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(asyncio.wait_for(polls(), 30))
    assert monitor.load("b") == EngineLoad(7, 2, 0.375, 32_000)
    assert monitor.load("a") is None


def test_the_status_is_plain_data() -> None:
    monitor, _ = watched()
    monitor.polled("a", Poll("alive", EngineLoad(1, 0)))
    status = monitor.status()
    assert status["a"]["running"] == 1
    assert status["b"]["running"] is None
    assert json.loads(json.dumps(status)) == status
