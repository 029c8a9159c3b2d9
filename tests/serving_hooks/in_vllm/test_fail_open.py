"""Whatever of ours fails is off from there on, counted and logged; every request is answered all the same."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_fuzz import Guessing, answered, pressed
from vllm_samples import Engine, Scheduler, ask, build, everything_is_free

from presage.errors import ConfigurationError
from presage.features.moment import PREFILL
from presage.serving_hooks.counts import EventCounts
from presage.serving_hooks.forecasting.forecasts import Forecasts
from presage.serving_hooks.identity.inference import Inference
from presage.serving_hooks.modes import Retry, Switch
from presage.serving_hooks.policies.eviction import FreeOrder
from presage.serving_hooks.policies.priority import ShortestTotalJobFirst
from presage.serving_hooks.vllm.admission import AdmissionController
from presage.serving_hooks.vllm.config import PresageConfig
from presage.serving_hooks.vllm.prefetch.prompts import ExpectedPrompts
from presage.serving_hooks.vllm.queues import QueuePolicies
from presage.serving_hooks.vllm.scheduler import SyncWorkflowScheduler
from presage.serving_hooks.workflows import WorkflowTable
from presage.serving_hooks.workflows.live import LiveForecast
from presage.testing.forecasts import Noise

pytestmark = [pytest.mark.vllm, pytest.mark.one_version]
SECRET = "what the prompt says"


class GuessingSync(Guessing, SyncWorkflowScheduler):
    pass


def breaks(monkeypatch: pytest.MonkeyPatch, kind: type[Any], method: str, after: int = 15) -> None:
    """From its 15th call on, the method does half of its work and raises."""
    whole: Callable[..., Any] = getattr(kind, method)
    calls = [0]

    def half(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] < after:
            return whole(*args, **kwargs)
        if calls[0] % 2:
            whole(*args, **kwargs)
        raise RuntimeError(SECRET)

    monkeypatch.setattr(kind, method, half)


@pytest.mark.parametrize(
    ("kind", "method", "off", "policy"),
    [
        *((FreeOrder, method, {"eviction"}, "fcfs") for method in ("pop", "append", "remove", "found")),
        *((FreeOrder, method, {"eviction"}, "priority") for method in ("filled", "forget", "forecast", "end")),
        *((ShortestTotalJobFirst, method, {"priority"}, "fcfs") for method in ("add", "key")),
        *((ShortestTotalJobFirst, method, {"priority"}, "priority") for method in ("add", "key", "age", "selected")),
        (WorkflowTable, "arrived", {"eviction", "admission"}, "fcfs"),
        (WorkflowTable, "expire", {"eviction", "admission"}, "priority"),
        *((Noise, method, set(), "fcfs") for method in ("on_prefill", "on_completion", "close", "remaining_tokens")),
    ],
)
def test_a_policy_that_raises_is_off_and_all_is_served(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kind: type[Any],
    method: str,
    off: set[str],
    policy: str,
) -> None:
    breaks(monkeypatch, kind, method)
    settings = {"starved_after": 3, "quantum": 2}
    engine = Engine(build(tmp_path, GuessingSync, blocks=70, presage=settings, policy=policy))
    with caplog.at_level(logging.ERROR, logger="presage"):
        answered(engine, pressed(engine, 300, seed=5))
    assert everything_is_free(engine.scheduler)
    status = engine.scheduler.presage_status()
    assert {name for name, on in status["on"].items() if not on} == off
    assert any(reason.endswith(": RuntimeError") for reason in status["counts"])
    assert "is switched off: RuntimeError" in caplog.text
    assert SECRET not in caplog.text


def test_an_order_that_names_a_block_in_use_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = FreeOrder.pop

    def doubled(self: FreeOrder, n: int) -> list[int]:
        given = whole(self, n)
        return given if n < 3 else [*given[:-1], given[0]]

    monkeypatch.setattr(FreeOrder, "pop", doubled)
    engine = Engine(build(tmp_path, GuessingSync, blocks=70))
    answered(engine, pressed(engine, 200, seed=6))
    assert everything_is_free(engine.scheduler)
    assert not engine.scheduler.presage_status()["on"]["eviction"]


class Wrong:
    """Forecasts of any shape."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def on_prefill(self, *_: object, **__: object) -> Any:
        return LiveForecast("champion", 1, PREFILL, self.rows, ("coder",), 1)

    on_completion = on_prefill

    def close(self, workflow: object) -> None:
        pass

    def remaining_tokens(self, workflow: object, step: object, input_tokens: int) -> Any:
        return "many"


@pytest.mark.parametrize(
    "rows",
    [np.full((3, 2), np.nan), np.full((3, 2), np.inf), np.zeros((0, 0)), np.full((1, 2), -1e9), None, np.ones(3)],
)
def test_forecasts_that_are_none_do_no_harm(tmp_path: Path, rows: Any) -> None:
    class WrongSync(SyncWorkflowScheduler):
        def forecasts(self, config: PresageConfig) -> Forecasts:
            return Forecasts(Wrong(rows), Wrong(rows))

    engine = Engine(build(tmp_path, WrongSync, blocks=70))
    answered(engine, pressed(engine, 200, seed=7))
    assert everything_is_free(engine.scheduler)


def test_a_failed_priority_leaves_vllms_own_queues_and_the_clients_own_numbers(tmp_path: Path) -> None:
    alone = {"admission": False}
    scheduler = build(tmp_path, GuessingSync, blocks=70, policy="priority", seqs=1, presage=alone)
    for number, priority in enumerate([3, 1, 2]):
        scheduler.add_request(ask(f"r{number}", [1, 2, 3], 2, arrival=number, priority=priority))
    scheduler.queue_policies.priorities.switch.off(RuntimeError(SECRET))
    engine, requests = Engine(scheduler), list(scheduler.requests.values())
    engine.run()
    assert [request.priority for request in requests] == [3, 1, 2]
    own = build(tmp_path, Scheduler, blocks=70, policy="priority")
    assert type(scheduler.waiting) is type(own.waiting)
    assert engine.ended == ["r1", "r2", "r0"]


def test_bad_settings_stop_the_engine_before_it_serves(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"presage\.gama is unknown"):
        build(tmp_path, SyncWorkflowScheduler, blocks=70, presage={"gama": 0.5})


def test_a_switch_takes_with_it_what_cannot_do_without() -> None:
    counts = EventCounts()
    inner = Switch("inner", counts)
    outer = Switch("outer", counts, takes=(inner,))
    inner.attempt(list)
    assert outer.on
    outer.attempt(dict, 3)
    assert (outer.on, inner.on) == (False, False)
    outer.attempt(dict, 3)
    assert counts.by_key() == {"outer: TypeError": 1, "inner: TypeError": 1}


class Hour:
    """A clock that stands still unless it is told."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def fails_once(monkeypatch: pytest.MonkeyPatch, kind: type[Any], method: str) -> None:
    """Its next call does all of its work and raises."""
    whole: Callable[..., Any] = getattr(kind, method)

    def once(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.setattr(kind, method, whole)
        whole(*args, **kwargs)
        raise RuntimeError(SECRET)

    monkeypatch.setattr(kind, method, once)


FAILING = [
    (FreeOrder, "append", {"eviction", "prefetch"}),
    (FreeOrder, "pop", {"eviction", "prefetch"}),
    (ShortestTotalJobFirst, "key", {"priority"}),
    (ShortestTotalJobFirst, "selected", {"priority"}),
    (AdmissionController, "request_arrived", {"admission"}),
    (ExpectedPrompts, "arrives", {"prefetch"}),
    (WorkflowTable, "arrived", {"bookkeeping of workflows", "eviction", "admission", "prefetch"}),
    (
        QueuePolicies,
        "updated",
        {"presage", "bookkeeping of workflows", "eviction", "admission", "prefetch", "priority"},
    ),
    (Inference, "arrives", {"identity"}),
    (Noise, "on_prefill", {"forecasts of next agents"}),
]


@pytest.mark.parametrize(
    ("kind", "method", "off", "by"), [(*failing, ("time", "mode")[n % 2]) for n, failing in enumerate(FAILING)]
)
def test_what_one_odd_request_has_switched_off_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Any], method: str, off: set[str], by: str
) -> None:
    clock = Hour()
    scheduler = build(
        tmp_path,
        type("Kind", (GuessingSync,), {"clock": clock}),
        blocks=70,
        presage={"prefetch": True, "infer_workflows": True, "retry_s": 60.0},
        policy="priority",
    )
    engine = Engine(scheduler)
    everything_on = scheduler.presage_status()["on"]
    answered(engine, pressed(engine, 100, seed=5))
    fails_once(monkeypatch, kind, method)
    answered(engine, pressed(engine, 100, 7, 1_000))
    status = scheduler.presage_status()
    assert status["off"] == dict.fromkeys(off, "RuntimeError; tried again in 60 s")
    clock.now += 59.0
    answered(engine, pressed(engine, 50, 8, 2_000))
    assert scheduler.presage_status()["off"].keys() == off
    if by == "time":
        clock.now += 2.0
    else:
        scheduler.set_mode("on", None, None)
    answered(engine, pressed(engine, 300, 9, 3_000))
    status = scheduler.presage_status()
    assert (status["off"], status["on"], status["prefetch"]["on"]) == ({}, everything_on, True)
    assert sum(of for name, of in status["counts"].items() if name.endswith(": RuntimeError")) <= max(1, len(off))
    assert everything_is_free(scheduler)
    assert not scheduler.deferred_waiting
    clock.now += 10_000.0
    answered(engine, pressed(engine, 20, 10, 4_000))
    left = scheduler.debug_state()
    assert (left["requests"], left["priorities"], left["vLLM requests"]) == (0, 0, 0)


def test_the_pause_doubles_while_a_part_fails_again_and_again() -> None:
    clock = Hour()
    taken = Switch("eviction", EventCounts(), retry=Retry(clock, 60.0))
    switch = Switch("bookkeeping of workflows", EventCounts(), takes=(taken,), retry=Retry(clock, 60.0))

    def fails() -> bool:
        raise RuntimeError

    pauses = []
    switch.attempt(fails)
    for _ in range(8):
        assert not taken.on
        pauses.append(switch.retry_at - clock.now)
        clock.now = switch.retry_at
        assert not switch.revive(fails)
    assert pauses == [60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 3600.0, 3600.0]
    assert not switch.revive(lambda: False), "not done yet"
    assert switch.revive(lambda: True)
    assert switch.attempt(lambda: 7) == 7
    clock.now += 10_000.0
    switch.attempt(fails)
    assert switch.retry_at == clock.now + 60.0
    assert Switch("recorder", EventCounts()).retry_at == float("inf")
