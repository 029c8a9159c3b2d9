"""Monitors forecasts: tracks their outcomes, keeps live figures and raises the drift alarm.

Its methods raise nothing: exceptions are counted by name, and affect no request. Not thread-safe.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

from presage.serving_hooks.counts import ModelKind
from presage.serving_hooks.monitoring.drift import Alarm, Drift, Recovered
from presage.serving_hooks.monitoring.live_accuracy import LiveAccuracy
from presage.serving_hooks.monitoring.outcomes import Followed, WorkflowOutcomes
from presage.serving_hooks.monitoring.stand_back import StandBack
from presage.serving_hooks.workflows import EndReason
from presage.serving_hooks.workflows.live import DRIFTED, LESS_ACCURATE, LiveForecast

Result = TypeVar("Result")

_log = logging.getLogger(__name__)


class ForecastMonitor:
    """Compares forecasts, K = `horizon` steps ahead, with outcomes.

    Attributes:
        following: running workflows whose forecasts are judged.
    """

    def __init__(
        self,
        drift: Drift | None = None,
        live: LiveAccuracy | None = None,
        *,
        horizon: int = 3,
    ) -> None:
        self.drift, self.live = drift or Drift(), live or LiveAccuracy()
        self.stand_back, self.profile_stand_back = StandBack(), StandBack("the profile")
        self.errors: Counter[str] = Counter()
        self.following, self._horizon = 0, horizon

    def opened(self, workflow_type: str) -> WorkflowOutcomes:
        """What judges a workflow that begins; for the calls that follow."""
        self.following += 1
        return WorkflowOutcomes(workflow_type, self._horizon)

    def begun(self, outcomes: WorkflowOutcomes, *step: Any) -> None:
        """See `WorkflowOutcomes.begun`."""
        self._safely(lambda: outcomes.begun(*step), None)

    def again(self, outcomes: WorkflowOutcomes, forecast: LiveForecast) -> None:
        """See `WorkflowOutcomes.again`."""
        self._safely(lambda: outcomes.again(forecast), None)

    def completed(self, outcomes: WorkflowOutcomes, forecast: LiveForecast, output_tokens: object = None) -> None:
        """See `WorkflowOutcomes.completed`."""
        self._safely(lambda: outcomes.completed(forecast, output_tokens), None)

    def ended(
        self,
        outcomes: WorkflowOutcomes,
        reason: EndReason = EndReason.FINISHED,
        counted: str | None = None,
        profiled: str | None = None,
    ) -> None:
        """See `WorkflowOutcomes.ended`."""
        self.following -= 1
        self._safely(lambda: self.followed(outcomes.ended(reason, counted, profiled)), None)

    def falls_back(self, workflow_type: str, kind: ModelKind) -> str | None:
        """Why online counts forecast in place of the predictor; None while they do not.

        The type has drifted, or counts forecast its next agents better (`StandBack`).
        """
        return self._safely(lambda: self._why_counts(workflow_type, kind), None)

    def profile_falls_back(self, workflow_type: str) -> str | None:
        """Why online counts forecast next agents in place of the profile; None while they do not.

        Counts forecast them better than the profile; or the type has drifted, or counts forecast it better than the
        predictor, and the profile does not lead the counts beyond doubt.
        """
        return self._safely(lambda: self._why_not_profile(workflow_type), None)

    @property
    def stands_back(self) -> bool:
        """Whether counts forecast any workflow type in place of the predictor or the profile."""
        return bool(self.drift.alarms or self.stand_back.types or self.profile_stand_back.types)

    def status(self) -> dict[str, Any]:
        """Current alarms and how many were raised; live figures, beside the promised ones and beside counts.

        Live figures by workflow type and model come without intervals; beside the promised ones they have them.
        """
        return {
            "alarms": {name: alarm.to_dict() for name, alarm in self.drift.alarms.items()},
            "raised": self.drift.raised,
            "following": self.following,
            "promised": self.drift.promised(),
            "against_counts": self.stand_back.to_dict(),
            "profile_against_counts": self.profile_stand_back.to_dict(),
            "workflow_types": self.live.to_dict(resamples=0),
            "errors": dict(self.errors),
        }

    def followed(self, workflow: Followed) -> None:
        """Takes the forecasts and outcomes of a workflow that has ended."""
        self.live.followed(workflow)
        change = self.drift.followed(workflow)
        if isinstance(change, Alarm):
            for compared in (self.stand_back, self.profile_stand_back):
                compared.restart(workflow.workflow_type)
            _log.warning(
                "%s. %sPresage uses online counts for it until it recovers or another version takes over.",
                change.text,
                "".join(f"{cause.text}; {cause.mend}. " for cause in self.drift.causes(workflow.workflow_type)),
            )
        elif isinstance(change, Recovered):
            _log.warning("workflow type %r has recovered: its figures are as promoted", change.workflow_type)
        for compared, tally in (
            (self.stand_back, workflow.against_counts),
            (self.profile_stand_back, workflow.profile_against_counts),
        ):
            stood = compared.followed(workflow.workflow_type, tally)
            if stood is not None:
                _log.warning("%s", stood)

    def _why_counts(self, workflow_type: str, kind: ModelKind) -> str | None:
        of_agents = kind == "next-agent"
        if of_agents and workflow_type in self.stand_back:
            return LESS_ACCURATE
        if of_agents and self.stand_back.is_ahead(workflow_type):
            return None
        return DRIFTED if self.drift.falls_back(workflow_type, kind) else None

    def _why_not_profile(self, workflow_type: str) -> str | None:
        if workflow_type in self.profile_stand_back:
            return LESS_ACCURATE
        why = self._why_counts(workflow_type, "next-agent")
        return None if why is None or self.profile_stand_back.is_ahead(workflow_type) else why

    def _safely(self, event: Callable[[], Result], default: Result) -> Result:
        try:
            return event()
        except Exception as error:
            self.errors[type(error).__name__] += 1  # the message might contain text of the request
            return default
