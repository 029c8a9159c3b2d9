"""MLflow traces by its own tracing, into a store of its own: read live and exported, the same steps come out."""

from __future__ import annotations

import datetime as dt
import json
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from mlflow import MlflowClient
from registry_database import new_database
from span_samples import collected, steps

from presage.datasets.adapters import detect
from presage.datasets.adapters.spans.mlflow_store import read_mlflow_experiment
from presage.datasets.adapters.spans.reader import read_mlflow
from presage.datasets.read import read_traces
from presage.errors import TraceError

pytestmark = pytest.mark.slow  # MLflow makes a database
SHAPE = [
    ("support", 0, "planner", "llm", []),
    ("support", 1, "search", "tool", [0]),
    ("support", 2, "writer", "llm", [1]),
]
NAMES = ("workflow_type", "step", "agent", "kind", "parent_steps")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tracking")
    new_database(folder / "mlflow.db")
    command = [sys.executable, str(Path(__file__).with_name("record_mlflow.py")), str(folder)]
    subprocess.run(command, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def uri(recorded: Path) -> str:
    return f"sqlite:///{recorded / 'mlflow.db'}"


@pytest.fixture(scope="module")
def exported(uri: str) -> list[Any]:
    client = MlflowClient(tracking_uri=uri)
    return list(client.search_traces(locations=[client.get_experiment_by_name("agents").experiment_id]))


@pytest.fixture(scope="module")
def live(uri: str) -> pa.Table:
    return collected(read_mlflow_experiment("agents", tracking_uri=uri))[0]


def test_a_live_experiment(live: pa.Table, exported: list[Any]) -> None:
    assert steps(live, *NAMES) == SHAPE * 2
    assert set(live["workflow_id"].to_pylist()) == {trace.info.trace_id for trace in exported}
    assert live["complete"].to_pylist() == [True] * 6
    first = live.to_pylist()[0]
    assert (first["model"], first["input_tokens"], first["output_tokens"], first["cached_input_tokens"]) == (
        "m",
        40,
        7,
        32,
    )
    assert (first["system_prompt"], first["input_text"], first["output_text"]) == ("be brief", "hello", "yes")
    assert live["finish_reason"].to_pylist() == ["stop", None, "stop"] * 2


def test_exported_json_tells_the_same(live: pa.Table, exported: list[Any], tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    path.write_text("".join(f"{trace.to_json()}\n" for trace in exported), encoding="utf-8")
    assert detect(path) == "mlflow"
    assert read_traces([path]).table.equals(live)


@pytest.mark.parametrize("how", ["folder", "list", "command", "data frame"])
def test_other_ways_to_export(live: pa.Table, exported: list[Any], recorded: Path, tmp_path: Path, how: str) -> None:
    path = tmp_path / "traces.json"
    if how == "folder":
        path = tmp_path
        for trace in exported:
            (tmp_path / f"{trace.info.trace_id}.json").write_text(trace.to_json(pretty=True), encoding="utf-8")
    elif how == "list":
        path.write_text(json.dumps([trace.to_dict() for trace in exported]), encoding="utf-8")
    elif how == "command":  # mlflow traces search --output json
        found = {"traces": [trace.to_dict() for trace in exported], "next_page_token": None}
        path.write_text(json.dumps(found, indent=2), encoding="utf-8")
    else:
        path = recorded / "frame.jsonl"
    assert collected(read_mlflow(path))[0].equals(live)


def test_traces_of_a_session_are_one_workflow(uri: str) -> None:
    table, _, _ = collected(read_mlflow_experiment("sessions", tracking_uri=uri))
    assert table["step"].to_pylist() == list(range(6))
    assert set(table["workflow_id"].to_pylist()) == {"s1"}
    assert table["parent_steps"].to_pylist() == [[], [0], [1], [2], [3], [4]]


def test_a_trace_whose_spans_are_lost_is_named_and_leaves_its_session_open(
    uri: str, recorded: Path, tmp_path: Path
) -> None:
    path = tmp_path / "damaged.db"
    with sqlite3.connect(uri.removeprefix("sqlite:///")) as current, sqlite3.connect(path) as damaged:
        current.backup(damaged)
        known = (
            "select request_id from trace_info join experiments using (experiment_id) where name = 'sessions' "
            "order by timestamp_ms limit 1"
        )
        lost = damaged.execute(known).fetchone()[0]
        damaged.execute("delete from trace_tags where request_id = ? and key = 'mlflow.trace.spansLocation'", (lost,))
        damaged.execute("delete from spans where trace_id = ?", (lost,))
    current.close()
    damaged.close()
    shutil.rmtree(recorded / "artifacts" / "traces" / lost, ignore_errors=True)  # of some traces MLflow keeps a copy
    chunks = list(read_mlflow_experiment("sessions", tracking_uri=f"sqlite:///{path}"))
    table, _, _ = collected(chunks)
    assert steps(table, "workflow_id", "complete") == [("s1", False)] * 3
    assert [dict(chunk.notices) for chunk in chunks if chunk.notices] == [{f"trace whose spans are lost: {lost}": 1}]


def test_since(uri: str, live: pa.Table) -> None:
    times = live["started_at"].to_pylist()
    found, _, _ = collected(read_mlflow_experiment("agents", tracking_uri=uri, since=times[0] - dt.timedelta(hours=1)))
    assert found.equals(live)
    with pytest.raises(TraceError, match="no traces since"):
        list(read_mlflow_experiment("agents", tracking_uri=uri, since=times[-1] + dt.timedelta(hours=1)))


def test_a_trace_that_is_still_running_is_censored(exported: list[Any], tmp_path: Path) -> None:
    trace = exported[0].to_dict()
    trace["info"]["state"] = "IN_PROGRESS"
    path = tmp_path / "t.json"
    path.write_text(json.dumps(trace), encoding="utf-8")
    assert collected(read_mlflow(path))[0]["complete"].to_pylist() == [False] * 3


def test_the_shape_of_mlflow_2(tmp_path: Path) -> None:
    def span(name: str, kind: str, number: str, parent: str | None, start: int) -> dict[str, Any]:
        return {
            "name": name, "context": {"span_id": number, "trace_id": "0xab"}, "parent_id": parent,
            "start_time": (1767225600 + start) * 10**9, "end_time": (1767225601 + start) * 10**9,
            "status_code": "OK", "attributes": {"mlflow.spanType": json.dumps(kind)}, "events": [],
        }  # fmt: skip

    spans = [span("bot", "AGENT", "0x1", None, 0), span("ChatOpenAI", "CHAT_MODEL", "0x2", "0x1", 0)]
    info = {"request_id": "r1", "experiment_id": "7", "status": "OK", "request_metadata": {"mlflow.trace.session": "s"}}
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"info": info, "data": {"spans": spans}}), encoding="utf-8")
    assert steps(collected(read_mlflow(path))[0], "workflow_id", "agent") == [("s", "bot")]


def test_otel_names_that_mlflow_keeps_as_json(tmp_path: Path) -> None:
    """MLflow takes OTLP too, and keeps every attribute as JSON: numbers become strings."""
    attributes = {"gen_ai.operation.name": '"chat"', "gen_ai.usage.input_tokens": "12", "gen_ai.agent.name": '"bot"'}
    attributes["gen_ai.response.finish_reasons"] = '["length"]'
    span = {
        "trace_id": "YWI=", "span_id": "YQ==", "parent_span_id": None, "name": "chat m", "attributes": attributes,
        "start_time_unix_nano": 1767225600 * 10**9, "end_time_unix_nano": 1767225601 * 10**9,
    }  # fmt: skip
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"info": {"trace_id": "tr-1", "state": "OK"}, "data": {"spans": [span]}}))
    names = ("workflow_id", "agent", "input_tokens", "finish_reason")
    assert steps(collected(read_mlflow(path))[0], *names) == [("tr-1", "bot", 12, "length")]


def test_an_experiment_that_does_not_exist(uri: str) -> None:
    with pytest.raises(TraceError, match=r"no experiment 'agent' in .*; there are: .*'agents'"):
        list(read_mlflow_experiment("agent", tracking_uri=uri))


def test_an_experiment_without_traces(uri: str) -> None:
    with pytest.raises(TraceError, match=r"'nothing' of .*: no traces"):
        list(read_mlflow_experiment("nothing", tracking_uri=uri))


def test_a_database_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no such file"):
        list(read_mlflow_experiment("agents", tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}"))
    with pytest.raises(TraceError, match="no tracking store"):
        list(read_mlflow_experiment("agents", tracking_uri=str(tmp_path / "mlruns")))
    assert not list(tmp_path.iterdir())


def test_a_database_of_something_else_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    with sqlite3.connect(path) as database:
        database.execute("create table birds (name text)")
    database.close()
    before = path.read_bytes()
    with pytest.raises(TraceError, match="not MLflow's"):
        list(read_mlflow_experiment("agents", tracking_uri=f"sqlite:///{path}"))
    path_of_text = tmp_path / "text.db"
    path_of_text.write_text("no database at all, though it is long enough for one" * 10)
    with pytest.raises(TraceError, match="the database cannot be read"):
        list(read_mlflow_experiment("agents", tracking_uri=f"sqlite:///{path_of_text}"))
    assert path.read_bytes() == before


def test_a_store_of_an_older_schema_is_refused_and_left_alone(uri: str, tmp_path: Path) -> None:
    path = tmp_path / "old.db"
    with sqlite3.connect(uri.removeprefix("sqlite:///")) as current, sqlite3.connect(path) as old:
        current.backup(old)
        old.execute("update alembic_version set version_num = '0584bdc529eb'")  # of MLflow 2.14
    current.close()
    old.close()
    before = path.read_bytes()
    with pytest.raises(TraceError, match=r"schema of another MLflow release.*mlflow db upgrade"):
        list(read_mlflow_experiment("agents", tracking_uri=f"sqlite:///{path}"))
    assert path.read_bytes() == before


def test_a_database_whose_driver_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(TraceError, match="psycopg is needed") as refused:
        list(read_mlflow_experiment("agents", tracking_uri="postgresql+psycopg://me:secret@localhost/db"))
    assert "secret" not in str(refused.value)


def test_a_server_that_is_down() -> None:
    with pytest.raises(TraceError, match="does not answer"):
        list(read_mlflow_experiment("agents", tracking_uri="http://127.0.0.1:9"))


def test_a_line_that_is_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"birds": 1}\n', encoding="utf-8")
    with pytest.raises(TraceError, match=r"line 1: a JSON object with the keys birds; expected an MLflow trace"):
        list(read_mlflow(path))
