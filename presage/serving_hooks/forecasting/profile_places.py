"""Running workflows on the profile of their type: one step of the automaton at each start of a step.

The profile forecasts next agents and remaining tokens where their models cannot, before online counts do. It must be
confident, the workflow on the graph, and its state visited often enough: the rule of `ProfilePredictor.forecast_at`.
What follows a place depends on the place alone, so it is made once and kept.

A workflow type without a profile is followed on that of the latest version of its application (`coding@2` for
`coding@3`): a prior, whose forecasts have no evidence and say so.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from presage.features.moment import Moment
from presage.predictors.profile.automaton import QUANTILES, LeftAtState, ProfilePlace
from presage.predictors.profile.predictor import ProfilePredictor
from presage.predictors.profile.profile import TypeProfile
from presage.predictors.profile.steps_ahead import StepsAhead
from presage.predictors.profile.versions import application_of, latest_versions
from presage.serving_hooks.forecasting.adapters import check_distributions, checked_quantiles
from presage.serving_hooks.forecasting.online_counts import BackoffConfig
from presage.serving_hooks.workflows.live import OTHER_VERSION, LiveForecast, LiveLengths

_BESIDE: Final = ()
"""The parents of a step that began while another ran: it waits for none of its block."""
_MOST_KEPT: Final = 1024
"""Of the latest places of a type, what follows them."""


@dataclass(frozen=True, slots=True)
class PlaceForecast:
    """What follows a place where the profile is sure.

    Attributes:
        evidence: training visits of its state.
        probabilities, agents: of the next steps, as those of `LiveForecast`.
        likeliest: the next agent, or "" for the end.
        tokens: those left in training workflows at a step there, at QUANTILES; None with too few.
    """

    evidence: int
    probabilities: NDArray[np.float32]
    agents: tuple[str, ...]
    likeliest: str
    tokens: LeftAtState | None


class ServedProfile:
    """The profile of the workflow type `name`, and what follows each place of it.

    Args:
        min_evidence: fewest workflows and steps behind a forecast of remaining tokens.
    """

    def __init__(self, name: str, profile: TypeProfile, min_evidence: int) -> None:
        self.name, self.profile, self._least = name, profile, min_evidence
        self._ahead = StepsAhead(profile.automaton, BackoffConfig.horizon)
        self._kept = lru_cache(_MOST_KEPT)(self._after)

    def after(self, place: ProfilePlace) -> PlaceForecast | None:
        """What follows a place; None where nothing is known."""
        return None if place.state is None else self._kept(place.state, place.within)

    def _after(self, state: int, within: int) -> PlaceForecast | None:
        rows = self._ahead.after(ProfilePlace(state, within))
        if rows is None:
            return None
        check_distributions(rows)
        agents, top = self._ahead.agents, int(rows[0].argmax())
        likeliest = agents[top] if top < len(agents) else ""
        reached = self.profile.automaton.states[state]
        tokens = reached.tokens if reached.tokens is not None and reached.tokens.observations >= self._least else None
        if tokens is not None:
            checked_quantiles(dict(zip(QUANTILES, tokens.quantiles, strict=True)), len(QUANTILES))
        return PlaceForecast(reached.visits, rows, agents, likeliest, tokens)


@dataclass(frozen=True, slots=True)
class ProfiledWorkflow:
    """A running workflow: the profile of its type, its place there, and what follows; None where that is not sure.

    `own` is false if the profile is that of another version of the application.
    """

    served: ServedProfile
    own: bool
    place: ProfilePlace
    forecast: PlaceForecast | None = None


class ProfileAdapter:
    """A profile, one event of one workflow at a time."""

    def __init__(self, predictor: ProfilePredictor, version: int | None) -> None:
        self.predictor, self.version = predictor, version
        least = predictor.config.min_evidence
        self._served = {name: ServedProfile(name, profile, least) for name, profile in predictor.profiles.items()}
        self._latest = latest_versions(self._served)

    def open(self, workflow_type: str) -> ProfiledWorkflow | None:
        """A new workflow; None if no version of its application has a profile."""
        name = self.predictor.names.workflow_type(workflow_type)
        own = name in self._served
        described = name if own else self._latest.get(application_of(name))
        return None if described is None else ProfiledWorkflow(self._served[described], own, ProfilePlace())

    def begun(self, workflow: ProfiledWorkflow, agent: str, beside: bool) -> ProfiledWorkflow:
        """The workflow after a step has begun, alone or beside others."""
        served, name = workflow.served, self.predictor.names.agent(agent)
        profile, parents = served.profile, _BESIDE if beside else None
        place = profile.automaton.step(workflow.place, name, 0, parents, profile.alphabet)
        sure = self.predictor.sure(profile, place)
        return ProfiledWorkflow(served, workflow.own, place, served.after(place) if sure else None)

    def forecast(
        self, workflow: ProfiledWorkflow, moment: Moment, reason: str | None, left: LiveLengths
    ) -> LiveForecast | None:
        """The next steps, with why the model of next agents makes no forecast; None where the profile is not sure."""
        forecast = workflow.forecast
        if forecast is None:
            return None
        evidence, reason = (forecast.evidence, reason) if workflow.own else (0, OTHER_VERSION)
        return LiveForecast(
            "profile", evidence, moment, forecast.probabilities, forecast.agents, self.version, reason, left
        )

    def lengths(self, workflow: ProfiledWorkflow, reason: str | None) -> LiveLengths | None:
        """The tokens left from the step that has just begun, with why their model makes no forecast; None likewise."""
        left = workflow.forecast.tokens if workflow.forecast is not None else None
        if left is None:
            return None
        evidence, reason = (left.observations, reason) if workflow.own else (0, OTHER_VERSION)
        return LiveLengths("profile", evidence, QUANTILES, left.quantiles, 0, self.version, reason)

    def position(self, workflow: ProfiledWorkflow) -> dict[str, Any]:
        """Where a workflow is, for people: `at` names the agents of its state."""
        profile = workflow.served.profile
        forecast = self.predictor.forecast_at(workflow.served.name, workflow.place, workflow.own)
        symbol = None if forecast.state is None else profile.automaton.states[forecast.state].symbol
        agents = [symbol] if isinstance(symbol, str) else [*(symbol or ())]
        position = {"version": self.version, "confident": profile.confident, "own": workflow.own, "at": agents}
        return position | forecast.to_dict()
