"""Forecasts of context growth while workflows run: those of the model on the steps so far, and of which version."""

from __future__ import annotations

import pytest
from by_name import ContextForecaster
from context_samples import loops

from presage.predictors.length.context import ContextGrowthConfig, ContextGrowthPredictor
from presage.serving_hooks.forecasting.circuit_breaker import Budget
from presage.serving_hooks.workflows import EndReason
from presage.serving_hooks.workflows.identity import Step, scoped
from presage.serving_hooks.workflows.live import NO_LENGTHS, LiveLengths
from presage.training.length.train import fit_lengths

PROMPTS = (4000, 5500, 7100)


@pytest.fixture(scope="module")
def predictor() -> ContextGrowthPredictor:
    config = ContextGrowthConfig(estimator="ridge")
    found = fit_lengths(loops(60, 0), config, target="final-context").predictor
    assert isinstance(found, ContextGrowthPredictor)
    return found


def of(number: int, workflow: str = "w", name: str = "fix") -> Step:
    return Step(name, workflow, "coder", number)


def forecaster(predictor: ContextGrowthPredictor | None, version: int | None = 1) -> ContextForecaster:
    return ContextForecaster(predictor, version, budget=Budget(deadline_s=60.0))


def test_a_running_workflow_gets_the_models_forecast_on_its_steps_so_far(predictor: ContextGrowthPredictor) -> None:
    live, steps = forecaster(predictor), []
    for number, prompt in enumerate(PROMPTS):
        made = live.arrived(of(number), prompt)
        steps.append({"workflow_type": "fix", "agent": "coder", "input_tokens": prompt})
        expected = predictor.forecast(steps)
        assert (made.source, made.version, made.evidence) == ("champion", 1, expected.evidence)
        assert made.tokens == pytest.approx(tuple(expected.quantiles.values()))
        left = live.completed(of(number), 50)
        assert left.tokens == pytest.approx([max(0.0, tokens - 50) for tokens in made.tokens])
        steps[-1]["output_tokens"] = 50
    assert live.debug_state() == {"context states": 1}
    live.ended(of(2), EndReason.FINISHED)
    assert live.debug_state() == {"context states": 0}


def test_new_workflows_get_a_newer_model_and_running_ones_keep_theirs(predictor: ContextGrowthPredictor) -> None:
    live = forecaster(predictor)
    live.arrived(of(0), PROMPTS[0])
    newer = fit_lengths(loops(60, 3), ContextGrowthConfig(estimator="ridge"), target="final-context").predictor
    assert isinstance(newer, ContextGrowthPredictor)
    live.take_over(newer, 2)
    live.completed(of(0), 50)
    assert live.arrived(of(1), PROMPTS[1]).version == 1
    assert live.arrived(of(0, "other"), PROMPTS[0]).version == 2
    live.take_over(None, None)
    assert live.arrived(of(0, "third"), PROMPTS[0]).source == "none"


def test_what_training_saw_of_a_type_is_told_for_every_tenant(predictor: ContextGrowthPredictor) -> None:
    steps, growth, _ = predictor.of_type("fix")
    assert forecaster(predictor).of_type(scoped("a tenant", "fix")) == (steps, growth)
    assert 18 < steps < 30
    assert forecaster(None, None).of_type("fix") is None


def test_the_mean_of_quantiles_weighs_each_for_the_levels_nearest_to_it() -> None:
    """For .1, .5 and .9 that is Swanson's rule: .3, .4 and .3."""
    assert LiveLengths("champion", 9, (0.1, 0.5, 0.9), (100.0, 200.0, 600.0), 1, 1).mean == pytest.approx(290.0)
    assert LiveLengths("champion", 9, (0.5,), (70.0,), 0, 1).mean == 70.0
    assert NO_LENGTHS.mean is None
