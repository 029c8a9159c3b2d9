"""Agents' names stand in the models that learnt from them, and whoever serves the models calls agents so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from served import gateway, served
from text_samples import prompted_table, text_lengths, text_predictor

from presage.datasets.read import read_traces
from presage.errors import ArtefactError
from presage.features.agent_fingerprint import Fingerprint, masked_prompt
from presage.features.agent_names import ARTEFACT_FILE
from presage.gateway.simulated_engine import SimulatedEngine
from presage.predictors.common.artefact import read_artefact, write_artefact
from presage.predictors.length.predictor import RemainingLengthPredictor
from presage.predictors.quantiles.choice import QuantileConfig
from presage.serving_hooks.forecasting.forecaster import Forecaster
from presage.serving_hooks.forecasting.forecasts import RECOGNISED, Forecasts
from presage.training.length.train import fit_lengths

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


def test_a_gateway_forecasts_for_a_renamed_agent_as_for_the_one_it_was_and_calls_it_as_its_client_does(
    lengths: Path, tmp_path: Path
) -> None:
    agent = text_lengths().vocabulary.agents[0]
    settings: dict[str, Any] = {"remaining_length": str(lengths), "forecast_deadline_ms": 60_000.0}
    engine = SimulatedEngine(token_s=0.0, prefill_s=0.0)
    recorder = {"folder": str(tmp_path / "r")}
    told: list[dict[str, Any]] = []
    with (
        served(engine.app()) as upstream,
        gateway(upstream, forecasts=settings | {"recorder": recorder}) as (url, front),
    ):
        for sent, named, role in (
            ("first", agent, agent),  # from its answer the gateway learns how long tokens are
            ("retry", agent, agent),
            ("retry", "v2", agent),
            ("other", "v2", agent),
            ("retry", "v2", "nobody that we know, at all"),
        ):
            system = {"role": "system", "content": SYSTEM.format(role)}
            answer = httpx.post(
                f"{url}/v1/chat/completions",
                json={
                    "model": "simulated",
                    "messages": [system, {"role": "user", "content": "Please go on."}],
                    "metadata": {"workflow_type": sent, "workflow_id": f"{sent}-{named}-{role}", "agent": named},
                },
                headers={"X-Presage-Forecast": "1"},
                timeout=60,
            )
            told.append(json.loads(answer.headers["x-presage-forecast"]))
        explained = front.decisions.explain("retry", f"retry-v2-{agent}")
        counted = front.decisions.counts.by_key()
    _, known, renamed, retyped, unknown = told
    assert [one["agent"] for one in (known, renamed, retyped, unknown)] == [agent, "v2", "v2", "v2"]
    forecasts = [one.get("predicted_remaining_len") for one in (known, renamed, unknown)]
    assert forecasts[0] == forecasts[1] != forecasts[2]
    assert counted[RECOGNISED] == 2
    assert {(made["agent"], made["sent_agent"]) for made in explained["forecasts"]} == {(agent, "v2")}
    assert f"its agent 'v2' is forecast as {agent!r}" in explained["reasons"]
    assert {row["agent"] for row in read_traces([tmp_path / "r"]).table.to_pylist()} == {agent, "v2"}


DUTIES = (
    "Split the issue into small tasks and order them by risk; hand the first task over.",
    "Write the patch in Python with types and docstrings, and touch no other module.",
    "Run the suite, read each traceback, and report which assertion fails and why.",
    "Compare the patch with the guidelines, and approve it or name what has to change.",
    "Search the repository for symbols and callers that the ticket mentions.",
    "Summarise the finished work for the customer without technical terms.",
    "Draft release notes from merged changes, newest first, with links to tickets.",
    "Estimate how many hours remain, from open questions and earlier sprints.",
)
REWORDED = ("each", "every"), ("hand", "pass"), ("the", "our"), ("no other", "not one other"), ("report", "tell us")


def test_a_gateway_forecasts_for_an_agent_that_was_renamed_and_reworded_as_for_the_one_it_was(tmp_path: Path) -> None:
    agents = text_lengths().vocabulary.agents
    duties = dict(zip(agents, DUTIES[: len(agents)], strict=True))

    def prompt(agent: str) -> str:
        return f"You work in a team that repairs software. {duties[agent]} Answer in plain words."

    table = prompted_table(60, 0, prompt)
    fit_lengths(table, QuantileConfig(estimator="ridge", refit=False), texts="text").predictor.save(tmp_path / "m")
    reworded = prompt(agents[1])
    for old, new in REWORDED:
        reworded = reworded.replace(f" {old} ", f" {new} ")
    assert reworded != prompt(agents[1])
    told: list[dict[str, Any]] = []
    settings: dict[str, Any] = {"remaining_length": str(tmp_path / "m"), "forecast_deadline_ms": 60_000.0}
    engine = SimulatedEngine(token_s=0.0, prefill_s=0.0)
    with served(engine.app()) as upstream, gateway(upstream, forecasts=settings) as (url, front):
        for named, system in (
            (agents[1], prompt(agents[1])),  # from its answer the gateway learns how long tokens are
            (agents[1], prompt(agents[1])),
            ("v2", reworded),
            ("stranger", "You are a cook. Taste the soup, and say which spice it lacks."),
        ):
            messages = [{"role": "system", "content": system}, {"role": "user", "content": "Please go on."}]
            metadata = {"workflow_type": "retry", "workflow_id": f"{named}-{len(told)}", "agent": named}
            answer = httpx.post(
                f"{url}/v1/chat/completions",
                json={"model": "simulated", "messages": messages, "metadata": metadata},
                headers={"X-Presage-Forecast": "1"},
                timeout=60,
            )
            told.append(json.loads(answer.headers["x-presage-forecast"]))
        counted = front.decisions.counts.by_key()
        reasons = front.decisions.explain("retry", "v2-2")["reasons"]
    assert [one["agent"] for one in told] == [agents[1], agents[1], "v2", "stranger"]
    assert counted[RECOGNISED] == 1
    assert f"its agent 'v2' is forecast as {agents[1]!r}" in reasons


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
