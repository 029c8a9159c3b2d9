"""What the gateway records is a trace: ingestion reads it, and a predictor trains on what serving saw."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pytest
from served import gateway, served

from presage.datasets.read import read_traces
from presage.datasets.recording import ADDED, STEPS, VERSION, VERSION_KEY
from presage.gateway.simulated_engine import SimulatedEngine

CHAT = "/v1/chat/completions"
AGENTS = {"planner": "You plan trips.", "writer": "You write letters."}


def run_workflow(url: str, number: int, named: bool) -> None:
    headers = {} if named else {"traceparent": f"00-{number + 1:032x}-{number + 1:016x}-01"}
    for step, (agent, system) in enumerate([*AGENTS.items(), *AGENTS.items()]):
        names = {"workflow_type": "letters", "workflow_id": f"w{number}", "agent": agent}
        if step == 3:
            names["workflow_end"] = "true"
        messages = [{"role": "system", "content": system}, {"role": "user", "content": f"Step {step} of {number}"}]
        body: dict[str, Any] = {"model": "simulated", "messages": messages, "stream": step % 2 == 1}
        if named:
            body["vllm_xargs"] = names
        assert httpx.post(url + CHAT, json=body, headers=headers).status_code == 200


def recorded(folder: Path, settings: dict[str, str], workflows: int = 1, named: bool = True) -> None:
    """Records some workflows."""
    recorder = {"folder": str(folder), **settings}
    engine = served(SimulatedEngine(token_s=0.0).app())
    with engine as upstream, gateway(upstream, forecasts={"recorder": recorder}) as (url, _):
        for number in range(workflows):
            run_workflow(url, number, named)


@pytest.mark.parametrize("named", [True, False])
def test_a_recording_of_the_gateway_is_ingested_as_a_trace(tmp_path: Path, named: bool) -> None:
    recorded(tmp_path, {"text": "on"}, 3, named)
    rows = read_traces([str(tmp_path)]).table.to_pylist()
    assert len(rows) == 12
    by_workflow: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_workflow.setdefault(row["workflow_id"], []).append(row)
    assert [len(steps) for steps in by_workflow.values()] == [4, 4, 4]
    for steps in by_workflow.values():
        assert [row["system_prompt"] for row in steps] == [*AGENTS.values(), *AGENTS.values()]
        assert [row["input_text"][:6] for row in steps] == ["Step 0", "Step 1", "Step 2", "Step 3"]
        assert len({row["agent"] for row in steps}) == 2
        assert steps[0]["agent"] == steps[2]["agent"]
        for row in steps:
            assert row["model"] == "simulated"
            assert row["finish_reason"] == "stop"
            assert row["output_tokens"] == len(row["output_text"].split())
            assert row["input_tokens"] > 0
    if named:
        assert {row["complete"] for row in rows} == {True}
        assert {row["agent"] for row in rows} == set(AGENTS)


def test_texts_stay_out_of_a_recording_without_them(tmp_path: Path) -> None:
    recorded(tmp_path, {})
    for path in tmp_path.rglob("*.arrows"):
        assert b"trips" not in path.read_bytes()


def test_decisions_stand_beside_steps(tmp_path: Path) -> None:
    recorded(tmp_path, {})
    (path,) = tmp_path.rglob("steps-*.arrows")
    table = pa.ipc.open_stream(path.read_bytes()).read_all()
    decided = [json.loads(one) for one in table["decision"].to_pylist()]
    assert {one["workflow_from"] for one in decided} == {"explicit"}
    assert {one["model"] for one in decided} == {"simulated"}


@pytest.mark.parametrize("version", sorted(ADDED))
def test_a_recording_of_an_earlier_version_is_still_read(tmp_path: Path, version: str) -> None:
    recorded(tmp_path, {})
    for path in tmp_path.rglob("*.arrows"):
        table = pa.ipc.open_stream(path.read_bytes()).read_all()
        facts = {**table.schema.metadata, VERSION_KEY: version.encode()}
        assert table.schema.metadata[VERSION_KEY] == VERSION.encode()
        if path.name.startswith("steps"):
            table = table.select([name for name in STEPS.names if name not in ADDED[version]])
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema.with_metadata(facts)) as writer:
            writer.write_table(table.replace_schema_metadata(facts))
    rows = read_traces([str(tmp_path)]).table.to_pylist()
    assert len(rows) == 4
    assert {row["model"] for row in rows} == {None if "model" in ADDED[version] else "simulated"}
