"""Whether answers and workflows were right, as applications report it: where each is recorded, and what was reported.

A report names an answer that passed through here, by its id, or a workflow. The first report of each stands, since
what was ingested is never taken back; the same report again changes nothing. All of it is a tenant's own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from presage.gateway.refusal import Refusal
from presage.gateway.request_forecasts import GatewayDecision
from presage.serving_hooks.listeners import Found, Listener
from presage.serving_hooks.modes import Switch
from presage.serving_hooks.recorder.recorder import StepRecorder
from presage.serving_hooks.workflows import RunningStep
from presage.serving_hooks.workflows.choices import LeftStep
from presage.serving_hooks.workflows.identity import Step, scoped, tenant_of
from presage.serving_hooks.workflows.recorded import RecordedStep
from presage.wording import nearest

LATE_S: Final = 86_400.0
"""Seconds for which an answer, and a workflow after its latest request, can be reported on."""
_LONGEST_ID: Final = 512
_FIELDS: Final = ("response_id", "workflow_id", "workflow_type", "success", "score")

Subject = tuple[Literal["response", "workflow"], str]
"""What a report is about: the id of an answer, or the key of a workflow, which holds the tenant."""


@dataclass(frozen=True, slots=True)
class OutcomeReport:
    """A report; the score is None for a workflow."""

    subject: Subject
    success: bool
    score: float | None


def outcome_report(body: Mapping[str, Any], tenant: str) -> OutcomeReport:
    """The report in a body of `POST /v1/outcomes`.

    Raises:
        Refusal: it is malformed.
    """
    for name in body:
        if name not in _FIELDS:
            meant = nearest(name[:64], _FIELDS)
            hint = f"did you mean {meant}? " if meant else ""
            raise _invalid(f"Unknown field {name[:64]!r}; {hint}Send some of {', '.join(_FIELDS)}.")
    names = [name for name in ("response_id", "workflow_id") if body.get(name) is not None]
    if len(names) != 1:
        found = "both" if names else "neither"
        raise _invalid(
            f"Found {found} of response_id and workflow_id; send one: the id of an answer, or of a workflow."
        )
    for name in ("response_id", "workflow_id", "workflow_type"):
        value = body.get(name)
        if value is not None and not isinstance(value, str):
            raise _invalid(f"{name} is a JSON {type(value).__name__}; send a string.")
    success, score = body.get("success"), body.get("score")
    if not isinstance(success, bool):
        raise _invalid(f"success is {_shown(success)}; send true or false.")
    if names == ["workflow_id"]:
        if score is not None:
            raise _invalid("A score is of one answer: send it with its response_id, or leave it out.")
        step = Step(body.get("workflow_type") or "", scoped(tenant, body["workflow_id"]), "")
        return OutcomeReport(("workflow", step.workflow), success, None)
    if body.get("workflow_type") is not None:
        raise _invalid("workflow_type goes with a workflow_id: leave it out beside a response_id.")
    if score is None:
        score = float(success)
    if isinstance(score, bool) or not isinstance(score, int | float) or not 0 <= score <= 1:
        raise _invalid(f"score is {_shown(score)}; send a number from 0 to 1.")
    return OutcomeReport(("response", body["response_id"]), success, float(score))


def _invalid(message: str) -> Refusal:
    return Refusal(400, message, "invalid_outcome")


def _shown(value: object) -> str:
    """A value of a body, without what may be text."""
    if value is None:
        return "missing"
    return f"{value:.10g}" if isinstance(value, float) else f"a JSON {type(value).__name__}"


@dataclass(slots=True)
class _Known:
    """An answer or a workflow; `recorded` is None where several answers have one id."""

    at_s: float
    recorded: RecordedStep | None
    report: OutcomeReport | None = None


class ReportableOutcomes(Listener[GatewayDecision]):
    """Recorded answers and workflows that may be reported on, the latest of each tenant.

    Args:
        most: answers and workflows together; more push out the oldest of the tenant with the most.
        clock: monotonic seconds.
        switch: of the recorder.
    """

    def __init__(self, recorder: StepRecorder, most: int, clock: Callable[[], float], switch: Switch) -> None:
        self.switch = switch
        self._recorder, self._most, self._clock = recorder, most, clock
        self._known: dict[str, OrderedDict[Subject, _Known]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._known.values()))

    def request_scheduled(self, request: GatewayDecision, step: RunningStep | None, found: Found) -> None:
        """A step begins."""
        if step is not None and step.recorded is not None:
            self.began(step.step, step.recorded)

    def request_finished(self, request: GatewayDecision, step: RunningStep | None, left: LeftStep | None) -> None:
        """A step leaves."""
        if step is not None and step.recorded is not None and request.answer is not None:
            self.answered(step.step, request.answer.response_id, step.recorded)

    def began(self, step: Step, recorded: RecordedStep) -> None:
        """A step of a workflow began."""
        subject: Subject = ("workflow", step.workflow)
        earlier = self._of(tenant_of(step.workflow_id)).get(subject)
        same = earlier is not None and earlier.recorded is not None and earlier.recorded.run is recorded.run
        self._keep(step, subject, recorded, earlier.report if earlier is not None and same else None)

    def answered(self, step: Step, response_id: str | None, recorded: RecordedStep) -> None:
        """A step was answered."""
        if response_id is None or not 0 < len(response_id) <= _LONGEST_ID:
            return
        twice = ("response", response_id) in self._of(tenant_of(step.workflow_id))
        self._keep(step, ("response", response_id), None if twice else recorded, None)

    def report(self, tenant: str, report: OutcomeReport) -> bool:
        """Records a report; returns whether it is new.

        Raises:
            Refusal: nobody knows its subject, another report of it stands, or it cannot be recorded now.
        """
        known = self._of(tenant).get(report.subject)
        if known is None:
            raise Refusal(
                404,
                f"The gateway knows no such {report.subject[0]} of the last {LATE_S / 3600:g} hours; give the id of an "
                "answer as it came from here, or a workflow's id with its workflow_type.",
                "not_found",
            )
        if known.recorded is None:
            raise Refusal(409, "Several answers have this id; report on their workflow instead.", "ambiguous_response")
        if known.report is not None and known.report != report:
            raise Refusal(
                409, "Another outcome was reported before, which stands; report each once.", "contradictory_outcome"
            )
        if known.report is not None:
            return False
        if not self._recorder.outcome(known.recorded, report.success, report.score):
            raise Refusal(503, "The recorder takes nothing now. Retry later.", "overloaded", [(b"retry-after", b"1")])
        known.report = report
        return True

    def expire(self) -> None:
        """Forgets what is too old to be reported on."""
        oldest = self._clock() - LATE_S
        for tenant, known in list(self._known.items()):
            while known and next(iter(known.values())).at_s < oldest:
                known.popitem(last=False)
            if not known:
                del self._known[tenant]

    def _of(self, tenant: str) -> Mapping[Subject, _Known]:
        return self._known.get(tenant, {})

    def _keep(self, step: Step, subject: Subject, recorded: RecordedStep | None, report: OutcomeReport | None) -> None:
        known = self._known.setdefault(tenant_of(step.workflow_id), OrderedDict())
        known[subject] = _Known(self._clock(), recorded, report)
        known.move_to_end(subject)
        if len(self) > self._most:
            max(self._known.values(), key=len).popitem(last=False)
