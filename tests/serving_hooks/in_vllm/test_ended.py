"""Once a workflow has ended, however it ended, nobody keeps anything of it."""

from pathlib import Path
from typing import Any

import pytest
from told import left_behind, send, told
from vllm_samples import Engine, build, everything_is_free

from presage.serving_hooks.forecasting.forecaster import Forecaster
from presage.serving_hooks.forecasting.online_counts import OnlineCounts
from presage.serving_hooks.monitoring.monitor import ForecastMonitor
from presage.serving_hooks.workflows import EndReason

pytestmark = [pytest.mark.vllm, pytest.mark.one_version]

KEEP = (
    "workflows",
    "forecaster",
    "monitor",
    "admission accounts",
    "workflows with blocks",
    "prefetch conversations",
)
"""Tables that hold something of a workflow between two of its steps."""


class Clock:
    """Goes on by itself, so that admission decides before each iteration."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 0.1
        return self.now


def hooked(folder: Path) -> tuple[Engine, Clock]:
    """All policies, monitor and recorder are on."""
    clock, forecaster = Clock(), Forecaster(None, back_off=OnlineCounts(), monitor=ForecastMonitor())
    settings: dict[str, Any] = {"prefetch": True, "time_to_live_s": 1000.0}
    settings["recorder"] = {"folder": str(folder / "recording")}
    scheduler = build(folder, told(forecaster, clock=clock), blocks=90, presage=settings)
    engine = Engine(scheduler)
    for number in range(30):  # counts learn, so that forecasts say something
        for step in range(2):
            send(engine, f"before-{number}", step, workflow_end=step == 1)
            engine.run()
    return engine, clock


def end(engine: Engine, clock: Clock, way: str) -> None:
    scheduler = engine.scheduler
    if way == "expired":
        clock.now += 2000.0
    elif way == "over HTTP":
        assert scheduler.workflow_ended("retry", "w")
    else:
        last = send(engine, "w", 2, workflow_end=True)
        if way == "aborted":
            engine.step()
            engine.abort(last)
        elif way == "aborted while it waits":
            engine.abort(last)
        elif way == "over HTTP while a step runs":
            engine.step()
            assert scheduler.workflow_ended("retry", "w")
        elif way == "over HTTP while a step waits":
            assert scheduler.workflow_ended("retry", "w")
    engine.run()
    scheduler.schedule()


@pytest.mark.parametrize(
    ("way", "reason"),
    [
        ("last step", EndReason.FINISHED),
        ("over HTTP", EndReason.FINISHED),
        ("over HTTP while a step runs", EndReason.FINISHED),
        ("over HTTP while a step waits", EndReason.FINISHED),
        ("expired", EndReason.EXPIRED),
        ("aborted", EndReason.ABORTED),
        ("aborted while it waits", EndReason.ABORTED),
    ],
)
def test_of_an_ended_workflow_nothing_is_kept(tmp_path: Path, way: str, reason: EndReason) -> None:
    engine, clock = hooked(tmp_path)
    scheduler = engine.scheduler
    assert not any(left_behind(scheduler).values()), left_behind(scheduler)
    before = scheduler.presage_status()
    for step in range(2):
        send(engine, "w", step)
        engine.run()
    state = left_behind(scheduler)
    assert not [name for name in KEEP if not state[name]], state
    end(engine, clock, way)
    after = scheduler.presage_status()
    assert after["ended"] == {**before["ended"], reason: before["ended"][reason] + 1}
    assert not any(left_behind(scheduler).values()), left_behind(scheduler)
    assert scheduler.debug_state()["admission accounts to drop"] == 0
    assert everything_is_free(scheduler)
    assert not [name for name in after["counts"] if name.endswith("Error")], after["counts"]
    scheduler.shutdown()
