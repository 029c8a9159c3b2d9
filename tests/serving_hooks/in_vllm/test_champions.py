"""A champion of the registry is asked by vLLM's own scheduler, without a word in the settings."""

from pathlib import Path

import pytest
from registry_database import new_database
from tiny_model import Tiny
from vllm_samples import Engine, ask, build

from presage.registry.connect import open_registry
from presage.registry.package import register
from presage.serving_hooks.vllm.scheduler import SyncWorkflowScheduler

pytestmark = [pytest.mark.vllm, pytest.mark.one_version, pytest.mark.slow, pytest.mark.usefixtures("patient")]


def test_forecasts_of_a_champion_reach_the_scheduler(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = new_database(tmp_path / "mlflow.db")
    registry = open_registry(uri)
    row = {"workflow_type": "retry", "workflow_id": "w", "step": 0, "agent": "planner"}
    register(registry, tiny.folder, name="next-agent", metrics={}, params={}, tags={}, input_example=[row])
    registry.client.set_registered_model_alias("next-agent", "champion", "1")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    scheduler = build(tmp_path / "model", SyncWorkflowScheduler, blocks=64)
    engine = Engine(scheduler)
    for number, agent in enumerate(("planner", "coder", "tester")):
        prompt = list(range(40 + 20 * number))
        scheduler.add_request(
            ask(f"r{number}", prompt, 4, workflow_type="retry", workflow_id="w", agent=agent, step=number)
        )
        engine.run()
    told = scheduler.presage_status()
    assert told["counts"]["forecast: champion"] == 6  # at the beginning and at the end of each step
    assert told["models"]["next-agent"] == "models:/next-agent@champion, version 1"
    assert all(told["on"].values())
    assert engine.ended == ["r0", "r1", "r2"]
