"""How the servers behind the gateway take annotations: one file a server, and all of one form.

A dialect gets the body, the headers (names in lower case) and the annotation of a request. It returns a shallow copy of
the body, with what its server understands added, and headers that replace those of the same name. It changes neither
its arguments nor anything by which the answer is sampled. Names of workflows are the gateway's, with the tenant made
safe; a hint that the client set stays, unless the gateway takes it away first (`without_client_order`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from presage.serving_hooks.gateway.annotation import Annotation
from presage.serving_hooks.gateway.dialects import dynamo, llm_d, presage, sys_annotations, vllm, vllm_router
from presage.serving_hooks.gateway.dialects.answer import answer_headers
from presage.serving_hooks.gateway.dialects.names import body_name, tenant_headers
from presage.serving_hooks.gateway.dialects.order import ORDER_HEADERS, without_client_order
from presage.serving_hooks.workflows.identity import scoped, tenant_of

Dialect = Callable[[Mapping[str, Any], Mapping[str, str], Annotation], tuple[dict[str, Any], dict[str, str]]]

__all__ = ["DIALECTS", "ORDER_HEADERS", "Dialect", "answer_headers", "without_client_order"]


def _isolated(annotate: Dialect) -> Dialect:
    """The dialect, in which sessions that the client names carry its tenant."""

    def annotated(
        body: Mapping[str, Any], headers: Mapping[str, str], annotation: Annotation
    ) -> tuple[dict[str, Any], dict[str, str]]:
        changed, added = annotate(body, headers, annotation)
        tenant, session = tenant_of(annotation.step.workflow_id), body.get("session_id")
        if tenant and isinstance(session, str):
            changed["session_id"] = body_name(scoped(tenant, session))
        return changed, {**tenant_headers(headers, tenant), **added}

    return annotated


DIALECTS: Final[Mapping[str, Dialect]] = {
    "vllm": _isolated(vllm.annotate),
    "presage": _isolated(presage.annotate),
    "vllm-router": _isolated(vllm_router.annotate),
    "llm-d": _isolated(llm_d.annotate),
    "dynamo": _isolated(dynamo.annotate),
    "sys_annotations": _isolated(sys_annotations.annotate),
}
