"""pydantic-ai's own instrumentation, of its first format and of today: what is read of its spans is what it did."""

from __future__ import annotations

import pytest
from sdk_runs import Sdk, check, scenarios

pytestmark = pytest.mark.sdk
ALL = (
    "delegate_chat delegate_responses handoff retry tool_retry structured stream_chat stream_responses no_usage "
    "session two_runs fails gives_up"
)


@pytest.mark.parametrize(
    ("sdk", "scenario"),
    scenarios(
        *((Sdk("newest", "pydantic_ai", kind), ALL) for kind in ("otel", "otel-2", "logfire")),
        # Its HTTP client outlives the loop of the scenario before, so one of two streams in a process breaks.
        (Sdk("pydantic-ai-0.1", "pydantic_ai", "otel"), ALL.replace("stream_chat ", "")),
    ),
)
def test_pydantic_ai(sdk: Sdk, scenario: str) -> None:
    check(sdk, scenario)
