"""A run of an application whose framework is unchanged is one workflow, of one type, and its fan-out is seen."""

import pytest
from framework_apps import APPLICATIONS, FAN_OUT
from frameworks import HERE, seen_of

pytestmark = pytest.mark.sdk


@pytest.mark.parametrize(
    "name",
    ["langgraph-incident", "langgraph-subgraphs", "autogen-selected", "smolagents", "strands-graph", "claude-code"],
)
def test_one_run_is_one_workflow(name: str) -> None:
    environment, _ = APPLICATIONS[name]
    python = HERE.parent / ".venv-sdk" / environment / "bin" / "python"
    if not python.exists():
        pytest.skip(f"no environment .venv-sdk/{environment}: make sdk")
    seen = seen_of(name, str(python), runs=6, at_once=3, seed=0)
    figures = seen.figures()
    assert figures["precision"] == 1
    assert figures["workflows per run"] <= 1.1
    assert figures["types"] == 1
    assert seen.fan_out == pytest.approx(FAN_OUT.get(name, 0.0), abs=0.1) or name == "langgraph-incident"
