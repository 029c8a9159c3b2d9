"""Trial forecasts of a predictor that was just loaded: they find a broken one, and compile its code.

That of return times is beside their forecaster.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from presage.errors import ArtefactError
from presage.features.moment import PREFILL
from presage.features.states import STATE_COLUMN
from presage.predictors.length.predictor import RemainingLengthPredictor
from presage.predictors.next_agent.predictor import NextAgentPredictor
from presage.predictors.profile.predictor import ProfilePredictor
from presage.predictors.router.predictor import RouterPredictor
from presage.serving_hooks.forecasting.adapters import LengthAdapter, NextAgentAdapter
from presage.serving_hooks.forecasting.profile_places import ProfileAdapter
from presage.serving_hooks.workflows.live import NO_LENGTHS

TRIAL_STEPS: Final = 3
"""Steps of a trial; the later ones have a prefix."""

_SERVED: Final = ("remaining", "final-context")
"""Targets that engines serve: the defaults of `train-predictor`."""


def try_next_agent(predictor: NextAgentPredictor, texts: Mapping[str, str]) -> None:
    """Forecasts a few steps at both moments, of known and unknown workflow types and agents."""
    adapter, vocabulary = NextAgentAdapter(predictor, None), predictor.vocabulary
    inputs: dict[str, Any] = dict(texts)
    if texts:
        inputs |= {STATE_COLUMN[moment]: np.zeros(size, np.float32) for moment, size in predictor.source.sizes.items()}
    for workflow_type in (*vocabulary.workflow_types[:1], ""):
        workflow = predictor.open(workflow_type)
        for agent in (*vocabulary.agents[:TRIAL_STEPS], ""):
            adapter.prefilled(workflow, agent, (), {"input_tokens": 1, **inputs}, NO_LENGTHS)
            adapter.completed(workflow, (), {"output_tokens": 1, **inputs}, NO_LENGTHS)


def try_lengths(predictor: RemainingLengthPredictor, texts: Mapping[str, str]) -> None:
    """Likewise, of lengths or contexts; raises ArtefactError for a target that is not served."""
    if predictor.target not in _SERVED:
        raise ArtefactError(
            f"the predictor forecasts the target {predictor.target}; an engine needs what remains of a workflow, "
            f"the default of `train-predictor {predictor.kind}`"
        )
    adapter, vocabulary = LengthAdapter(predictor, None), predictor.encoder.vocabulary
    for workflow_type in (*vocabulary.workflow_types[:1], ""):
        workflow = predictor.open(workflow_type)
        for agent in (*vocabulary.agents[:TRIAL_STEPS], ""):
            adapter.prefilled(workflow, {"agent": agent, "input_tokens": 1, **texts})
            workflow.completed({"output_tokens": 1, **texts})


def try_profile(predictor: ProfilePredictor, texts: Mapping[str, str]) -> None:
    """Likewise, along the likeliest path of every workflow type; a profile reads no `texts`."""
    adapter = ProfileAdapter(predictor, None)
    for workflow_type, profile in predictor.profiles.items():
        workflow = adapter.open(workflow_type)
        assert workflow is not None
        states = (profile.automaton.states[number] for number in profile.automaton.dominant_path()[0][:TRIAL_STEPS])
        for agent in (*(next(iter(state.members)) for state in states), ""):
            workflow = adapter.begun(workflow, agent, beside=False)
            adapter.forecast(workflow, PREFILL, None, adapter.lengths(workflow, None) or NO_LENGTHS)
            adapter.position(workflow)


def try_router(predictor: RouterPredictor, texts: Mapping[str, str]) -> None:
    """Forecasts with and without a prompt; a router reads nothing else, so `texts` make no difference."""
    for forecast in predictor.forecasts(["", "a trial"]):
        if not all(0.0 <= share <= 1.0 for share in forecast.probabilities.values()):  # NaN is neither
            raise ArtefactError("the router forecasts a probability that is not between 0 and 1: train it again")
