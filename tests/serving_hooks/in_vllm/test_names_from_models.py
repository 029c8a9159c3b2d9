"""An engine tells its HTTP server what its models call agents."""

from pathlib import Path
from typing import Any

import pytest
from text_samples import text_lengths, text_predictor
from tiny_model import Tiny
from told import left_behind, send, told
from vllm_samples import Engine, build

from presage.datasets.read import read_traces
from presage.features.agent_names import AgentNames
from presage.predictors.next_agent.predictor import NextAgentPredictor
from presage.serving_hooks.forecasting.forecaster import Forecaster, VersionedForecaster
from presage.serving_hooks.forecasting.forecasts import RECOGNISED, Forecasts
from presage.serving_hooks.vllm.scheduler import SyncWorkflowScheduler
from presage.serving_hooks.workflows.observed import OBSERVED

pytestmark = [pytest.mark.vllm, pytest.mark.one_version]


def test_names_are_told_once_and_go_with_the_model(tmp_path: Path) -> None:
    source = VersionedForecaster(Forecaster(text_predictor(), lengths=text_lengths()))
    kind = type("Naming", (SyncWorkflowScheduler,), {"forecasts": lambda self, config: Forecasts(source, source)})
    scheduler: Any = build(tmp_path / "m", kind, blocks=64)
    first = scheduler.agent_names("")
    names = AgentNames.from_json(first["names"].encode(), tmp_path / "told")
    assert names.digest == first["digest"]
    assert len(names) == len(text_lengths().vocabulary.agents)
    assert scheduler.agent_names(first["digest"]) == {"digest": first["digest"]}
    source.take_over(Forecaster(text_predictor()))
    assert scheduler.agent_names(first["digest"]) == {}
    scheduler.shutdown()


def test_a_renamed_agent_is_forecast_as_the_one_with_its_system_prompt_and_recorded_as_sent(
    tiny: Tiny, tmp_path: Path
) -> None:
    presage = {"recorder": {"folder": str(tmp_path / "r")}}
    forecaster = Forecaster(NextAgentPredictor.load(tiny.folder))
    engine = Engine(build(tmp_path / "m", told(forecaster), blocks=400, presage=presage))
    scheduler: Any = engine.scheduler

    def served(workflow: str, workflow_type: str = "retry", **observed: Any) -> dict[str, Any]:
        """What is explained of a workflow whose coder is called `author`."""
        for step, agent in enumerate(("planner", "author", "tester")):
            extra = {OBSERVED: observed} if agent == "author" else {}
            send(engine, workflow, step, workflow_type=workflow_type, agent=agent, **extra)
            engine.run()
            assert scheduler.step_answered(workflow_type, workflow, agent, step, "stop", [], 0)
        explained: dict[str, Any] = scheduler.explain(workflow_type, workflow)
        assert scheduler.workflow_ended(workflow_type, workflow)
        return explained

    def of(explained: dict[str, Any]) -> list[Any]:
        return [made["agent"] for made in explained["forecasts"] if made["sent_agent"] == "author"]

    assert of(served("a")) == ["author"] * 2
    counts = scheduler.presage_status()["counts"]
    assert RECOGNISED not in counts
    known = served("b", known_as=["retry", "coder"])
    assert of(known) == ["coder"] * 2
    assert {made["source"] for made in known["forecasts"]} == {"champion"}
    assert of(served("c", "retry v2", known_as=["retry", "coder"])) == ["coder"] * 2
    assert of(served("d", known_as=["other", "coder"])) == ["author"] * 2, "another application's prompt"
    assert of(served("e", known_as=["retry", "nobody"])) == ["author"] * 2
    assert scheduler.presage_status()["counts"][RECOGNISED] == 2
    engine.drain()
    scheduler.shutdown()
    assert not any(left_behind(scheduler).values())
    rows = read_traces([tmp_path / "r"]).table.to_pylist()
    assert {row["agent"] for row in rows} == {"planner", "author", "tester"}
