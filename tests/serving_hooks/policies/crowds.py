"""Workflows as rows, for tests of admission, which reads them in columns."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from presage.serving_hooks.policies.admission import Admission, Decision, Phase, WorkflowColumns
from presage.serving_hooks.policies.steady_state import Rates


@dataclass(frozen=True)
class Workflow:
    """A row."""

    id: str
    phase: Phase
    since: float = 0.0
    begun: bool = False
    context_tokens: float = 20_000.0
    own_tokens: float | None = None
    bound_s: float = math.inf
    deadline_at: float = math.inf
    needs_s: float = 0.0
    group: str = ""
    silent: float = 0.0


def rows(crowd: WorkflowColumns) -> Iterator[Workflow]:
    """The workflows in the order of their arrival."""
    numbers = crowd.rows()
    for row, name in zip(numbers, crowd.at(numbers), strict=True):
        phase, since, begun, own, context, bound, deadline_at, needs_s, silent = crowd.facts[row].item()
        group = crowd.groups[int(crowd.waits["group"][row])]
        yield Workflow(name, Phase(phase), since, begun, context, own, bound, deadline_at, needs_s, group, silent)


def decide(
    admission: Admission,
    workflows: Iterable[Workflow],
    rates: Rates | None,
    now: float,
    shared_tokens: float = 0.0,
    recomputing_share: float = 0.2,
    known: bool = False,
) -> Decision:
    """A decision about these workflows and no others, after a new choice where one is due."""
    crowd, here = admission.workflows, list(workflows)
    for name in set(crowd) - {one.id for one in here}:
        admission.workflows.drop(name)
    for one in here:
        row = crowd.place(one.id, one.group)
        own = one.context_tokens if one.own_tokens is None else one.own_tokens
        crowd.facts[row] = (
            *(one.phase, one.since, one.begun, own, one.context_tokens, one.bound_s),
            *(one.deadline_at, one.needs_s, one.silent),
        )
    if admission.is_due(now):
        admission.choose(rates, recomputing_share, shared_tokens, now, known)
    return admission.decide(now)


def waited_s(admission: Admission, workflow: Workflow, now: float) -> float:
    """Seconds for which a workflow was held although ready, over its life."""
    crowd = admission.workflows
    if workflow.id not in crowd:
        return 0.0
    total, since, *_ = crowd.waits[crowd.place(workflow.id)].item()
    held = not math.isnan(since) and workflow.phase is Phase.READY
    return float(total + now - max(since, workflow.since) if held else total)
