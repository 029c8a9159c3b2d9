"""Workflows as rows, for tests of admission, which reads them in columns."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from presage.serving_hooks.policies.admission import Admission, Decision, Phase, WorkflowColumns
from presage.serving_hooks.policies.throughput import Rates


@dataclass(frozen=True)
class Workflow:
    """A row; a pause of None is unknown, a bound of None the default."""

    id: str
    phase: Phase
    since: float
    footprint_tokens: float
    remaining_tokens: float = math.inf
    pause_s: float | None = None
    bound_s: float | None = None


def rows(crowd: WorkflowColumns) -> Iterator[Workflow]:
    """The workflows in the order of their arrival."""
    numbers = crowd.rows()
    for row, name in zip(numbers, crowd.names(numbers), strict=True):
        phase, since, footprint, remaining, *optional = crowd.facts[row].item()
        pause, bound = (None if math.isnan(value) else value for value in optional)
        yield Workflow(name, Phase(phase), since, footprint, remaining, pause, bound)


def decide(
    admission: Admission, workflows: Iterable[Workflow], rates: Rates | None, now: float, bound_s: float = math.inf
) -> Decision:
    """A decision about these workflows and no others."""
    crowd, here = admission.crowd, list(workflows)
    for name in set(crowd.names(crowd.rows())) - {one.id for one in here}:
        admission.crowd.drop(name)
    for one in here:
        row = crowd.place(one.id)
        optional = (math.nan if value is None else value for value in (one.pause_s, one.bound_s))
        crowd.facts[row] = one.phase, one.since, one.footprint_tokens, one.remaining_tokens, *optional
    return admission.decide(rates, now, bound_s)


def waited_s(admission: Admission, workflow: Workflow, now: float) -> float:
    """Seconds for which a workflow was held although ready, over its life."""
    crowd = admission.crowd
    if workflow.id not in crowd.names(crowd.rows()):
        return 0.0
    total, since, _ = crowd.waits[crowd.place(workflow.id)].item()
    held = not math.isnan(since) and workflow.phase is Phase.READY
    return float(total + now - max(since, workflow.since) if held else total)
