"""Running workflows on the profile of their type: one step of the automaton at each start of a step.

The profile forecasts next agents where the model of next agents cannot, before online counts do. It must be confident,
the workflow on the graph, and its state visited often enough: the rule of `ProfilePredictor.forecast_at`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

from presage.features.moment import Moment
from presage.predictors.profile.automaton import ProfilePlace
from presage.predictors.profile.predictor import ProfilePredictor
from presage.predictors.profile.profile import TypeProfile
from presage.predictors.profile.steps_ahead import StepsAhead
from presage.serving_hooks.forecasting.adapters import check_distributions
from presage.serving_hooks.forecasting.live import LiveForecast, LiveLengths
from presage.serving_hooks.forecasting.online_counts import BackoffConfig

_BESIDE: Final = ()
"""The parents of a step that began while another ran: it waits for none of its block."""


@dataclass(frozen=True, slots=True)
class ProfiledWorkflow:
    """A running workflow: the profile of its type, what follows each place of it, and the place."""

    profile: TypeProfile
    ahead: StepsAhead
    place: ProfilePlace


class ProfileAdapter:
    """A profile, one event of one workflow at a time."""

    def __init__(self, predictor: ProfilePredictor, version: int | None) -> None:
        self.predictor, self.version = predictor, version
        self._ahead = {name: StepsAhead(of.automaton, BackoffConfig.horizon) for name, of in predictor.profiles.items()}

    def open(self, workflow_type: str) -> ProfiledWorkflow | None:
        """A new workflow; None if its type has no profile."""
        name = self.predictor.names.workflow_type(workflow_type)
        profile = self.predictor.profiles.get(name)
        return None if profile is None else ProfiledWorkflow(profile, self._ahead[name], ProfilePlace())

    def begun(self, workflow: ProfiledWorkflow, agent: str, beside: bool) -> ProfiledWorkflow:
        """The workflow after a step has begun, alone or beside others."""
        profile, name = workflow.profile, self.predictor.names.agent(agent)
        parents = _BESIDE if beside else None
        return replace(workflow, place=profile.automaton.step(workflow.place, name, 0, parents, profile.alphabet))

    def forecast(
        self, workflow: ProfiledWorkflow, moment: Moment, reason: str | None, left: LiveLengths
    ) -> LiveForecast | None:
        """The next steps, with why the model of next agents makes no forecast; None where the profile is not sure."""
        of = workflow.place.state
        if of is None or not self.predictor.sure(workflow.profile, workflow.place):
            return None
        rows = workflow.ahead.after(workflow.place)
        if rows is None:
            return None
        check_distributions(rows)
        visits = workflow.profile.automaton.states[of].visits
        return LiveForecast("profile", visits, moment, rows, workflow.ahead.agents, self.version, reason, left)

    def position(self, workflow: ProfiledWorkflow) -> dict[str, Any]:
        """Where a workflow is, for people: `at` names the agents of its state."""
        found = self.predictor.forecast_at(workflow.profile, workflow.place)
        symbol = None if found.state is None else workflow.profile.automaton.states[found.state].symbol
        at = [symbol] if isinstance(symbol, str) else [*(symbol or ())]
        return {"version": self.version, "confident": workflow.profile.confident, "at": at, **found.to_dict()}
