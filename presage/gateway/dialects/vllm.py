"""Plain vLLM: `priority`, the lower first.

It acts only with `--scheduling-policy priority`; otherwise vLLM 0.32 ignores it, though its documentation announces an
error. vLLM does not age waiting requests, so long workflows can starve under load. A client's header `X-Vllm-Priority`
precedes the body.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from presage.gateway.annotation import Annotation
from presage.gateway.dialects.names import known
from presage.gateway.dialects.numbers import lower_first


def annotate(
    body: Mapping[str, Any], headers: Mapping[str, str], annotation: Annotation
) -> tuple[dict[str, Any], dict[str, str]]:
    """A copy of the body with the priority, unless the client set one; no headers."""
    return {**known({"priority": lower_first(annotation.rank)}), **body}, {}
