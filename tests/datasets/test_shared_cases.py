"""The trace files of the shared cases, each made after a public bug report, against what is right by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from span_samples import steps

from presage.datasets.ingest import ingest
from presage.datasets.read import read_traces
from presage.datasets.store import read_store

CASES = Path(__file__).resolve().parents[3] / "shared" / "cases"
pytestmark = [
    pytest.mark.realdata,
    pytest.mark.skipif(not CASES.is_dir(), reason=f"no shared cases at {CASES}"),
]


def read(name: str) -> pa.Table:
    return read_traces([CASES / name]).table


def agents(name: str) -> list[str]:
    return [agent for (agent,) in steps(read(name), "agent")]


AGENTS = [
    ("01-langgraph-second-subgraph-call/real.jsonl", "research research research writer"),
    ("01-langgraph-second-subgraph-call/real-named-subnodes.jsonl", "query_writer research query_writer research"),
    ("01-langgraph-second-subgraph-call/traces.jsonl", "research research research research drafter"),
    ("02-pydantic-ai-tool-without-operation/real-pa1.79-v3.jsonl", "planner weather planner helper planner"),
    ("02-pydantic-ai-tool-without-operation/traces.json", "helper weather helper"),
    ("03-openinference-agent-by-name/real.jsonl", "supervisor coder"),
    ("03-openinference-agent-by-name/traces.jsonl", "supervisor coder"),
    ("08-operation-names/responses.json", "planner planner search coder"),
    ("08-operation-names/sk.json", "planner planner search coder"),
    ("08-operation-names/mixed-no-agent-spans.json", "triage coder reviewer"),
    ("14-ties-newest-first/chain-reversed.json", "router lookup format writer save"),
    ("16-failed-attempts/traces.json", "a"),
    ("18-duplicates-with-new-ids/traces.json", "a a"),
    ("30-names-with-ids/blanks.json", "Writer Writer Writer writer"),
]


@pytest.mark.parametrize(("name", "right"), AGENTS)
def test_who_acted(name: str, right: str) -> None:
    assert agents(name) == right.split()


COUNTS: list[tuple[str, list[tuple[Any, ...]]]] = [
    ("04-anthropic-cached-tokens/traces.json", [(9007, 50), (9162, 60), (9210, 60)]),
    ("05-streaming-zero-usage/traces.json", [(None, None), (200, 20)]),
    ("06-spring-ai-string-counts/traces.json", [(120, 30)]),
    ("07-span-snapshots/traces.json", [(200, 30)]),
    ("07-span-snapshots/identical.json", [(200, 30)]),
    ("16-failed-attempts/traces.json", [(100, 20)]),
    ("18-duplicates-with-new-ids/traces.json", [(100, 10), (200, 20)]),
    ("34-wrong-types/tokens-float.json", [(10, None)]),
    ("34-wrong-types/tokens-minus-one.json", [(None, None)]),
]


@pytest.mark.parametrize(("name", "right"), COUNTS)
def test_how_many_tokens(name: str, right: list[tuple[Any, ...]]) -> None:
    assert steps(read(name), "input_tokens", "output_tokens") == right


COMPLETE = [
    ("12-remote-parent/flags.json", True),
    ("12-remote-parent/flags-two-children.json", True),
    ("12-remote-parent/flags-two-requests.json", True),
    ("12-remote-parent/no-flags.json", False),
    ("13-langgraph-interrupt/real-paused.jsonl", False),
    ("13-langgraph-interrupt/crashed-root.json", False),
    ("13-langgraph-interrupt/real.jsonl", True),  # it was resumed
    ("31-attribute-limit/litellm-evicted.json", False),
    ("31-attribute-limit/litellm-evicted-flat.json", False),
    ("31-attribute-limit/real.jsonl", False),
]


@pytest.mark.parametrize(("name", "right"), COMPLETE)
def test_whether_it_reached_its_end(name: str, right: bool) -> None:
    assert set(read(name)["complete"].to_pylist()) == {right}


def test_a_parent_elsewhere_by_the_setting() -> None:
    path = CASES / "12-remote-parent/no-flags.json"
    assert read_traces([path], parents_elsewhere=True).table["complete"].to_pylist() == [True]


def test_order_does_not_depend_on_the_lines() -> None:
    folder = "14-ties-newest-first/"
    for pair in ("", "chain-"):
        assert read(f"{folder}{pair}forward.json").equals(read(f"{folder}{pair}reversed.json"))


def test_a_model_that_stays_open_during_its_tools() -> None:
    (first, *_) = read("19-google-adk/nested.json").to_pylist()
    assert (first["ended_at"] - first["started_at"]).total_seconds() == 0.1
    assert agents("19-google-adk/double.json") == ["root_agent", "get_weather", "root_agent"]


def test_a_negative_duration_is_none() -> None:
    table = read("15-negative-duration/traces.json")
    (tool,) = [row for row in table.to_pylist() if row["kind"] == "tool"]
    assert tool["started_at"] == tool["ended_at"]


def test_five_runs_with_one_session_are_five_workflows() -> None:
    table = read("22-session-1-overlapping/traces.json")
    assert len(set(table["workflow_id"].to_pylist())) == 5
    assert table["agent"].to_pylist() == ["planner", "coder"] * 5


def test_session_ids_that_are_numbers() -> None:
    assert "42" in read("34-wrong-types/session-int.json")["workflow_id"].to_pylist()
    assert agents("34-wrong-types/agent-list.json") == ["a"]


@pytest.mark.parametrize("name", ["rest-page.json", "rest-spans.jsonl", "spans.csv", "spans.parquet"])
def test_phoenix_exports(name: str) -> None:
    table = read(f"23-phoenix-exports/{name}")
    assert steps(table, "agent", "input_tokens") == [("planner", 100), ("search", None), ("coder", 200)]


@pytest.mark.parametrize("pair", [("day1", "day2"), ("cut1", "cut2")])
def test_nightly_ingestion(tmp_path: Path, pair: tuple[str, str]) -> None:
    files = [CASES / "21-nightly-growing-session" / f"{name}.json" for name in pair]
    for store, order in (("forward", files), ("backward", files[::-1])):
        for file in (*order, *order):
            ingest([file], tmp_path / store)
    joint = read_traces(files).table
    assert joint["complete"].to_pylist() == [True] * len(joint)
    assert read_store(tmp_path / "forward").equals(joint)
    assert read_store(tmp_path / "backward").equals(joint)
