"""Pythia's annotations (listing 1): `app_metadata` and `sys_annotations` in the body, for servers that read them.

Of the listing's predictions we have `predicted_output_len`, here our p50 and p99; path expression and prompt templates
are those of a workflow profile, and a request carries its next agents instead. A server that refuses unknown fields
refuses these.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from presage.gateway.annotation import Annotation
from presage.gateway.dialects.names import body_name, known, workflow_name
from presage.gateway.dialects.numbers import rounded


def annotate(
    body: Mapping[str, Any], headers: Mapping[str, str], annotation: Annotation
) -> tuple[dict[str, Any], dict[str, str]]:
    """A copy of the body with both objects; ids replace the client's, its annotations stay; no headers."""
    step = annotation.step
    ids = known(
        {
            "workflow_type_id": body_name(step.workflow_type),
            "workflow_id": workflow_name(annotation),
            "agent_id": body_name(step.agent),
        }
    )
    sent = {name: body.get(name) or {} for name in ("app_metadata", "sys_annotations")}
    if not all(isinstance(value, Mapping) for value in sent.values()):
        return dict(body), {}
    return {
        **body,
        "app_metadata": {**sent["app_metadata"], **ids},
        "sys_annotations": {**forecasts(annotation), **sent["sys_annotations"]},
    }, {}


def forecasts(annotation: Annotation) -> dict[str, Any]:
    """The forecasts of an annotation that are known; tokens in whole numbers, times in seconds."""
    return known(
        {
            "predicted_output_len": _each(annotation.output_tokens, 0),
            "predicted_remaining_len": _each(annotation.remaining_tokens, 0),
            "predicted_next_agents": {agent: rounded(p, 4) for agent, p in annotation.next_agents} or None,
            "predicted_end": rounded(annotation.end, 4),
            "predicted_return_s": _each(annotation.return_s, 3),
            "time_to_live_s": rounded(annotation.time_to_live_s, 3),
            "deadline_s": rounded(annotation.deadline_s, 3),
        }
    )


def _each(quantiles: tuple[float, float] | None, digits: int) -> list[float | None] | None:
    numbers = [rounded(value, digits) for value in quantiles or ()]
    return numbers if numbers and None not in numbers else None
