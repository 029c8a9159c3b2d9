"""LangGraph with four instrumentations: what is read of its spans is what it did."""

from __future__ import annotations

import pytest
from sdk_runs import Sdk, check, scenarios

pytestmark = pytest.mark.sdk
ALL = "agents_and_tools fan_out retry stream responses session two_runs fails"
KINDS = ("openinference", "openllmetry", "langsmith", "langfuse")


@pytest.mark.parametrize(("sdk", "scenario"), scenarios(*((Sdk("newest", "langgraph", kind), ALL) for kind in KINDS)))
def test_langgraph(sdk: Sdk, scenario: str) -> None:
    check(sdk, scenario)
