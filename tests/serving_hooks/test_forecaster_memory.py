"""Memory: bytes a workflow, and a soak of workflows that end and of workflows that never say so."""

import gc
import tracemalloc

import pytest
from by_name import Forecaster
from serving_samples import Clock, lengths_of
from tiny_model import Tiny

from presage.predictors.next_agent.predictor import NextAgentPredictor
from presage.serving_hooks.forecasting.online_counts import OnlineCounts
from presage.serving_hooks.workflows import EndReason, WorkflowTable
from presage.serving_hooks.workflows.identity import Step, workflow_key

TABLE = 1_000_000
AGENTS = ("planner", "coder", "tester", "reviewer")


def traced() -> int:
    """Bytes allocated and not released, without the table of interned strings.

    CPython keeps one such table for the whole process. Names of workflows are interned while they run, so the table may
    double during a test: one block of 15 MB in a process that has loaded torch and MLflow. Leaks show in small blocks.
    """
    gc.collect()
    return sum(block.size for block in tracemalloc.take_snapshot().traces if block.size < TABLE)


def steps(forecaster: Forecaster, name: str, count: int = 4) -> None:
    for number in range(count):
        forecaster.on_prefill("retry", name, AGENTS[number % 4], step=number, input_tokens=900)
        forecaster.on_completion("retry", name, output_tokens=100)


@pytest.mark.slow
@pytest.mark.parametrize("both", [False, True], ids=["next agent", "both predictors"])
def test_a_workflow_costs_at_most_4_kb_beyond_the_next_agent_predictors_state(tiny: Tiny, both: bool) -> None:
    predictor = NextAgentPredictor.load(tiny.folder)
    lengths, workflows = lengths_of(tiny.store) if both else None, 3_000
    forecaster = Forecaster(predictor, lengths=lengths, back_off=OnlineCounts(), clock=Clock())
    steps(forecaster, "warm")
    state = predictor.open("retry").nbytes
    tracemalloc.start()
    try:
        before = traced()
        for number in range(workflows):
            steps(forecaster, f"workflow {number}")
        each = (traced() - before) / workflows
    finally:
        tracemalloc.stop()
    assert len(forecaster) == workflows + 1
    print(f"{each:.0f} bytes, {state} of them the predictor's")
    assert each - state <= 4096


@pytest.mark.slow
@pytest.mark.parametrize("ends", [True, False], ids=["that end", "that expire"])
def test_memory_is_flat_over_4_000_short_workflows(tiny: Tiny, ends: bool) -> None:
    clock = Clock()
    forecaster = Forecaster(NextAgentPredictor.load(tiny.folder), back_off=OnlineCounts(), clock=clock)
    table = WorkflowTable(100.0, clock)
    table.subscribe(lambda workflow, reason: forecaster.close("retry", workflow.step.workflow_id, reason))
    tracemalloc.start()
    try:
        levels = []
        for number in range(4_000):
            clock.now += 1.0
            table.arrived("request", Step("retry", f"workflow {number}", "planner"))
            steps(forecaster, f"workflow {number}", count=1 + number % 3)
            table.finished("request")
            if ends:
                table.end(workflow_key("retry", f"workflow {number}"), EndReason.FINISHED)
            table.expire()
            if number % 2_000 == 1_999:
                levels.append(traced())
    finally:
        tracemalloc.stop()
    assert len(forecaster) == (0 if ends else 100)
    assert table.ends[EndReason.EXPIRED] == (0 if ends else 4_000 - 100)
    assert max(levels[1:]) - levels[0] < 50_000, levels
