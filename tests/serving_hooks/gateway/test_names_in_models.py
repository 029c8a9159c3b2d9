"""Agents' names stand in the models that learnt from them, and whoever serves the models calls agents so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from served import gateway, served
from text_samples import text_lengths, text_predictor

from presage.errors import ArtefactError
from presage.features.agent_fingerprint import Fingerprint, masked_prompt
from presage.features.agent_names import ARTEFACT_FILE
from presage.predictors.common.artefact import read_artefact, write_artefact
from presage.predictors.length.predictor import RemainingLengthPredictor
from presage.serving_hooks.forecasting.forecaster import Forecaster
from presage.serving_hooks.forecasting.forecasts import Forecasts
from presage.serving_hooks.gateway.simulated_engine import SimulatedEngine

SYSTEM = "You are {}."


def of(agent: str) -> Fingerprint:
    return masked_prompt(SYSTEM.format(agent), {}).fingerprint()


@pytest.fixture(scope="module")
def lengths(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("names") / "lengths"
    text_lengths().save(folder)
    return folder


def test_an_artefact_holds_the_names_of_the_traces_it_learnt_from(lengths: Path, tmp_path: Path) -> None:
    loaded = RemainingLengthPredictor.load(lengths)
    assert loaded.agent_names is not None
    for agent in loaded.vocabulary.agents:
        assert loaded.agent_names.find(of(agent)) == (("retry", agent), 1.0)
    loaded.save(tmp_path / "again")
    assert [(tmp_path / "again" / name).read_bytes() for name in (ARTEFACT_FILE, "config.json")] == [
        (lengths / name).read_bytes() for name in (ARTEFACT_FILE, "config.json")
    ]
    assert SYSTEM.format(loaded.vocabulary.agents[0]).encode() not in (lengths / ARTEFACT_FILE).read_bytes()


def test_without_system_prompts_in_the_traces_there_is_no_such_file(tmp_path: Path) -> None:
    text_predictor().save(tmp_path / "model")
    assert not (tmp_path / "model" / ARTEFACT_FILE).exists()
    assert Forecasts(Forecaster(text_predictor())).agent_names is None


def test_the_first_model_with_names_gives_them() -> None:
    both = Forecasts(Forecaster(text_predictor(), lengths=text_lengths()))
    assert both.agent_names is text_lengths().agent_names


def test_damaged_names_are_refused_with_the_file(lengths: Path, tmp_path: Path) -> None:
    good = read_artefact(lengths)
    names = json.loads(good.files[ARTEFACT_FILE])
    names["agents"][0]["sketch"] = "none"
    write_artefact(
        tmp_path / "bad",
        kind=good.kind,
        config=good.config,
        tensors=good.tensors,
        training_data=good.training_data,
        files={ARTEFACT_FILE: json.dumps(names).encode()},
    )
    with pytest.raises(ArtefactError, match=f"{ARTEFACT_FILE}: found a damaged entry"):
        RemainingLengthPredictor.load(tmp_path / "bad")


def test_a_gateway_calls_agents_of_clients_that_name_none_as_its_models_do(lengths: Path) -> None:
    agent = text_lengths().vocabulary.agents[0]
    messages = [{"role": "system", "content": SYSTEM.format(agent)}, {"role": "user", "content": "Please go on."}]
    settings: dict[str, Any] = {"remaining_length": str(lengths), "forecast_deadline_ms": 60_000.0}
    engine = served(SimulatedEngine(token_s=0.0, prefill_s=0.0).app())
    with engine as upstream, gateway(upstream, forecasts=settings) as (url, _):
        answer = httpx.post(
            f"{url}/v1/chat/completions",
            json={"model": "simulated", "messages": messages},
            headers={"X-Presage-Forecast": "1"},
            timeout=60,
        )
    told = json.loads(answer.headers["x-presage-forecast"])
    assert (told["workflow_type"], told["agent"]) == ("retry", agent)
    assert told["predicted_remaining_len"]
