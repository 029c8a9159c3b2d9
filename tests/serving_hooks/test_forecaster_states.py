"""Hidden states that come after their step has begun: the numbers are those of states that were there at once."""

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from by_name import Forecaster
from numpy.typing import NDArray
from tiny_model import WORKFLOWS, Tiny

from presage.features.moment import COMPLETION, PREFILL, Moment
from presage.predictors.next_agent.predictor import NextAgentPredictor
from presage.serving_hooks.forecasting.online_counts import OnlineCounts
from presage.serving_hooks.workflows.live import NOT_AWAITED, STATES_LEFT_OUT, LiveForecast

OUTPUTS = ("output_tokens", "output_text", "completion_state")


@pytest.fixture(scope="module")
def predictor(tiny: Tiny) -> NextAgentPredictor:
    return tiny.training.predictor


def awaiting(predictor: NextAgentPredictor, **kinds: Any) -> Forecaster:
    forecaster = Forecaster(predictor, 3, **kinds)
    forecaster.awaits_states = True
    return forecaster


def projected(predictor: NextAgentPredictor, step: dict[str, Any], moment: Moment) -> NDArray[np.float32]:
    return predictor.project(moment, predictor.source.of_step(step, moment))


def begin(forecaster: Forecaster, step: dict[str, Any]) -> LiveForecast:
    ids = step["workflow_type"], step["workflow_id"], step["agent"]
    return forecaster.on_prefill(*ids, step=step["step"], input_tokens=step["input_tokens"])


def end(forecaster: Forecaster, step: dict[str, Any], state: NDArray[np.float32] | None) -> LiveForecast:
    ids = step["workflow_type"], step["workflow_id"]
    return forecaster.on_completion(*ids, output_tokens=step["output_tokens"], projected=state)


def same(live: LiveForecast, predictor: NextAgentPredictor, steps: list[dict[str, Any]]) -> None:
    whole = predictor.forecast(steps)
    assert (live.source, live.evidence, live.moment, live.reason) == (whole.source, whole.evidence, whole.moment, None)
    assert live.probabilities[:, -1].tolist() == list(whole.end)
    for row, agents in zip(live.probabilities, whole.agents, strict=True):
        assert dict(zip(live.agents, row[:-1].tolist(), strict=True)) == agents


@pytest.mark.parametrize("shape", WORKFLOWS)
def test_a_state_that_comes_later_gives_the_numbers_of_one_that_was_there(
    predictor: NextAgentPredictor, shape: str
) -> None:
    forecaster, steps = awaiting(predictor), WORKFLOWS[shape]
    for index, step in enumerate(steps):
        begun = {name: value for name, value in step.items() if name not in OUTPUTS}
        ids = step["workflow_type"], step["workflow_id"]
        first = begin(forecaster, step)
        stateless = {name: value for name, value in begun.items() if name != "prefill_state"}
        same(first, predictor, [*steps[:index], stateless])
        live = forecaster.on_prefill_state(*ids, projected(predictor, step, PREFILL), first)
        assert live is not None
        same(live, predictor, [*steps[:index], begun])
        if "output_tokens" in step:
            same(end(forecaster, step, projected(predictor, step, COMPLETION)), predictor, steps[: index + 1])
    assert forecaster.states == {None: len(steps)}
    assert forecaster.counts.total() == 2 * sum(2 if "output_tokens" in step else 1 for step in steps)


def test_a_state_changes_the_forecast(predictor: NextAgentPredictor) -> None:
    forecaster, step = awaiting(predictor), WORKFLOWS["loop"][0]
    first = begin(forecaster, step)
    live = forecaster.on_prefill_state("retry", step["workflow_id"], projected(predictor, step, PREFILL), first)
    assert live is not None
    assert not np.allclose(live.probabilities, first.probabilities)


def test_a_state_comes_too_late_once_its_step_is_over_or_another_has_begun(predictor: NextAgentPredictor) -> None:
    forecaster, steps = awaiting(predictor), WORKFLOWS["loop"]
    ids = "retry", steps[0]["workflow_id"]
    state = projected(predictor, steps[0], PREFILL)
    first = begin(forecaster, steps[0])
    end(forecaster, steps[0], None)
    assert forecaster.on_prefill_state(*ids, state, first) is None
    second = begin(forecaster, steps[1])
    assert forecaster.on_prefill_state(*ids, state, first) is None
    assert forecaster.on_prefill_state(*ids, state, second) is not None
    assert forecaster.on_prefill_state(*ids, state, second) is None, "one step, one state"
    forecaster.close(*ids)
    assert forecaster.on_prefill_state(*ids, state, second) is None
    assert forecaster.states == {NOT_AWAITED: 4, None: 1}
    assert len(forecaster) == 0


def test_a_late_state_leaves_the_workflow_as_it_was(predictor: NextAgentPredictor) -> None:
    steps = [{name: value for name, value in step.items() if "state" not in name} for step in WORKFLOWS["loop"]]
    forecaster = awaiting(predictor)
    first = begin(forecaster, steps[0])
    end(forecaster, steps[0], None)
    forecaster.on_prefill_state("retry", steps[0]["workflow_id"], np.ones(16, np.float32), first)
    same(begin(forecaster, steps[1]), predictor, [steps[0], {n: v for n, v in steps[1].items() if n not in OUTPUTS}])


@pytest.mark.parametrize("bad", [np.ones(3, np.float32), np.ones(16), "text"], ids=["short", "float64", "text"])
def test_a_state_that_is_none_raises_nothing(predictor: NextAgentPredictor, bad: Any) -> None:
    forecaster, step = awaiting(predictor), WORKFLOWS["loop"][0]
    first = begin(forecaster, step)
    assert forecaster.on_prefill_state("retry", step["workflow_id"], bad, first) is None
    assert forecaster.states == {"InputError": 1}
    assert begin(forecaster, {**step, "workflow_id": "another"}).source == "champion"


def test_counts_learn_a_step_once(predictor: NextAgentPredictor) -> None:
    def learnt(forecaster: Forecaster, states: bool) -> list[Any]:
        for number in range(40):
            for step in WORKFLOWS["one step, complete"]:
                step = {**step, "workflow_id": f"w{number}", "workflow_type": "new"}
                live = begin(forecaster, step)
                if states:
                    forecaster.on_prefill_state("new", f"w{number}", projected(predictor, step, PREFILL), live)
                end(forecaster, step, None)
            forecaster.close("new", f"w{number}")
        live = begin(forecaster, {**step, "workflow_id": "last"})
        return [live.source, live.evidence, live.probabilities[:, -1].tolist(), live.remaining]

    with_states, without = (learnt(awaiting(predictor, back_off=OnlineCounts()), states) for states in (True, False))
    assert with_states == without
    assert with_states[0] == "back-off"


def test_projections_are_those_of_the_served_model_alone(predictor: NextAgentPredictor) -> None:
    found = Forecaster(predictor).projections
    assert set(found) == {PREFILL, COMPLETION}
    step = WORKFLOWS["loop"][0]
    for moment, (weights, bias) in found.items():
        raw = predictor.source.of_step(step, moment)
        assert raw is not None
        assert np.allclose(raw @ weights + bias, projected(predictor, step, moment), atol=1e-6)
    assert Forecaster(None).projections == {}
    learnt = copy.copy(predictor)
    learnt.source = replace(predictor.source, served_model="model-7b")
    assert set(Forecaster(learnt, served_model="model-7b").projections) == {PREFILL, COMPLETION}
    other = awaiting(learnt, served_model="model-70b")
    assert other.projections == {}
    first = begin(other, step)
    live = other.on_prefill_state("retry", step["workflow_id"], projected(predictor, step, PREFILL), first)
    assert live is not None
    assert (live.reason, live.probabilities[:, -1].tolist()) == (STATES_LEFT_OUT, first.probabilities[:, -1].tolist())
