"""How long policies may delay a request: service objectives by tenant and workflow type, and a measured default.

Admission and shortest job first complete workflows sooner in the mean by letting some requests wait. Both may delay a
request until its bound only, counted from its arrival: then it is no longer held, and is next in line. A deadline is of
a whole workflow: admission lets those go first that would miss theirs.

The default is `factor` times the mean time to first token of the latest requests. By Little's law that mean is the
requests that wait, divided by the first tokens a second, whatever their order; and admission holds only where it
expects more steps a second. So it is about what vLLM alone would cost, or less. Ours; no paper has it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from presage.serving_hooks.policies.workload import RunningMean
from presage.serving_hooks.workflows.identity import Step, tenant_of

ENOUGH_REQUESTS: Final = 32
"""Least number of measured requests for the default; before, nothing is bounded, and admission holds nothing."""

_LATEST: Final = 200

_IN_TIME: Final = 2.0
"""Times what a workflow is expected to take, from which its deadline presses: half of all take longer than expected."""

_Seconds = TypeVar("_Seconds", float, NDArray[np.float64])


def presses(left_s: _Seconds, needs_s: _Seconds) -> Any:
    """Whether workflows that wait would miss their deadline if they waited on; one that has missed it does not press.

    Args:
        left_s: seconds until the deadline, infinity without one.
        needs_s: seconds that the workflow is expected to take if it does not wait, 0 if unknown.
    """
    return (left_s > 0) & (left_s < _IN_TIME * needs_s)


@dataclass(frozen=True)
class Objective:
    """What is wanted for some requests; None is the default.

    Attributes:
        max_hold_s: seconds for which a request may be delayed.
        first_token_s: seconds from arrival to the first token; the bound is earlier by the mean time of a prefill.
        deadline_s: seconds from the arrival of a workflow's first request until the workflow has to have ended.
    """

    max_hold_s: float | None = None
    first_token_s: float | None = None
    deadline_s: float | None = None


@dataclass(frozen=True)
class Objectives:
    """The objectives of an engine. A workflow type's precede its tenant's, those of a tenant precede `default`.

    Attributes:
        factor: the default bound, in mean times to first token.
    """

    default: Objective = Objective()
    tenants: Mapping[str, Objective] = field(default_factory=dict)
    workflow_types: Mapping[str, Objective] = field(default_factory=dict)
    factor: float = 2.5

    def of(self, step: Step | None) -> Objective:
        """That of a request; `step` is None without a workflow."""
        objective = None
        if step is not None:
            objective = self.workflow_types.get(step.workflow_type) or self.tenants.get(tenant_of(step.workflow_id))
        return objective or self.default


class WaitBounds:
    """The bounds, and what they are measured from."""

    def __init__(self, objectives: Objectives) -> None:
        self._objectives = objectives
        self._first_token_s, self._prefill_s = RunningMean(_LATEST), RunningMean(_LATEST)

    def observe(self, waited_s: float, prefill_s: float) -> None:
        """A request was selected so long after its arrival, and its prompt was computed so much later."""
        self._first_token_s.observe(waited_s + prefill_s)
        self._prefill_s.observe(prefill_s)

    @property
    def default_s(self) -> float:
        """Of requests without an objective; infinity until enough is measured."""
        mean = self._first_token_s
        return self._objectives.factor * mean.mean if mean.count >= ENOUGH_REQUESTS else math.inf

    def deadline_s(self, step: Step) -> float:
        """Seconds that a workflow has which arrives with this step; infinity without a deadline."""
        wanted = self._objectives.of(step).deadline_s
        return math.inf if wanted is None else wanted

    def of(self, step: Step | None) -> float | None:
        """By its objective, seconds from arrival for which policies may delay a request; None for the default."""
        wanted = self._objectives.of(step)
        bounds = []
        if wanted.max_hold_s is not None:
            bounds.append(wanted.max_hold_s)
        if wanted.first_token_s is not None:
            bounds.append(max(0.0, wanted.first_token_s - self._prefill_s.mean))
        return min(bounds) if bounds else None
