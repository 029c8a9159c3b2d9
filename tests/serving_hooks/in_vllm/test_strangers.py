"""100,000 requests' worth of whatever clients may send: nothing reaches the engine, and nothing grows."""

import gc
import random
import sys
from pathlib import Path
from typing import Any

import pytest
from test_fuzz import GuessingSync, answered
from test_step_forecasts import Told
from vllm_samples import Engine, ask, build, everything_is_free

from presage.datasets.schema.names import MAX_NAME
from presage.serving_hooks.counts import EventCounts
from presage.serving_hooks.forecasting.forecaster import Forecaster
from presage.serving_hooks.forecasting.forecasts import Forecasts
from presage.serving_hooks.forecasting.online_counts import OnlineCounts
from presage.serving_hooks.modes import Modes
from presage.serving_hooks.policies.score import ScoreConfig
from presage.serving_hooks.vllm.step_forecasts import StepForecasts
from presage.serving_hooks.workflows import EndReason, WorkflowTable
from presage.serving_hooks.workflows.metadata import read
from presage.serving_hooks.workflows.tenants import ARGUMENT

FIELDS = ("workflow_type", "workflow_type_id", "workflow_id", "agent", "agent_id", "step", "session_id", "workflow_end")
REASONS = 24
"""Kinds of complaint there are at most; what is counted does not grow with what is sent."""


def strange(draw: random.Random, number: int) -> Any:
    """One value of a field: sound, of another type, huge, unprintable, another's, or a new name each time."""
    kinds = (
        lambda: f"n{number}",
        lambda: draw.choice(["review", "planner", "w1"]),
        lambda: draw.choice([None, True, False, -1, 0, 3, 2**31, 2**70, -(10**400), float("nan"), float("inf"), 1.5]),
        lambda: draw.choice([[], [1, "a"], {}, {"a": {"b": []}}, b"bytes", object(), set()]),
        lambda: "x" * draw.choice([MAX_NAME, MAX_NAME + 1, 20_000]),
        lambda: draw.choice(
            ["a\nb", "a\x00b", "\x1b[31m", "\u202e", "\ud800", "key-0\xa0w1", "é" * 300, " ", "", "\\0"]
        ),
    )
    return draw.choice(kinds)()


def sent(draw: random.Random, number: int) -> Any:
    """All that one request says of itself."""
    if draw.random() < 0.02:
        return draw.choice([None, [], "text", 3, b"", object()])
    fields: dict[Any, Any] = {name: strange(draw, number) for name in FIELDS if draw.random() < 0.5}
    if draw.random() < 0.1:
        fields["app_metadata"] = draw.choice([{name: strange(draw, number) for name in FIELDS}, [], "text"])
    if draw.random() < 0.1:
        fields[ARGUMENT] = strange(draw, number)
    if draw.random() < 0.1:
        fields |= {object(): 1, 7: "x", f"unknown-{number}": "x" * 100}
    return fields


@pytest.mark.slow
def test_100_000_requests_raise_nothing_and_memory_is_flat() -> None:
    """Through metadata, the table of workflows and the forecaster with its counts; workflows expire by a made-up clock.

    Memory is counted in the interpreter's blocks, which costs nothing to ask.
    """
    draw, counts, now = random.Random(5), EventCounts(), [0.0]
    source = Forecaster(None, back_off=OnlineCounts(), clock=lambda: now[0])
    table = WorkflowTable(5.0, lambda: now[0], counts)
    forecasts = StepForecasts(table, Forecasts(source), ScoreConfig(), counts, Modes(), lambda: now[0])

    class Keeps:
        pressed = True

        def forecast(self, *_: Any) -> None:
            pass

    forecasts.retention, told = Keeps(), Told(forecasts, table, at_once=False)
    sizes: list[int] = []
    for number in range(100_000):
        now[0] += 0.01
        step = read(sent(draw, number), strange(draw, number), counts)
        if step is not None:
            told.arrived(f"r{number}", step)
            told.started(f"r{number}")
            told.finished(f"r{number}", tokens=3)
        table.expire()
        forecasts.flush()
        if number % 20_000 == 19_999:
            gc.collect()
            sizes.append(sys.getallocatedblocks())
    assert max(sizes[1:]) < sizes[0] + 5_000, sizes  # one block a workflow would be 20,000 more each time
    assert len(source) == len(table) < 1000
    assert table.ends[EndReason.EXPIRED] > 10_000
    counted = counts.by_key()
    assert len([name for name in counted if not name.startswith("forecast: ")]) <= REASONS
    assert not [name for name in [*counted, *(why or "" for _, _, why in source.counts)] if name.endswith("Error")]
    assert not source.errors


@pytest.mark.vllm
def test_strange_requests_are_served_by_the_engine_like_any_other(tmp_path: Path) -> None:
    engine, draw, due = Engine(build(tmp_path, GuessingSync, blocks=70)), random.Random(6), {}
    for number in range(400):
        request = ask(f"r{number}", [number % 500] * 20, 2)
        extra = sent(draw, number)
        request.sampling_params.extra_args = extra
        request.session_id = strange(draw, number)
        due[request.request_id] = 2
        engine.scheduler.add_request(request)
        if number % 4 == 0:
            engine.step()
    engine.run()
    answered(engine, due)
    assert everything_is_free(engine.scheduler)
    status = engine.scheduler.presage_status()
    assert not [name for name in status["counts"] if name.endswith("Error")]
    assert not engine.scheduler.debug_state()["requests"]
