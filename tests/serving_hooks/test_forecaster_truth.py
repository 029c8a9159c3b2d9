"""The monitor beside the forecaster: told what predictors claim; while an alarm stands, counts answer instead."""

import numpy as np
import pytest
from by_name import Forecaster
from serving_samples import Clock, lengths_of
from tiny_model import Tiny

from presage.predictors.next_agent.predictor import NextAgentPredictor
from presage.serving_hooks.forecasting.online_counts import OnlineCounts
from presage.serving_hooks.monitoring.drift import Alarm, Drift, DriftConfig, Reason
from presage.serving_hooks.monitoring.monitor import ForecastMonitor
from presage.serving_hooks.monitoring.outcomes import AgainstCounts, Followed
from presage.serving_hooks.monitoring.promoted import Figure
from presage.serving_hooks.monitoring.stand_back import STEPS
from presage.serving_hooks.workflows import EndReason, WorkflowTable
from presage.serving_hooks.workflows.identity import Step
from presage.serving_hooks.workflows.live import DRIFTED, LESS_ACCURATE, LiveForecast

AGENTS = ("planner", "coder", "tester")


class Kept(ForecastMonitor):
    """Keeps what is told of whole workflows."""

    def __init__(self) -> None:
        self.over: list[Followed] = []
        super().__init__(Drift(config=DriftConfig()))

    def followed(self, workflow: Followed) -> None:
        self.over.append(workflow)
        super().followed(workflow)


def of(tiny: Tiny, clock: Clock | None = None) -> tuple[Forecaster, Kept]:
    truth = Kept()
    forecaster = Forecaster(
        NextAgentPredictor.load(tiny.folder),
        4,
        lengths=lengths_of(tiny.store),
        lengths_version=5,
        back_off=OnlineCounts(),
        monitor=truth,
        clock=clock or Clock(),
    )
    return forecaster, truth


def run(forecaster: Forecaster, workflow_id: str, *, end: EndReason | None = EndReason.FINISHED) -> list[LiveForecast]:
    said = []
    for step, agent in enumerate(AGENTS):
        said.append(forecaster.on_prefill("retry", workflow_id, agent, step=step, input_tokens=100))
        said.append(forecaster.on_completion("retry", workflow_id, output_tokens=10))
    if end is not None:
        forecaster.close("retry", workflow_id, end)
    return said


def raised(truth: ForecastMonitor, figure: str) -> None:
    reason = Reason(figure, "below", 0.1, Figure(0.8, 0.7, 0.9))
    truth.drift.alarms["retry"] = Alarm("retry", 99, (reason,))


def test_each_workflow_is_judged_by_what_was_forecast_of_it(tiny: Tiny) -> None:
    forecaster, truth = of(tiny)
    said = run(forecaster, "w")
    (over,) = truth.over
    assert over.ended
    assert set(over.next_agent) == {"version 4"}
    judged = over.next_agent["version 4"].sums[0].sum(axis=-1)
    # From steps 0, 1 and 2: one, two and three steps ahead are known down to END, and nothing behind it.
    assert judged[:, 0].tolist() == [3, 3]
    right = over.next_agent["version 4"].sums[2].sum(axis=-1)[0, 0]
    came = [*AGENTS[1:], None]
    top = [live.probabilities[0].argmax() for live in said[::2]]
    names = [said[0].agents[t] if t < len(said[0].agents) else None for t in top]
    assert right == sum(name == agent for name, agent in zip(names, came, strict=True))
    assert over.lengths["version 5"].judged == 3
    within = [
        [left <= tokens for tokens in live.remaining.tokens] for live, left in zip(said[::2], (30, 20, 10), strict=True)
    ]
    assert over.lengths["version 5"].within.tolist() == np.sum(within, axis=0).tolist()
    assert not truth.errors


@pytest.mark.parametrize("reason", EndReason)
def test_only_a_finished_workflow_is_judged_as_ended(tiny: Tiny, reason: EndReason) -> None:
    forecaster, truth = of(tiny)
    run(forecaster, "w", end=reason)
    assert [over.ended for over in truth.over] == [reason is EndReason.FINISHED]


def test_a_workflow_that_expires_from_the_table_has_not_finished(tiny: Tiny) -> None:
    clock = Clock()
    forecaster, truth = of(tiny, clock)
    table = WorkflowTable(60.0, clock)
    table.subscribe(lambda workflow, reason: forecaster.close("retry", workflow.step.workflow_id, reason))
    table.arrived("w.0", Step("retry", "w", "planner"))
    run(forecaster, "w", end=None)
    table.finished("w.0")
    clock.now = 61.0
    table.expire()
    assert ([over.ended for over in truth.over], len(forecaster)) == ([False], 0)


def test_while_an_alarm_stands_counts_answer_and_the_model_is_judged_all_the_same(tiny: Tiny) -> None:
    forecaster, truth = of(tiny)
    for number in range(8):
        run(forecaster, f"before {number}")
    raised(truth, "accuracy at prefill")
    said = run(forecaster, "w")
    assert {(live.source, live.reason, live.version) for live in said} == {("back-off", DRIFTED, None)}
    assert {live.remaining.source for live in said} == {"champion"}, "nothing speaks against lengths"
    assert forecaster.counts["next-agent", "back-off", DRIFTED] == 6
    assert set(truth.over[-1].next_agent) == {"version 4"}
    before, after = (over.next_agent["version 4"].sums for over in truth.over[-2:])
    assert np.array_equal(before, after), "the same workflow, judged as the model answers it"
    del truth.drift.alarms["retry"]
    assert {live.source for live in run(forecaster, "after")} == {"champion"}


def test_lengths_fall_back_alone_where_coverage_raised_it(tiny: Tiny) -> None:
    forecaster, truth = of(tiny)
    for number in range(8):
        run(forecaster, f"before {number}")
    raised(truth, "coverage at 0.9")
    said = run(forecaster, "w")
    assert {live.source for live in said} == {"champion"}
    assert {(live.remaining.source, live.remaining.reason) for live in said} == {("back-off", DRIFTED)}
    assert truth.over[-1].lengths["version 5"].judged == 3


def test_where_counts_know_too_little_the_model_goes_on(tiny: Tiny) -> None:
    forecaster, truth = of(tiny)
    raised(truth, "agents never seen")
    live = forecaster.on_prefill("retry", "w", "planner", step=0, input_tokens=100)
    assert (live.source, live.remaining.source) == ("champion", "champion")


def test_a_forecast_made_again_with_its_state_is_the_one_that_is_judged(tiny: Tiny) -> None:
    forecaster, truth = of(tiny)
    forecaster.awaits_states = True
    first = forecaster.on_prefill("retry", "w", "planner", step=0, input_tokens=100)
    state = np.full(len(forecaster.projections["prefill"][1]), 3.0, np.float32)
    again = forecaster.on_prefill_state("retry", "w", state, first)
    assert again is not None
    forecaster.on_completion("retry", "w", output_tokens=10)
    forecaster.on_prefill("retry", "w", "coder", step=1, input_tokens=100)
    forecaster.close("retry", "w", EndReason.ABORTED)
    sure = truth.over[0].next_agent["version 4"].sums[1].sum(axis=-1)[0, 0]
    assert sure == pytest.approx(float(again.probabilities[0].max()))
    assert sure != pytest.approx(float(first.probabilities[0].max()))


def backwards(forecaster: Forecaster, workflow_id: str) -> list[LiveForecast]:
    """The agents in an order that the predictor never saw."""
    said = []
    for step, agent in enumerate(("tester", "tester", "coder", "coder", "planner", "planner")):
        said.append(forecaster.on_prefill("retry", workflow_id, agent, step=step, input_tokens=100))
        said.append(forecaster.on_completion("retry", workflow_id, output_tokens=10))
    forecaster.close("retry", workflow_id)
    return said


def test_a_predictor_below_the_counts_for_a_thousand_steps_stands_back_until_it_recovers(
    tiny: Tiny, caplog: pytest.LogCaptureFixture
) -> None:
    forecaster, truth = of(tiny)
    reasons = []
    for number in range(260):
        reasons.append({live.reason for live in backwards(forecaster, f"w {number}")})
        if LESS_ACCURATE in reasons[-1]:
            break
    figures = truth.stand_back.to_dict()["retry"]
    assert figures["steps"] >= STEPS
    assert figures["counts"] > figures["model"]
    assert figures["stands_back"]
    assert reasons[-1] == {LESS_ACCURATE}
    assert forecaster.counts["next-agent", "back-off", LESS_ACCURATE] == 12
    assert {live.remaining.source for live in backwards(forecaster, "w")} == {"champion"}, "of agents only"
    assert "stands back for workflow type 'retry'" in caplog.text
    for _ in range(STEPS // 10):
        truth.followed(Followed("retry", True, {}, {}, {}, AgainstCounts(10, 9, 8)))
    assert {live.source for live in run(forecaster, "recovered")} == {"champion"}
    assert "forecasts workflow type 'retry' again" in caplog.text


def test_a_predictor_that_still_leads_the_counts_is_used_while_the_alarm_stands(tiny: Tiny) -> None:
    forecaster, truth = of(tiny)
    for number in range(8):
        run(forecaster, f"before {number}")
    raised(truth, "accuracy at prefill")
    assert {live.reason for live in run(forecaster, "w")} == {DRIFTED}
    for _ in range(25):
        truth.stand_back.followed("retry", AgainstCounts(10, 9, 6))
    assert {live.source for live in run(forecaster, "w 2")} == {"champion"}
    assert truth.falls_back("retry", "return-time") is None, "accuracy does not concern return times"
