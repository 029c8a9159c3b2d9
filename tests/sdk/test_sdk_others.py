"""AutoGen, smolagents, LlamaIndex and Strands: what is read of their spans is what they did."""

from __future__ import annotations

import pytest
from sdk_runs import Sdk, check, scenarios

pytestmark = pytest.mark.sdk


@pytest.mark.parametrize(
    ("sdk", "scenario"),
    scenarios(
        (
            Sdk("newest", "autogen", "openinference", "cached"),
            "team handoff retry stream no_usage session two_runs gives_up",
        ),
        # A run that fails leaves no span of its own.
        (
            Sdk("newest", "smolagents", "openinference", "cached", suffix=".run"),
            "managed retry stream session two_runs",
        ),
        (
            Sdk("openai-2", "llama_index", "openinference", "agents failed"),
            "handoff retry stream session two_runs gives_up",
        ),
        (Sdk("openai-2", "strands", "own"), "tools graph swarm retry no_usage session two_runs gives_up"),
    ),
)
def test_other_sdks(sdk: Sdk, scenario: str) -> None:
    check(sdk, scenario)
