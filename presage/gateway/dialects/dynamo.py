"""NVIDIA Dynamo: `nvext.agent_hints`, where the LARGER priority matters more, and a session header.

The router takes `priority` as seconds by which a request moves ahead of its arrival, and no negative ones; Dynamo
itself turns it round for vLLM. `osl` is the expected output. The session pins requests to a worker only if Dynamo is
configured so.

Read in Dynamo's docs/agents (agent-hints, priority-scheduling, session-ids); not run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from presage.gateway.annotation import Annotation
from presage.gateway.dialects.names import known, session
from presage.gateway.dialects.numbers import seconds_earlier, whole


def annotate(
    body: Mapping[str, Any], headers: Mapping[str, str], annotation: Annotation
) -> tuple[dict[str, Any], dict[str, str]]:
    """A copy of the body with priority and expected output, unless the client set them, and a session header."""
    added = session(headers, "x-dynamo-session-id", annotation)
    extension = body.get("nvext") or {}
    sent = extension.get("agent_hints") or {} if isinstance(extension, Mapping) else None
    if not isinstance(sent, Mapping):  # Dynamo refuses it
        return dict(body), added
    output = whole(annotation.output_tokens[0], 1) if annotation.output_tokens else None
    hints = {**known({"priority": seconds_earlier(annotation.rank), "osl": output}), **sent}
    return {**body, **({"nvext": {**extension, "agent_hints": hints}} if hints else {})}, added
