"""A predictor that reads texts forecasts behind the gateway what it forecasts offline on the recorded steps."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import httpx
import pytest
from recorded_forecasts import read_forecasts
from served import gateway, served
from text_samples import so_far, text_predictor, text_workflows

from presage.datasets.read import read_traces
from presage.features.moment import COMPLETION, PREFILL
from presage.gateway.simulated_engine import SimulatedEngine
from presage.predictors.next_agent.predictor import NextAgentPredictor

SYSTEM = "You are one of several agents. "


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts") / "model"
    text_predictor().save(folder)
    return folder


def prompt(row: Mapping[str, Any]) -> str:
    """Of a whole number of tokens, since the gateway estimates four characters for each and the server counts them."""
    text = f"{row['workflow_id']} {row['step']}: {row['input_text']}"
    return text + "." * (-len(SYSTEM + text) % 4)


def request(row: Mapping[str, Any], api: str, last: bool) -> tuple[str, dict[str, Any]]:
    """Path and body of the request of a step."""
    names: dict[str, Any] = {key: row[key] for key in ("workflow_type", "workflow_id", "agent")}
    if last:
        names["workflow_end"] = "true"
    body = {"model": "simulated", "vllm_xargs": names, "stream": row["step"] % 2 == 1}
    if api == "completions":
        return "/v1/completions", {**body, "prompt": SYSTEM + prompt(row)}
    if api == "responses":
        return "/v1/responses", {**body, "instructions": SYSTEM, "input": prompt(row)}
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": prompt(row)}]
    return "/v1/chat/completions", {**body, "messages": messages}


@pytest.mark.parametrize("api", ["chat", "completions", "responses"])
def test_forecasts_on_texts_are_those_of_the_recorded_steps_offline(model: Path, tmp_path: Path, api: str) -> None:
    rows = [row for steps in text_workflows() for row in steps]
    answers = {prompt(row): str(row["output_text"]) for row in rows}

    def reply(body: Mapping[str, Any]) -> str:
        asked = body["messages"][1]["content"] if "messages" in body else body.get("prompt") or body["input"]
        return answers[asked.removeprefix(SYSTEM)]

    recorder = {"folder": str(tmp_path), "text": "on"}
    settings = {"next_agent": str(model), "recorder": recorder, "forecast_deadline_ms": 60_000.0}
    engine = served(SimulatedEngine(token_s=0.0, prefill_s=0.0, reply=reply).app())
    with engine as upstream, gateway(upstream, forecasts=settings) as (url, _):
        for steps in text_workflows():
            for row in steps:
                path, body = request(row, api, last=row == steps[-1])
                assert httpx.post(url + path, json=body, timeout=60).status_code == 200

    predictor = NextAgentPredictor.load(model)
    assert predictor.source.kind == "sketch"
    trace = read_traces([str(tmp_path)]).table.to_pylist()
    assert sorted(row["output_text"].strip() for row in trace) == sorted(row["output_text"] for row in rows)
    workflows = {
        int(name.rpartition(".")[2]): list(steps)  # by the number of the run
        for name, steps in groupby(trace, lambda row: str(row["workflow_id"]))
    }
    made = {(row["run"], row["step"], row["moment"]): row for row in read_forecasts(tmp_path).to_pylist()}
    assert (len(workflows), len(made)) == (4, 2 * len(trace))
    changed = 0
    for run, steps in workflows.items():
        for index in range(len(steps)):
            for moment in (PREFILL, COMPLETION):
                live, seen = made[run, index, moment], so_far(steps, index, moment == COMPLETION)
                whole = predictor.forecast(seen)
                assert (live["source"], live["evidence"], whole.moment) == (whole.source, whole.evidence, moment)
                offline = [
                    p for agents, end in zip(whole.agents, whole.end, strict=True) for p in (*agents.values(), end)
                ]
                assert live["probabilities"] == offline
                bare = [{**row, "input_text": None, "output_text": None} for row in seen]
                changed += predictor.forecast(bare).end != whole.end
    assert changed == len(made)
