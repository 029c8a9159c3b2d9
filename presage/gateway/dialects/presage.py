"""vLLM with our hooks: identity in `vllm_xargs` (`workflows/metadata.py` reads it).

No `priority`: there it is a class, within which the engine orders by forecasts of its own, which are fresher and age.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from presage.gateway.annotation import Annotation
from presage.gateway.dialects.names import body_name, known, workflow_name

XARGS: Final = "vllm_xargs"


def annotate(
    body: Mapping[str, Any], headers: Mapping[str, str], annotation: Annotation
) -> tuple[dict[str, Any], dict[str, str]]:
    """A copy of the body with the step's identity, which replaces the client's; no headers."""
    return with_xargs(body, annotation), {}


def with_xargs(body: Mapping[str, Any], annotation: Annotation, **more: str) -> dict[str, Any]:
    """A copy of the body with the step in `vllm_xargs`, and `more`; the client's other arguments stay.

    Something other than an object is left for the server to refuse.
    """
    sent = body.get(XARGS)
    if sent is not None and not isinstance(sent, Mapping):
        return dict(body)
    step = annotation.step
    ours = {
        "workflow_type": body_name(step.workflow_type),
        "workflow_id": workflow_name(annotation),
        "agent": body_name(step.agent),
        "step": annotation.number if step.number is None else step.number,
        "workflow_end": "true" if step.last else None,
    }
    return {**body, XARGS: {**(sent or {}), **known(ours), **more}}
