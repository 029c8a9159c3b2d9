"""How the servers behind the gateway take annotations: one file a server, and all of one form.

A dialect gets the body, the headers (names in lower case) and the annotation of a request. It returns a shallow copy of
the body, with what its server understands added, and headers that replace those of the same name. It changes neither
its arguments nor anything by which the answer is sampled. Names of workflows are the gateway's. In every mode, and
before a dialect, ids that the client sent get its tenant (`isolated`) and its hints go (`without_client_order`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from presage.gateway.annotation import Annotation
from presage.gateway.dialects import dynamo, llm_d, presage, sys_annotations, vllm, vllm_router
from presage.gateway.dialects.answer import answer_headers
from presage.gateway.dialects.isolation import isolated
from presage.gateway.dialects.numbers import larger_first, lower_first
from presage.gateway.dialects.order import ORDER_HEADERS, without_client_order

Dialect = Callable[[Mapping[str, Any], Mapping[str, str], Annotation], tuple[dict[str, Any], dict[str, str]]]

__all__ = [
    "DIALECTS",
    "ORDER_HEADERS",
    "Dialect",
    "answer_headers",
    "for_messages",
    "isolated",
    "with_rank",
    "without_client_order",
]


DIALECTS: Final[Mapping[str, Dialect]] = {
    "vllm": vllm.annotate,
    "presage": presage.annotate,
    "vllm-router": vllm_router.annotate,
    "llm-d": llm_d.annotate,
    "dynamo": dynamo.annotate,
    "sys_annotations": sys_annotations.annotate,
}


def with_rank(body: Mapping[str, Any], dialect: str, rank: float) -> Mapping[str, Any]:
    """A request without an annotation in the place of this rank, where it would be first without one."""
    if dialect == "vllm":
        return {"priority": lower_first(rank), **body}
    if dialect == "vllm-router":
        return vllm_router.with_hints(body, {"priority": larger_first(rank)})
    return body  # Dynamo's 0 is last, and the others have no priority of the gateway's


def for_messages(body: Mapping[str, Any], headers: Mapping[str, str]) -> tuple[Mapping[str, Any], Mapping[str, str]]:
    """What a dialect adds, as vLLM reads it at Anthropic's route: the priority in a header."""
    if "priority" not in body:
        return body, headers
    kept = {name: value for name, value in body.items() if name != "priority"}
    return kept, {"x-vllm-priority": str(body["priority"]), **headers}
