"""llm-d's router: headers, and a body that is left as it is.

The plugin `agent-identity` reads the session, by which `program-aware-fairness` divides capacity. A deadline becomes
the objective for the time to first token, by which `slo-deadline-ordering-policy` orders: the SHORTER first. Priorities
are those of InferenceObjective resources, LARGER first, which a cluster defines by name: a client's
`x-llm-d-inference-objective` is passed on, and we add none.

Read in llm-d-router's pkg/epp/metadata/consts.go and the plugins' documentation; not run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from presage.gateway.annotation import Annotation
from presage.gateway.dialects.names import session
from presage.gateway.dialects.numbers import whole

_DEADLINES = ("x-llm-d-slo-ttft-ms", "x-slo-ttft-ms")


def annotate(
    body: Mapping[str, Any], headers: Mapping[str, str], annotation: Annotation
) -> tuple[dict[str, Any], dict[str, str]]:
    """The body, and headers with session and deadline, unless the client sent its own."""
    added = session(headers, "x-session-affinity", annotation)
    due = None if annotation.deadline_s is None else whole(1e3 * annotation.deadline_s, 1)
    if due is not None and not any(name in headers for name in _DEADLINES):
        added[_DEADLINES[0]] = str(due)
    return dict(body), added
