"""What an engine is told by the registry's champions: one forecast a step, asked for by two policies."""

import json
import logging
import shutil
from pathlib import Path

import numpy as np
import pytest
from by_name import Forecaster, VersionedForecaster
from registry_database import new_database
from serving_samples import lengths_of
from tiny_model import Tiny

from presage.datasets.synthetic.workflows import generate
from presage.features.moment import COMPLETION, PREFILL
from presage.predictors.next_agent.boosting import BoostingConfig
from presage.predictors.next_agent.network_weights import NetworkConfig
from presage.predictors.next_agent.parts import NextAgentConfig
from presage.registry.connect import open_registry
from presage.registry.gates import Gate, Verdict
from presage.registry.package import register
from presage.registry.promote import promote
from presage.serving_hooks.forecasting.champions import load_forecasts, resolve_registry_uri
from presage.serving_hooks.forecasting.forecasts import ReadsStates
from presage.serving_hooks.metrics import missing_inputs
from presage.serving_hooks.monitoring.causes import CHANGED
from presage.serving_hooks.monitoring.causes import missing_inputs as missing_causes
from presage.serving_hooks.monitoring.drift import Alarm, Drift
from presage.serving_hooks.monitoring.promoted import Promoted, Transitions
from presage.serving_hooks.status import EngineStatus, ModelStatus, read_status
from presage.serving_hooks.vllm.config import PresageConfig
from presage.serving_hooks.workflows.identity import Step
from presage.training.next_agent.train import fit_predictor

ROW = {"workflow_type": "retry", "workflow_id": "w", "step": 0, "agent": "planner"}


def step(agent: str, number: int | None, workflow_id: str = "w") -> Step:
    return Step("retry", workflow_id, agent, number, False)


@pytest.fixture(scope="module")
def lengths(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lengths") / "model"
    lengths_of(tiny.store).save(folder)
    return folder


@pytest.mark.slow
def test_champions_of_the_registry_answer_both_policies(
    tiny: Tiny, lengths: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = new_database(tmp_path / "mlflow.db")
    registry = open_registry(uri)
    for name, folder in (("next-agent", tiny.folder), ("remaining-length", lengths)):
        register(registry, folder, name=name, metrics={}, params={}, tags={}, input_example=[ROW])
        registry.client.set_registered_model_alias(name, "champion", "1")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    made = load_forecasts(PresageConfig())
    assert {kind: made.models[kind] for kind in ("next-agent", "remaining-length")} == {
        kind: ModelStatus(f"models:/{kind}@champion", 1) for kind in ("next-agent", "remaining-length")
    }
    assert "no model 'return-time'" in str(made.models["return-time"])
    assert made.next_agents is made.remaining is not None
    asked = VersionedForecaster(made.next_agents)
    left = asked.remaining_tokens(step("planner", 0), 100)
    assert left is not None
    assert left > 0
    live = asked.on_prefill("retry", "w", "planner", step=0, input_tokens=100)
    assert (live.source, live.version, live.remaining.source, live.remaining.version) == ("champion", 1, "champion", 1)
    assert live.remaining.ranking == left
    assert asked.on_completion("retry", "w", output_tokens=20).source == "champion"
    for served, moments in (("synthetic", {PREFILL, COMPLETION}), (None, {PREFILL, COMPLETION}), ("another", set())):
        reads = load_forecasts(PresageConfig(), served).next_agents
        assert isinstance(reads, ReadsStates)
        assert set(reads.projections) == moments, "the states of the traces are those of the model synthetic"


def test_an_engine_names_what_its_champion_was_promoted_with_and_it_does_not_supply(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A predictor of texts, promoted for a gateway, in an engine: there are no texts."""
    config = NextAgentConfig(network=NetworkConfig(epochs=1), boosting=BoostingConfig(rounds=2))
    reads_text = fit_predictor(generate("retry", 40, 0, state_size=16).table, config, states="text").predictor
    reads_text.save(tmp_path / "model")
    uri = new_database(tmp_path / "mlflow.db")
    registry = open_registry(uri)
    register(registry, tmp_path / "model", name="next-agent", metrics={}, params={}, tags={}, input_example=[ROW])
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    passed = Verdict("next-agent", 1, (Gate("schema", True, None, None, "fine"),))
    missing, causes = {}, {}
    for target, holder in (("gateway", None), ("engine", 1)):
        promote(registry, passed, against=holder, profile=target, data_digest="sha256:test")
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            made = load_forecasts(PresageConfig())
        VersionedForecaster(made.next_agents).on_prefill("retry", "w", "planner", step=0, input_tokens=100)
        status = made.upkeep.status()
        missing[target] = status["inputs"]["missing"]
        assert status["inputs"]["counts"] == {"steps": 1, "tokens": 1}
        assert ("with texts that this engine does not supply" in caplog.text) == (target == "gateway")
        assert dict(missing_inputs(read_status(status) or EngineStatus())) == (
            {("next-agent", "text"): 1.0} if target == "gateway" else {}
        )
        monitor = made.upkeep.source.latest.monitor
        monitor.drift = Drift({"retry": Promoted(Transitions({("planner", "coder"): 9}))})
        monitor.drift.alarms["retry"] = Alarm("retry", 9, ())
        told = read_status(made.upkeep.status())
        assert told is not None
        assert told.monitor is not None
        causes[target] = [cause.text for cause in told.monitor.promised["retry"].causes]
    assert missing == {"gateway": {"next-agent": ["text"]}, "engine": {}}
    assert causes["engine"] == [CHANGED.text]
    assert causes["gateway"] == [missing_causes(["text"]).text, CHANGED.text]


def test_one_step_is_one_event_whoever_asks_first(tiny: Tiny) -> None:
    forecaster = Forecaster(tiny.training.predictor, 3)
    asked = VersionedForecaster(forecaster)
    for number, agent in enumerate(("planner", "coder", "tester")):
        if number != 1:  # at one step priority is vLLM's own, and nobody asks on arrival
            asked.remaining_tokens(step(agent, number), 100)
        live = asked.on_prefill("retry", "w", agent, step=number, input_tokens=100)
        assert live.source == "champion", live.reason
        assert asked.on_completion("retry", "w", output_tokens=9).source == "champion"
    assert forecaster.counts["next-agent", "champion", None] == 6
    asked.remaining_tokens(step("coder", 3), 100)
    asked.close("retry", "w")
    assert len(forecaster) == 0
    assert asked.on_prefill("retry", "w", "planner", step=0, input_tokens=1).source == "champion"


def test_a_state_finds_the_step_that_was_asked_for_on_arrival(tiny: Tiny) -> None:
    asked = VersionedForecaster(Forecaster(tiny.training.predictor, 3))
    asked.await_states()
    state, last = (np.ones(len(asked.projections[moment][1]), np.float32) for moment in (PREFILL, COMPLETION))
    asked.remaining_tokens(step("planner", 0), 100)
    first = asked.on_prefill("retry", "w", "planner", step=0, input_tokens=100)
    live = asked.on_prefill_state("retry", "w", state, first)
    assert live is not None
    assert not np.allclose(live.probabilities, first.probabilities)
    with_state = asked.on_completion("retry", "w", output_tokens=9, projected=last)
    assert with_state.source == "champion"
    asked.remaining_tokens(step("coder", 1), 100)
    second = asked.on_prefill("retry", "w", "coder", step=1, input_tokens=100)
    asked.remaining_tokens(step("tester", 2), 100)
    assert asked.on_prefill_state("retry", "w", state, second) is None, "the tester's step has begun"


def test_steps_that_wait_side_by_side_are_one_event_each(tiny: Tiny) -> None:
    forecaster = Forecaster(tiny.training.predictor, 3)
    asked = VersionedForecaster(forecaster)
    for agent in ("planner", "coder"):
        asked.remaining_tokens(step(agent, None), 100)
    counted = forecaster.counts.total()
    for agent in ("coder", "planner"):
        asked.on_prefill("retry", "w", agent, input_tokens=100)
    assert forecaster.counts.total() == counted
    for agent in range(1000):  # requests that are aborted before they begin
        asked.remaining_tokens(step(f"agent-{agent}", None), 100)
    (record,) = asked.workflows.values()
    assert len(record.forecast_state.early) == 64


@pytest.mark.parametrize("uri", [None, "http://localhost:9", "sqlite:///not-there.db", "sqlite:////empty.db", "mlruns"])
def test_without_a_registry_nothing_is_known_nothing_raised_and_nothing_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, uri: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    if uri == "sqlite:////empty.db":
        (tmp_path / "empty.db").touch()
        uri = f"sqlite:///{tmp_path / 'empty.db'}"
    before = {path: path.stat().st_size for path in tmp_path.iterdir()}
    made = load_forecasts(PresageConfig(registry=uri))
    assert made.remaining is not None
    assert made.next_agents is not None
    assert VersionedForecaster(made.next_agents).remaining_tokens(step("planner", 0), 100) is None
    assert (
        VersionedForecaster(made.next_agents).on_prefill("retry", "w", "planner", step=0, input_tokens=100).source
        == "none"
    )
    assert all(model.reason for model in made.models.values())
    assert [record.levelname for record in caplog.records] == ["WARNING"]  # once, for both models
    assert {path: path.stat().st_size for path in tmp_path.iterdir()} == before


@pytest.mark.slow
def test_what_the_registry_does_not_hold_is_told_and_the_rest_is_used(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = new_database(tmp_path / "mlflow.db")
    registry = open_registry(uri)
    register(registry, tiny.folder, name="next-agent", metrics={}, params={}, tags={}, input_example=[ROW])
    here = tmp_path / "elsewhere"
    here.mkdir()
    monkeypatch.chdir(here)
    config = PresageConfig(registry=uri, next_agent="models:/next-agent/1")
    models = load_forecasts(config).models
    assert models["next-agent"] == ModelStatus("models:/next-agent/1", 1)
    assert "no model 'remaining-length'" in str(models["remaining-length"])
    assert not list(here.iterdir())


def test_a_folder_needs_no_registry_and_null_no_model(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    without = dict.fromkeys(("remaining_length", "return_time", "context_growth", "profile"))
    config = PresageConfig(next_agent=str(tiny.folder), forecast_deadline_ms=7, **without)
    made = load_forecasts(config)
    assert {kind: str(model) for kind, model in made.models.items()} == {
        "next-agent": str(tiny.folder),
        "remaining-length": "none: no model",
        "return-time": "none: no model",
        "context-growth": "none: no model",
        "profile": "none: no model",
    }
    assert made.next_agents is not None
    assert (
        VersionedForecaster(made.next_agents).on_prefill("retry", "w", "planner", step=0, input_tokens=100).source
        == "champion"
    )


def test_an_artefact_of_another_schema_is_told_and_not_used(tiny: Tiny, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny.folder, folder)
    card = folder / "config.json"
    card.write_text(json.dumps({**json.loads(card.read_text()), "format_version": 99}))
    models = load_forecasts(PresageConfig(next_agent=str(folder), remaining_length=None)).models
    assert str(models["next-agent"]).startswith("none: ")
    assert "99" in str(models["next-agent"])


def test_the_settings_go_before_the_environment_and_that_before_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert resolve_registry_uri(None) is None
    (tmp_path / "mlflow.db").touch()
    assert resolve_registry_uri(None) == f"sqlite:///{tmp_path / 'mlflow.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://named")
    assert resolve_registry_uri(None) == "http://named"
    assert resolve_registry_uri("http://set") == "http://set"
