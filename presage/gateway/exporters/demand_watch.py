"""The demand forecast of a gateway: tells `policies/scaling.py` of requests, and makes what the gauges export."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from presage.gateway.exporters.demand import ModelDemand, model_demand
from presage.serving_hooks.policies.scaling import END, DemandForecast

MOST_MODELS: Final = 16
"""Models with a forecast; requests to further ones are not counted."""


class DemandWatch:
    """Demand of the models behind a gateway. Events of unknown requests and workflows are ignored.

    Args:
        ahead_s: the last horizon: seconds until a replica asked for now would serve.
        clock: monotonic seconds.
        rate_s, min_evidence: as in `policies/scaling.py`.
    """

    def __init__(
        self, ahead_s: float, clock: Callable[[], float], rate_s: float = 300.0, min_evidence: int = 5
    ) -> None:
        self._forecast = DemandForecast([str(slot) for slot in range(MOST_MODELS)], ahead_s, rate_s, min_evidence)
        self._clock = clock
        self._slots: dict[str, str] = {}

    def arrived(
        self, workflow: str, kind: str, agent: str, model: str, request: str, chances: Mapping[str, float], end: float
    ) -> None:
        """A request goes to a model that is served.

        Args:
            workflow, kind: key and type, both with the tenant: statistics are kept per tenant.
            chances, end: probabilities of the next agents, and of the workflow's end; {} and 0 without a forecast.
        """
        if model not in self._slots and len(self._slots) >= MOST_MODELS:
            return
        slot = self._slots.setdefault(model, str(len(self._slots)))
        self._forecast.arrived(workflow, kind, agent, slot, request, self._clock())
        self._forecast.expect(workflow, {**chances, END: end} if chances or end else {})

    def left(self, workflow: str, request: str) -> None:
        """A request was answered, or failed."""
        if request in (self._forecast.in_flight(workflow) or ()):
            self._forecast.answered(workflow, request, self._clock())

    def ended(self, workflow: str) -> None:
        """A workflow has ended; what is in flight of it counts as answered."""
        in_flight = self._forecast.in_flight(workflow)
        if in_flight is not None:
            for request in list(in_flight):
                self._forecast.answered(workflow, request, self._clock())
            self._forecast.ended(workflow, self._clock())

    def demands(self) -> list[ModelDemand]:
        """The demand of each model, now and ahead; looks at all running workflows."""
        models, columns = list(self._slots), len(self._slots)
        ahead = self._forecast.ahead(self._clock())
        return model_demand(
            models,
            self._forecast.now[:columns],
            self._forecast.horizons,
            None if ahead is None else (ahead[0][:, :columns], ahead[1][:, :columns]),
        )

    def debug_state(self) -> dict[str, int]:
        """Entries of each table, to find leaks."""
        return {"demand_workflows": len(self._forecast), "demand_models": len(self._slots)}
