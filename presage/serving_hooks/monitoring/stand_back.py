"""A predictor, or a profile, stands back for a workflow type while online counts forecast it better.

Both forecast the next agent of the same steps, so the comparison is paired. Steps of one workflow depend on each other:
the lead of the counts is a sum of one difference per workflow, and its spread is that of these differences. The
predictor stands back once the counts lead by more than two standard deviations over the latest `STEPS` steps; it comes
back when they no longer lead. Meanwhile it still forecasts, unused, and another version begins anew.

The same comparison ends the stand-back of a drift alarm: a predictor that has lost accuracy, but still leads the counts
after the alarm, is used.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from math import sqrt
from typing import Any, Final

from presage.serving_hooks.monitoring.outcomes import AgainstCounts

STEPS: Final = 1000
"""Latest steps of a workflow type that are compared; whole workflows, `WORKFLOWS` or more."""
WORKFLOWS: Final = 10
STEPS_AHEAD: Final = 200
"""Steps after an alarm from which a predictor may be found ahead of the counts."""
TYPES: Final = 64
"""Workflow types compared; the least recently seen one is dropped."""
_DEVIATIONS: Final = 2.0


class StandBack:
    """The comparison of one version with online counts, by workflow type.

    Args:
        called: what the log calls it.

    Attributes:
        types: those for which the predictor stands back.
    """

    def __init__(self, called: str = "the predictor") -> None:
        self._called = called
        self.types: set[str] = set()
        self._windows: OrderedDict[str, _Window] = OrderedDict()

    def __contains__(self, workflow_type: str) -> bool:
        return workflow_type in self.types

    def followed(self, name: str, compared: AgainstCounts) -> str | None:
        """Counts a workflow of type `name` that has ended; returns a log message if it stands back or comes back."""
        if not compared.judged:
            return None
        window = self._windows.setdefault(name, _Window())
        self._windows.move_to_end(name)
        if len(self._windows) > TYPES:
            self.types.discard(self._windows.popitem(last=False)[0])
        window.add(compared)
        if name in self.types:
            if window.lead > 0:
                return None
            self.types.remove(name)
            return f"{self._called} forecasts workflow type {name!r} again: {window.text}"
        if not window.leads(STEPS, 1):
            return None
        self.types.add(name)
        return f"{self._called} stands back for workflow type {name!r} until it is as accurate as counts: {window.text}"

    def restart(self, workflow_type: str) -> None:
        """The workflow type has changed: compares from here on."""
        self._windows.pop(workflow_type, None)
        self.types.discard(workflow_type)

    def is_ahead(self, workflow_type: str) -> bool:
        """Whether the predictor leads the counts by more than chance explains."""
        window = self._windows.get(workflow_type)
        return window is not None and window.leads(STEPS_AHEAD, -1)

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """By workflow type, as JSON values: `steps`, accuracy of `model` and `counts` there, `stands_back`."""
        return {
            name: {
                "steps": window.sums.judged,
                "model": window.sums.model / window.sums.judged,
                "counts": window.sums.counts / window.sums.judged,
                "stands_back": name in self.types,
            }
            for name, window in self._windows.items()
        }


class _Window:
    """The latest workflows of one type."""

    def __init__(self) -> None:
        self._workflows: deque[AgainstCounts] = deque()
        self._squares = 0
        self.sums = AgainstCounts()

    def add(self, workflow: AgainstCounts) -> None:
        """Adds a workflow, and drops the oldest ones beyond `STEPS` and `WORKFLOWS`."""
        self._workflows.append(workflow)
        self._sum(workflow, 1)
        while len(self._workflows) > WORKFLOWS and self.sums.judged - self._workflows[0].judged >= STEPS:
            self._sum(self._workflows.popleft(), -1)

    def _sum(self, workflow: AgainstCounts, times: int) -> None:
        self.sums.judged += times * workflow.judged
        self.sums.model += times * workflow.model
        self.sums.counts += times * workflow.counts
        self._squares += times * (workflow.counts - workflow.model) ** 2

    @property
    def lead(self) -> int:
        """Steps by which the counts were right more often."""
        return self.sums.counts - self.sums.model

    def leads(self, steps: int, sign: int) -> bool:
        """Whether counts (`sign` 1) or the predictor (-1) lead by more than chance explains, over `steps` or more."""
        workflows, lead = len(self._workflows), sign * self.lead
        if workflows < WORKFLOWS or self.sums.judged < steps or lead <= 0:
            return False
        around_mean = max(0.0, self._squares - lead**2 / workflows)
        return lead > _DEVIATIONS * sqrt(workflows * around_mean / (workflows - 1))

    @property
    def text(self) -> str:
        """As part of a log message."""
        sums = self.sums
        return (
            f"of its latest {sums.judged} steps it forecast {sums.model / sums.judged:.3f} rightly, "
            f"online counts {sums.counts / sums.judged:.3f}"
        )
