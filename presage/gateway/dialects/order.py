"""What clients can send to be served before others, in any dialect."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from presage.gateway.dialects.presage import XARGS
from presage.gateway.dialects.vllm_router import CONTEXT, read_context

ORDER_HEADERS: Final = frozenset(
    {
        "x-vllm-priority",
        "x-dynamo-request-priority",
        "x-dynamo-request-strict-priority",
        "x-llm-d-inference-objective",
        "x-gateway-inference-objective",
        "x-llm-d-slo-ttft-ms",
        "x-slo-ttft-ms",
    }
)
"""Headers to drop where clients may not set priorities."""

_HINTS: Final = frozenset({"priority", "strict_priority", "latency_sensitivity", "deadline", "deadline_seconds"})


def without_client_order(body: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the body without the client's priorities and deadlines."""
    kept = {name: value for name, value in body.items() if name != "priority"}
    extension, xargs = kept.get("nvext"), kept.get(XARGS)
    if isinstance(extension, Mapping) and isinstance(extension.get("agent_hints"), Mapping):
        kept["nvext"] = {**extension, "agent_hints": _less(extension["agent_hints"])}
    if isinstance(xargs, Mapping) and CONTEXT in xargs:
        kept[XARGS] = {**xargs, CONTEXT: json.dumps(_less(read_context(xargs[CONTEXT])))}
    return kept


def _less(hints: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in hints.items() if name not in _HINTS}
