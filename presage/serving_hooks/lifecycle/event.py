"""The event of a running workflow, as subscribers and receivers get it.

It holds ids, names of types and agents, counts, times and probabilities, never text of a request or an answer. This
module is light, since receivers import it that know nothing else of Presage.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal, get_args

import msgspec

LifecycleKind = Literal["workflow.started", "step.started", "step.finished", "expected", "held", "resumed", "ended"]
LIFECYCLE_KINDS: Final[tuple[LifecycleKind, ...]] = get_args(LifecycleKind)


class LifecycleEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """One event of one workflow. docs/programs.md says when each kind is emitted, and what it holds.

    Attributes:
        id: unique over all processes; the same at each delivery.
        source: the process that serves the workflow, such as `/presage/gateway/5f0c2a9b`.
        at: seconds since 1970.
        workflow_type, agent: as the client named them; "" if it did not, or as they were inferred.
        sequence: number of the event in its workflow, from 0.
        step: number of the latest step, from 0; the client's own number if it sends one.
        tenant: "" without tenants.
        finish_reason: one of a fixed set; None if unknown.
        next_agents: probabilities of the likeliest agents of the next step.
        end: probability that there is no next step.
        return_s: seconds from the end of the step to the next request, by quantile, if there is one.
        at_most_s: seconds for which the workflow is held at most; None without a bound.
        reason: why the workflow ended: finished, expired or aborted.
    """

    id: str
    kind: LifecycleKind
    source: str
    at: float
    workflow_type: str
    workflow_id: str
    sequence: int
    step: int
    agent: str
    tenant: str = ""
    finish_reason: str | None = None
    output_tokens: int | None = None
    next_agents: dict[str, float] | None = None
    end: float | None = None
    return_s: dict[str, float] | None = None
    at_most_s: float | None = None
    reason: str | None = None


Subscriber = Callable[[LifecycleEvent], object]
"""Called with each event by the thread that serves: it must not block. One that raises is called no more."""
