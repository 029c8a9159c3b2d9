"""Sources of forecasts, the monitor and the recorder, called by the names of workflows: their records are kept here."""

from collections.abc import Callable
from typing import Any

from presage.serving_hooks.forecasting import context_growth, forecaster, return_times
from presage.serving_hooks.monitoring import monitor
from presage.serving_hooks.monitoring.outcomes import WorkflowOutcomes
from presage.serving_hooks.recorder import recorder
from presage.serving_hooks.workflows import RunningStep, Workflow
from presage.serving_hooks.workflows.identity import Step


class ByName:
    """Passes calls on, with the record of the workflow in place of its type and id, or before its step."""

    CALLS = (
        *("on_prefill", "on_completion", "on_prefill_state", "on_completion_state", "on_tools_called"),
        *("on_answer_read", "position", "remaining_tokens", "arrived", "completed", "answered", "away"),
    )
    ENDS = ("close", "ended")

    def __init__(self, source: Any) -> None:
        vars(self).update(source=source, workflows={})

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.source, name)
        if name not in self.CALLS and name not in self.ENDS:
            return value

        def call(*given: Any, **more: Any) -> Any:
            made = self.given(name, *given)
            result = value(*made, **more)
            if name in self.ENDS:
                self.workflows.pop(made[0].key, None)
            return result

        return call

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.source, name, value)

    def given(self, name: str, first: Any, *others: Any) -> tuple[Any, ...]:
        if isinstance(first, Step):
            return (self.record(first), *(() if name in self.ENDS else (first,)), *others)
        if isinstance(first, str) and "\0" in first:  # a key
            workflow_type, workflow_id = first.split("\0")
            return (self.record(Step(workflow_type, workflow_id, "")), *others)
        return (self.record(Step(first, others[0], "")), *others[1:])

    def record(self, step: Step) -> Workflow:
        found: Workflow = self.workflows.setdefault(step.workflow, Workflow(step))
        return found


class Forecaster(ByName):
    def __init__(self, *given: Any, **more: Any) -> None:
        more = {name: getattr(value, "source", value) if name == "monitor" else value for name, value in more.items()}
        super().__init__(forecaster.Forecaster(*given, **more))

    def __len__(self) -> int:
        return int(self.source.following)


class VersionedForecaster(ByName):
    def __init__(self, first: Any) -> None:
        first = getattr(first, "source", first)
        super().__init__(forecaster.VersionedForecaster(first) if isinstance(first, forecaster.Forecaster) else first)

    def take_over(self, latest: Any) -> None:
        self.source.take_over(getattr(latest, "source", latest))


class ReturnTimeForecaster(ByName):
    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(return_times.ReturnTimeForecaster(*given, **more))


class ContextForecaster(ByName):
    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(context_growth.ContextForecaster(*given, **more))


class ForecastMonitor:
    """A monitor by the names of workflows."""

    def __init__(self, *given: Any, **more: Any) -> None:
        self.source = monitor.ForecastMonitor(*given, **more)
        self.outcomes: dict[tuple[str, str], WorkflowOutcomes] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)

    def begun(self, workflow_type: str, workflow_id: str, *step: Any) -> None:
        key = workflow_type, workflow_id
        if key not in self.outcomes:
            self.outcomes[key] = self.source.opened(workflow_type)
        self.source.begun(self.outcomes[key], *step)

    def again(self, workflow_type: str, workflow_id: str, *given: Any) -> None:
        self._known(self.source.again, workflow_type, workflow_id, *given)

    def completed(self, workflow_type: str, workflow_id: str, *given: Any) -> None:
        self._known(self.source.completed, workflow_type, workflow_id, *given)

    def ended(self, workflow_type: str, workflow_id: str, *given: Any) -> None:
        self._known(self.source.ended, workflow_type, workflow_id, *given)
        self.outcomes.pop((workflow_type, workflow_id), None)

    def _known(self, event: Callable[..., None], workflow_type: str, workflow_id: str, *given: Any) -> None:
        outcomes = self.outcomes.get((workflow_type, workflow_id))
        if outcomes is not None:
            event(outcomes, *given)


class Recorder(ByName):
    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(recorder.Recorder(*given, **more))

    def start(self) -> "Recorder":
        self.source.start()
        return self

    def begun(self, request_id: Any, step: Any, **given: Any) -> Any:
        workflow = self.record(step) if hasattr(step, "workflow") else Workflow(step)
        return self.source.begun(RunningStep(request_id, step, workflow), **given)

    def ended(self, workflow_type: str, workflow_id: str, how: str) -> None:
        key = Step(workflow_type, workflow_id, "").workflow
        if key in self.workflows:
            self.source.ended(self.workflows.pop(key), how)

    CALLS, ENDS = (), ()
