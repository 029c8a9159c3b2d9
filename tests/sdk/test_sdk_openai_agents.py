"""The OpenAI Agents SDK with three instrumentations: what is read of its spans is what it did."""

from __future__ import annotations

import pytest
from sdk_runs import Sdk, check, scenarios

pytestmark = pytest.mark.sdk
COMMON = "handoff_responses retry_responses retry_chat stream_responses stream_chat no_usage two_runs fails gives_up"


@pytest.mark.parametrize(
    ("sdk", "scenario"),
    scenarios(
        (Sdk("newest", "agents_sdk", "openinference", "failed"), f"{COMMON} agent_as_tool session"),
        (Sdk("newest", "agents_sdk", "openinference", "cached"), "handoff_chat"),
        # Agents called as tools are beside their tools, and nothing tells the session (the SDK's group_id).
        (Sdk("newest", "agents_sdk", "openllmetry", "failed"), f"{COMMON} handoff_chat"),
        # group_id stands under its bare name, which is not read.
        (Sdk("newest", "agents_sdk", "logfire"), f"{COMMON} agent_as_tool"),
        (Sdk("newest", "agents_sdk", "logfire", "cached"), "handoff_chat"),
    ),
)
def test_openai_agents(sdk: Sdk, scenario: str) -> None:
    check(sdk, scenario)
