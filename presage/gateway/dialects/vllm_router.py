"""vLLM's router with program scheduling: `vllm_xargs.agentic_context`, a JSON string; the LARGER priority first.

A workflow is one program. The router resumes held programs by priority, and 0 is that of a request without a hint, so
requests without a rank get one too. A deadline admits a held request even above the router's limits.
The names of our own hooks go with it, as the router passes `vllm_xargs` on to the engine.

Read in src/program_scheduling/identity.rs and tried with vllm-router 0.1.17. The router answers 400 to a context that
it cannot read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from presage.gateway.annotation import Annotation
from presage.gateway.dialects.names import body_name, known, workflow_name
from presage.gateway.dialects.numbers import larger_first, whole
from presage.gateway.dialects.presage import XARGS, with_xargs

CONTEXT: Final = "agentic_context"

MOST_BYTES: Final = 16 * 1024
"""Of a context; longer ones are refused."""
_LONGEST_READ: Final = 2**16

_IDS: Final = ("program_id", "task_id", "session_id", "parent_program_id", "parent_id", "root_program_id", "root_id")


def annotate(
    body: Mapping[str, Any], headers: Mapping[str, str], annotation: Annotation
) -> tuple[dict[str, Any], dict[str, str]]:
    """A copy of the body with identity and hints; no headers.

    A context that the client sent keeps its fields; without an id it gets ours.
    """
    client = _sent_context(body)
    ours = _hints(annotation) if any(name in client for name in _IDS) else _program(annotation) | _hints(annotation)
    return with_xargs(body, annotation, **{CONTEXT: _context(ours, client)}), {}


def with_hints(body: Mapping[str, Any], hints: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the body with these hints and no identity; what is no object stays for the server to refuse."""
    sent = body.get(XARGS) or {}
    if not isinstance(sent, Mapping):
        return dict(body)
    return {**body, XARGS: {**sent, CONTEXT: _context(hints, _sent_context(body))}}


def _sent_context(body: Mapping[str, Any]) -> dict[str, Any]:
    sent = body.get(XARGS)
    return read_context(sent.get(CONTEXT)) if isinstance(sent, Mapping) else {}


def _context(ours: Mapping[str, Any], client: Mapping[str, Any]) -> str:
    context = json.dumps({**ours, **client})
    return json.dumps(client) if len(context) > MOST_BYTES and client else context


def _program(annotation: Annotation) -> dict[str, Any]:
    """The workflow as a program that waits for no other one."""
    step = annotation.step
    program = workflow_name(annotation)
    ids = known({"program_id": program, "task_id": program, "agent_role": body_name(step.agent)})
    return {**ids, "blocks_parent": False, "expected_resume": not step.last}


def _hints(annotation: Annotation) -> dict[str, Any]:
    step = annotation.step
    return known(
        {
            "workflow_profile_id": body_name(step.workflow_type),
            "step_id": annotation.number if step.number is None else step.number,
            "priority": larger_first(annotation.rank),
            "deadline_seconds": _seconds(annotation.deadline_s),
            "expected_output_length": whole(annotation.output_tokens[0], 1) if annotation.output_tokens else None,
            "kv_retention_ttl_seconds": _seconds(annotation.time_to_live_s),
        }
    )


def _seconds(value: float | None) -> float | None:
    milliseconds = whole(None if value is None else 1e3 * value, 0)
    return None if milliseconds is None else milliseconds / 1e3


def read_context(context: Any) -> dict[str, Any]:
    """A client's context, a JSON string or an object; {} if it is neither, or longer than any server reads."""
    if isinstance(context, str):
        if len(context) > _LONGEST_READ:
            return {}
        try:
            context = json.loads(context)
        except (ValueError, RecursionError):
            return {}
    return dict(context) if isinstance(context, Mapping) else {}
