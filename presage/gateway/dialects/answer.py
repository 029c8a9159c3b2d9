"""Forecast and decision of a request in one header of its answer, for clients that ask for them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import isfinite
from typing import Any, Final

from presage.gateway.annotation import Annotation
from presage.gateway.dialects.names import known
from presage.gateway.dialects.sys_annotations import forecasts
from presage.serving_hooks.workflows.identity import unscoped

HEADER: Final = "x-presage-forecast"
"""With the value 1 in a request it asks for the header of this name in the answer."""

MOST_BYTES: Final = 2048


def answer_headers(
    annotation: Annotation, decision: Mapping[str, str | float | bool | None] | None = None
) -> dict[str, str]:
    """Compact ASCII JSON of at most MOST_BYTES in one header.

    Names are those that the client sent, without tenant. What does not fit is left out: first the unlikelier next
    agents, then names and decision.

    Args:
        decision: what the gateway did with the request, such as its model, upstream and reason.
    """
    step = annotation.step
    chosen = {
        name: value for name, value in (decision or {}).items() if not isinstance(value, float) or isfinite(value)
    }
    names = {"workflow_type": step.workflow_type, "workflow_id": unscoped(step.workflow_id), "agent": step.agent}
    facts = {"step": annotation.number, **forecasts(annotation), "source": annotation.source}
    facts["evidence"] = annotation.evidence
    likely = facts.pop("predicted_next_agents", {})
    for agents in range(len(likely), -1, -1):
        some = {"predicted_next_agents": dict(list(likely.items())[:agents])} if agents else {}
        text = _compact({**known(names), **facts, **some, **known(chosen)})
        if len(text) <= MOST_BYTES:
            return {HEADER: text}
    return {HEADER: _compact(facts)}


def _compact(value: Mapping[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"))
