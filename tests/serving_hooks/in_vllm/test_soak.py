"""After many workflows every table is empty, or as small as it was: nothing is kept of what has ended."""

import random
from pathlib import Path

import pytest
from tiny_model import Tiny
from told import left_behind, send, told
from vllm_samples import Engine, build, everything_is_free

from presage.serving_hooks.forecasting.forecaster import Forecaster
from presage.serving_hooks.forecasting.online_counts import OnlineCounts

pytestmark = [pytest.mark.vllm, pytest.mark.one_version, pytest.mark.slow]
WORKFLOWS = 500


class Clock:
    """Goes on by itself."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


def test_nothing_is_left_of_workflows_that_have_ended(tiny: Tiny, tmp_path: Path) -> None:
    """By their last request, over HTTP, by falling silent; some are aborted, some go on after their end."""
    clock, draw = Clock(), random.Random(0)
    forecaster = Forecaster(tiny.training.predictor, back_off=OnlineCounts())
    scheduler = build(
        tmp_path / "model",
        told(forecaster, clock=clock),
        blocks=64,
        presage={"time_to_live_s": 5.0, "starved_after": 9},
    )
    engine = Engine(scheduler)
    stale = []
    for number in range(WORKFLOWS):
        name, way = f"w{number}", draw.choice(["flag", "http", "silent", "abort", "after"])
        for step in range(draw.randint(1, 3)):
            request = send(engine, name, step)
            for _ in range(draw.randint(0, 4)):
                engine.step()
            if way == "abort" and request not in engine.ended:
                engine.abort(request)
        if way == "flag":
            send(engine, name, 3, workflow_end=True)
        elif way in ("http", "after"):
            scheduler.workflow_ended("retry", name)
        if way == "after":
            send(engine, name, 4, workflow_end=True)
        if number % 100 == 99:
            state = scheduler.debug_state()
            stale.append(state["eviction heap"] + state["waiting"])
            engine.log.clear()
    engine.run()
    clock.now += 10.0
    scheduler.schedule()
    assert scheduler.presage_status()["on"] == {"priority": True, "eviction": True, "admission": True}
    assert scheduler.presage_status()["ended"]["expired"] > WORKFLOWS / 10
    assert not any(left_behind(scheduler).values()), left_behind(scheduler)
    assert everything_is_free(scheduler)
    state = scheduler.debug_state()
    assert state["groups of blocks"] <= 64, "no more groups than blocks"
    assert state["eviction heap"] <= 1.5 * (64 + 2 * 64)
    assert max(stale) < 1000, "stale entries are thrown away as they come"
    assert state["ageing heap"] < 1000
    assert state["sharing types"] == 1
