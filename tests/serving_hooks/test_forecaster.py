"""Event by event the forecaster says what the predictor says of the whole prefix, and nothing ever gets out of it."""

from typing import Any

import numpy as np
import pytest
from by_name import Forecaster
from tiny_model import STATE_SIZE, WORKFLOWS, Tiny
from tool_samples import QUICK, tool_led

from presage.predictors.next_agent.predictor import NextAgentPredictor
from presage.serving_hooks.workflows.live import NO_MODEL, NO_STEP, LiveForecast
from presage.training.next_agent.train import fit_predictor

INPUTS = ("input_tokens", "input_text", "prefill_state")
OUTPUTS = ("output_tokens", "output_text", "completion_state")


@pytest.fixture(scope="module")
def predictor(tiny: Tiny) -> NextAgentPredictor:
    return NextAgentPredictor.load(tiny.folder)


def given(step: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: step[name] for name in names if name in step}


def prefill(forecaster: Forecaster, step: dict[str, Any]) -> LiveForecast:
    ids = (step["workflow_type"], step["workflow_id"], step["agent"])
    return forecaster.on_prefill(*ids, step=step["step"], **given(step, INPUTS))


def complete(forecaster: Forecaster, step: dict[str, Any]) -> LiveForecast:
    return forecaster.on_completion(step["workflow_type"], step["workflow_id"], **given(step, OUTPUTS))


@pytest.mark.parametrize("shape", WORKFLOWS)
def test_every_event_gets_the_numbers_of_the_whole_prefix(predictor: NextAgentPredictor, shape: str) -> None:
    forecaster, steps = Forecaster(predictor, version=3), WORKFLOWS[shape]
    for index, step in enumerate(steps):
        begun = {name: value for name, value in step.items() if name not in OUTPUTS}
        answers = [(prefill(forecaster, step), predictor.forecast([*steps[:index], begun]))]
        if "output_tokens" in step:
            answers.append((complete(forecaster, step), predictor.forecast(steps[: index + 1])))
        for live, whole in answers:
            assert (live.source, live.evidence, live.moment) == (whole.source, whole.evidence, whole.moment)
            assert (live.version, live.reason) == (3, None)
            assert live.probabilities[:, -1].tolist() == list(whole.end)
            for row, agents in zip(live.probabilities, whole.agents, strict=True):
                assert dict(zip(live.agents, row[:-1].tolist(), strict=True)) == agents
    assert forecaster.counts.total() == 2 * sum(2 if "output_tokens" in step else 1 for step in steps)


def test_interleaved_workflows_do_not_touch_each_other(predictor: NextAgentPredictor) -> None:
    forecaster, shapes = Forecaster(predictor), [WORKFLOWS["loop"], WORKFLOWS["depth over 3"]]
    last = {}
    for index in range(6):
        for number, steps in enumerate(shapes):
            last[number] = prefill(forecaster, steps[index])
            if index < 5:
                complete(forecaster, steps[index])
    for number, steps in enumerate(shapes):
        begun = given(steps[5], ("workflow_type", "workflow_id", "agent", *INPUTS))
        assert last[number].probabilities[:, -1].tolist() == list(predictor.forecast([*steps[:5], begun]).end)


def test_what_comes_with_steps_is_counted(predictor: NextAgentPredictor) -> None:
    forecaster = Forecaster(predictor)
    forecaster.on_prefill("retry", "w", "planner")
    forecaster.on_prefill("retry", "x", "planner", input_tokens=5)
    forecaster.on_prefill("retry", "y", "planner", input_tokens=5, system_prompt="You plan.")
    forecaster.on_prefill("retry", "z", "planner", prefill_state=np.ones(STATE_SIZE, np.float32))
    assert forecaster.inputs == {"steps": 4, "tokens": 2, "text": 1, "states": 1}


def test_without_a_model_there_is_no_forecast_and_a_reason() -> None:
    forecaster = Forecaster(None)
    for answer in (forecaster.on_prefill("t", "w", "a"), forecaster.on_completion("t", "w")):
        assert (answer.source, answer.evidence, answer.reason) == ("none", 0, NO_MODEL)
        assert answer.probabilities.shape == (0, 0)
    assert forecaster.counts == {(kind, "none", NO_MODEL): 2 for kind in ("next-agent", "remaining-length")}


BAD_STATES = (np.zeros(3), np.full(STATE_SIZE, np.nan), "text", [[1.0] * STATE_SIZE], object())


@pytest.mark.parametrize("state", BAD_STATES, ids=["short", "NaN", "a string", "nested", "an object"])
def test_a_bad_state_costs_the_workflow_its_forecasts_and_no_other(predictor: NextAgentPredictor, state: Any) -> None:
    forecaster = Forecaster(predictor)
    assert forecaster.on_prefill("retry", "w", "planner").source == "champion"
    bad = forecaster.on_completion("retry", "w", completion_state=state)
    assert bad.source == "none"
    assert bad.reason in {"InputError", "TypeError"}
    assert forecaster.on_prefill("retry", "w", "coder").source == "none", "its state may be wrong from here on"
    assert forecaster.on_prefill("retry", "other", "planner").source == "champion"
    forecaster.close("retry", "w")
    assert forecaster.on_prefill("retry", "w", "planner").source == "champion"


@pytest.mark.parametrize("workflow_id", ["", "x" * 10_000])
def test_odd_ids_raise_nothing(predictor: NextAgentPredictor, workflow_id: Any) -> None:
    forecaster = Forecaster(predictor)
    forecaster.on_prefill("retry", workflow_id, "planner")
    assert forecaster.on_completion("retry", workflow_id, output_tokens=-5).source == "none"
    assert forecaster.on_prefill("retry", "v", None).source == "back-off"  # type: ignore[arg-type]
    assert forecaster.on_prefill("retry", "w", "planner", input_tokens="many").source == "none"  # type: ignore[arg-type]


def test_a_predictor_that_breaks_is_counted_and_never_raises(predictor: NextAgentPredictor) -> None:
    class Broken:
        vocabulary, horizon, config, source = (
            predictor.vocabulary,
            predictor.horizon,
            predictor.config,
            predictor.source,
        )

        def open(self, workflow_type: str) -> None:
            raise RuntimeError("the text of a request")

    forecaster = Forecaster(Broken())  # type: ignore[arg-type]
    answer = forecaster.on_prefill("retry", "w", "planner")
    assert (answer.source, answer.reason) == ("none", "RuntimeError")
    assert "request" not in repr(forecaster.counts)


def test_a_completion_out_of_turn_gets_none_and_changes_nothing(predictor: NextAgentPredictor) -> None:
    forecaster, steps = Forecaster(predictor), WORKFLOWS["loop"]
    assert complete(forecaster, steps[0]).reason == NO_STEP
    prefill(forecaster, steps[0]), complete(forecaster, steps[0])
    assert complete(forecaster, steps[0]).reason == NO_STEP
    begun = given(steps[1], ("workflow_type", "workflow_id", "agent", *INPUTS))
    assert prefill(forecaster, steps[1]).probabilities[:, -1].tolist() == list(
        predictor.forecast([steps[0], begun]).end
    )


def test_closing_is_for_good_and_closing_nothing_is_no_error(predictor: NextAgentPredictor) -> None:
    forecaster = Forecaster(predictor)
    forecaster.on_prefill("retry", "w", "planner")
    forecaster.close("retry", "w"), forecaster.close("retry", "w")
    assert len(forecaster) == 0


def test_a_forecast_that_was_handed_out_stays_as_it_was(predictor: NextAgentPredictor) -> None:
    forecaster = Forecaster(predictor)
    first = forecaster.on_prefill("retry", "w", "planner")
    before = first.probabilities.copy()
    forecaster.on_completion("retry", "w"), forecaster.on_prefill("retry", "w", "coder")
    assert np.array_equal(first.probabilities, before)


def test_the_tools_that_an_answer_calls_renew_the_forecast_until_the_workflow_goes_on() -> None:
    predictor = fit_predictor(tool_led(160, 5), QUICK).predictor
    forecaster = Forecaster(predictor, version=3)
    step = {"workflow_type": "app", "workflow_id": "w", "agent": "plan", "output_tokens": 5}
    forecaster.on_prefill("app", "w", "plan")
    live = forecaster.on_completion("app", "w", output_tokens=5)
    assert forecaster.reads_tools
    for called in (["ask", "ask"], ["search"]):  # the latest counts
        renewed = forecaster.on_tools_called("app", "w", called, live)
        assert renewed is not None
        whole = predictor.forecast([{**step, "tools_called": called}])
        assert [dict(zip(renewed.agents, row, strict=False)) for row in renewed.probabilities.tolist()] == whole.agents
        assert forecaster.on_tools_called("app", "w", called, live) is None, "another forecast is the latest"
        live = renewed
    following = forecaster.on_prefill("app", "w", "write")
    begun = [{**step, "tools_called": ["search"]}, {"workflow_type": "app", "workflow_id": "w", "agent": "write"}]
    assert following.probabilities[:, -1].tolist() == list(predictor.forecast(begun).end)
    assert forecaster.on_tools_called("app", "w", ["search"], live) is None
    assert forecaster.inputs["answers"] == 2
    assert not Forecaster(None).reads_tools
