"""Memory: bytes a workflow, and a soak of workflows that end and of workflows that never say so."""

import gc
import tracemalloc
from pathlib import Path

import pytest
from serving_samples import Clock, lengths_of
from tiny_model import Tiny

import presage
from presage.predictors.next_agent.predictor import NextAgentPredictor
from presage.serving_hooks.forecasting.forecaster import Forecaster
from presage.serving_hooks.forecasting.online_counts import OnlineCounts
from presage.serving_hooks.workflows import EndReason, WorkflowTable
from presage.serving_hooks.workflows.identity import Step, workflow_key

GENERATED = "<string>"  # the methods of dataclasses
OWN = [tracemalloc.Filter(True, pattern) for pattern in (f"{Path(presage.__file__).parent}/*", GENERATED)]
AGENTS = ("planner", "coder", "tester", "reviewer")


def traced() -> int:
    """Bytes that code of the package has allocated and not released.

    Other allocations do not count: the process also runs what earlier tests left behind, such as a thread that imports.
    """
    gc.collect()
    held = tracemalloc.take_snapshot().filter_traces(OWN)
    return sum(trace.size for trace in held.traces)


def steps(forecaster: Forecaster, name: str, count: int = 4) -> None:
    for number in range(count):
        forecaster.on_prefill("retry", name, AGENTS[number % 4], step=number, input_tokens=900)
        forecaster.on_completion("retry", name, output_tokens=100)


@pytest.mark.slow
@pytest.mark.parametrize("both", [False, True], ids=["next agent", "both predictors"])
def test_a_workflow_costs_at_most_4_kb_beyond_the_next_agent_predictors_state(tiny: Tiny, both: bool) -> None:
    predictor = NextAgentPredictor.load(tiny.folder)
    lengths, workflows = lengths_of(tiny.store) if both else None, 10_000
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
def test_memory_is_flat_over_20_000_short_workflows(tiny: Tiny, ends: bool) -> None:
    clock = Clock()
    forecaster = Forecaster(NextAgentPredictor.load(tiny.folder), back_off=OnlineCounts(), clock=clock)
    table = WorkflowTable(100.0, clock)
    table.subscribe(lambda workflow, reason: forecaster.close("retry", workflow.step.workflow_id, reason))
    tracemalloc.start()
    try:
        levels = []
        for number in range(20_000):
            clock.now += 1.0
            table.arrived("request", Step("retry", f"workflow {number}", "planner"))
            steps(forecaster, f"workflow {number}", count=1 + number % 3)
            table.finished("request")
            if ends:
                table.end(workflow_key("retry", f"workflow {number}"), EndReason.FINISHED)
            table.expire()
            if number % 5_000 == 4_999:
                levels.append(traced())
    finally:
        tracemalloc.stop()
    assert len(forecaster) == (0 if ends else 100)
    assert table.ends[EndReason.EXPIRED] == (0 if ends else 20_000 - 100)
    assert max(levels[1:]) - levels[0] < 50_000, levels
