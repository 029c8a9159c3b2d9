"""`presage traces ingest`: what it prints, and what it refuses; moments as users write them."""

from __future__ import annotations

import datetime as dt
import shutil
import sys
import types
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from cli_samples import GOOD, rows, run, write

from presage.cli.traces import parse_moment
from presage.datasets.adapters import READERS
from presage.datasets.ingest import sources
from presage.datasets.schema import conform
from presage.datasets.schema.source import Origin, Source
from presage.datasets.store import read_store
from presage.errors import ConfigurationError


def test_what_was_added_repeated_and_there_is_told(tmp_path: Path) -> None:
    path = write(tmp_path / "good.jsonl", GOOD)
    copy = shutil.copy(path, tmp_path / "copy.jsonl")
    first = run("traces", "ingest", path, copy, "--to", tmp_path / "store", "--json")
    assert first.json == {
        "store": str(tmp_path / "store"),
        "workflows": 6,
        "steps": 19,
        "already_present": 0,
        "repeated": 6,
        "skipped": {},
        "resumed": 0,
        "extended": 0,
        "notices": {},
    }
    again = run("traces", "ingest", path, "--to", tmp_path / "store")
    assert again.out.strip() == f"{tmp_path / 'store'}: 0 workflows, 0 steps added; 6 workflows there already"
    assert "reading traces …" in again.err


def test_whoever_reads_a_store_is_told_what_its_spans_were_read_with(tmp_path: Path) -> None:
    def span(number: int, **attributes: str) -> dict[str, Any]:
        told = [{"key": key.replace("__", "."), "value": {"stringValue": value}} for key, value in attributes.items()]
        times = {"startTimeUnixNano": str(number * 10**9), "endTimeUnixNano": str((number + 1) * 10**9)}
        return {"traceId": "a" * 32, "spanId": f"{number:016x}", "name": "call", "attributes": told, **times}

    spans = [span(1, gen_ai__operation__name="chat"), span(2, gen_ai__operation__name="embeddings")]
    path = write(tmp_path / "spans.jsonl", [{"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]}])
    told = run("traces", "ingest", path, "--to", tmp_path / "store", "--json").json["notices"]
    assert told
    described = run("traces", "describe", tmp_path / "store", "--json", "--html", tmp_path / "page.html")
    assert described.json["notices"] == told
    for what, count in told.items():
        assert f"read with {count} × {what}" in described.err
        assert what in (tmp_path / "page.html").read_text()


def test_since_is_a_moment(tmp_path: Path) -> None:
    timed = [*rows("ab", start_time=100.0), *rows("abc", workflow_type="u", start_time=300.0)]
    path = write(tmp_path / "t.jsonl", timed)
    ran = run("traces", "ingest", path, "--to", tmp_path / "store", "--since", "1970-01-01T00:03:20Z", "--json")
    assert (ran.json["workflows"], ran.json["steps"]) == (1, 3)
    assert ran.json["skipped"] == {"workflow that began before 1970-01-01T00:03:20+00:00": 1}
    earlier = run("traces", "ingest", path, "--to", tmp_path / "earlier", "--until", "200", "--json")
    assert (earlier.json["workflows"], earlier.json["steps"]) == (1, 2)
    swapped = run("traces", "ingest", path, "--to", tmp_path / "other", "--since", "200", "--until", "100")
    assert "--until 100 is not after --since 200: no workflow is left" in swapped.complaint
    refused = run("traces", "ingest", path, "--to", tmp_path / "other", "--since", "2026-01-01")
    assert "--since '2026-01-01': no zone" in refused.complaint
    assert not (tmp_path / "other").exists()


def test_nothing_to_ingest_and_unknown_formats_are_refused(tmp_path: Path) -> None:
    assert "no traces given" in run("traces", "ingest", "--to", tmp_path / "store").complaint
    path = write(tmp_path / "good.jsonl", GOOD)
    ran = run("traces", "ingest", path, "--to", tmp_path / "store", "--format", "xml")
    assert f"known: auto, {', '.join(READERS)}" in ran.complaint
    assert not (tmp_path / "store").exists()


def test_an_mlflow_experiment_is_read_through_its_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def read_mlflow_experiment(name: str, **options: Any) -> Iterator[Source]:
        import pyarrow as pa

        asked.append((name, options))
        table = conform(pa.Table.from_pylist(GOOD), name)
        for start in range(0, table.num_rows, 5):  # workflows are spread over chunks
            part = table.slice(start, 5)
            yield Source(part, Origin.of(name, part.num_rows))

    adapter = types.SimpleNamespace(read_mlflow_experiment=read_mlflow_experiment)
    monkeypatch.setitem(sys.modules, "presage.datasets.adapters.spans.mlflow_store", adapter)  # type: ignore[arg-type]
    arguments = ("--mlflow-experiment", "support", "--tracking-uri", "sqlite:///x.db", "--since", "0")
    ran = run("traces", "ingest", *arguments, "--to", tmp_path / "store", "--skip-bad", "--json")
    # None of the steps has a time, so none of the workflows can be told to be late enough.
    assert ran.json["skipped"] == {"workflow without a start time, which --since and --until go by": 6}
    assert asked == [
        (
            "support",
            {
                "tracking_uri": "sqlite:///x.db",
                "since": datetime.fromtimestamp(0, UTC),
                "skip_bad": True,
            },
        )
    ]
    extra = write(tmp_path / "more.jsonl", rows("ab", workflow_type="u"))
    ran = run("traces", "ingest", extra, "--mlflow-experiment", "support", "--to", tmp_path / "store", "--json")
    assert ran.json["workflows"] == 7
    assert read_store(tmp_path / "store").num_rows == 21


def test_without_ray_the_flag_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    path = write(tmp_path / "good.jsonl", GOOD)
    ran = run("traces", "ingest", path, "--to", tmp_path / "store", "--ray")
    assert "pip install '.[distributed]'" in ran.complaint
    assert not (tmp_path / "store").exists()


@pytest.mark.slow
def test_ray_makes_the_same_store_and_names_bad_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    ray = pytest.importorskip("ray")
    request.addfinalizer(ray.shutdown)
    stops: list[bool] = []
    monkeypatch.setattr(ray, "shutdown", lambda: stops.append(True))  # one Ray for both commands
    monkeypatch.setattr(sources, "GROUP_BYTES", 1)  # a task a file
    paths = [
        write(tmp_path / f"{name}.jsonl", rows("abc", "abab", "ba", workflow_type=name, start_time=1.0))
        for name in ("one", "two", "three")
    ]
    ran = run("traces", "ingest", *paths, "--to", tmp_path / "ray", "--ray", "--json")
    assert ran.code == 0, ran.err
    run("traces", "ingest", *paths, "--to", tmp_path / "here")
    assert ran.json["workflows"] == 9
    assert read_store(tmp_path / "ray").equals(read_store(tmp_path / "here"))
    bad = write(tmp_path / "bad.jsonl", ["{"])
    refused = run("traces", "ingest", *paths, bad, "--to", tmp_path / "refused", "--ray")
    assert "bad.jsonl, line 1: not JSON" in refused.complaint
    assert not (tmp_path / "refused").exists()
    assert stops == [True], "who has started it stops it, and nobody else"


NEW_YEAR = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)


@pytest.mark.parametrize(
    "text", ["2026-01-01T00:00:00Z", "2026-01-01 01:00+01:00", "20260101T000000+0000", "1767225600", "1767225600.0"]
)
def test_one_moment_in_many_spellings(text: str) -> None:
    assert parse_moment(text, "--since") == NEW_YEAR


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("2026-01-01", "no zone"),
        ("2026-01-01T00:00:00", "no zone"),
        ("yesterday", "no such time"),
        ("", "no such time"),
        ("1767225600000", "no such time \\(milliseconds\\?\\)"),
        ("nan", "no such time"),
        ("inf", "no such time"),
        ("2026-13-01T00:00:00Z", "no such time"),
    ],
)
def test_what_is_no_moment_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=f"--since '{text}': {words}"):
        parse_moment(text, "--since")


def test_what_was_not_read_is_told_and_strict_refuses_it(tmp_path: Path) -> None:
    keys = {"gen_ai.operation.name": "chat", "gen_ai.request.model": "m", "gen_ai.usage.input_tokens": "many"}
    span = {
        "traceId": "a" * 32, "spanId": "b" * 16, "parentSpanId": "c" * 16, "name": "chat m",
        "startTimeUnixNano": str(10**18), "endTimeUnixNano": str(10**18 + 5),
        "attributes": [{"key": key, "value": {"stringValue": value}} for key, value in keys.items()],
    }  # fmt: skip
    path = write(tmp_path / "spans.json", [{"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]}])
    refused = run("traces", "ingest", path, "--to", tmp_path / "store", "--strict")
    assert "1 × value dropped: gen_ai.usage.input_tokens of a wrong type" in refused.complaint
    assert not (tmp_path / "store").exists()
    told = run("traces", "ingest", path, "--to", tmp_path / "store").out
    assert "read with 1 × value dropped: gen_ai.usage.input_tokens of a wrong type" in told
    assert "then give --parents-elsewhere" in told
    ran = run("traces", "ingest", path, "--to", tmp_path / "whole", "--parents-elsewhere", "--json")
    assert ran.json["notices"] == {"value dropped: gen_ai.usage.input_tokens of a wrong type": 1}
    assert read_store(tmp_path / "whole")["complete"].to_pylist() == [True]
    assert read_store(tmp_path / "store")["complete"].to_pylist() == [False]


def test_names_are_folded_by_patterns_that_describe_shows(tmp_path: Path) -> None:
    runs = [{**one, "agent": f"{one['agent']}-{one['workflow_id']}"} for one in rows(*["ab"] * 12)]
    path, store = write(tmp_path / "t.jsonl", runs), tmp_path / "store"
    warned = run("traces", "ingest", path, "--to", tmp_path / "raw") and run("traces", "describe", tmp_path / "raw")
    assert "presage traces ingest with --agent-pattern 'a-.*=a'" in warned.err
    file = tmp_path / "names.toml"
    file.write_text("[workflow_types]\n't' = 'app'\n[agents]\n'b-.*' = 'b'\n")
    first = run("traces", "ingest", path, "--to", store, "--agent-pattern", "a-.*=a", "--names", file)
    assert "read with 24 × name folded by patterns: agent" in first.out
    assert run("traces", "ingest", path, "--to", store, "--json").json["already_present"] == 12
    described = run("traces", "describe", store, "--html", tmp_path / "page.html")
    assert "names folded by a-.*=a, b-.*=b, t=app" in described.out
    assert "look generated" not in described.err
    assert "Names were folded by a-.*=a, b-.*=b, t=app." in (tmp_path / "page.html").read_text()
    found = run("traces", "describe", store, "--json").json
    assert found["names"] == {"agents": [["a-.*", "a"], ["b-.*", "b"]], "workflow_types": [["t", "app"]]}
    assert found["workflow_types"]["app"]["agents"] == {"a": 12, "b": 12}
    assert found["notices"]["name folded by patterns: agent"] == 24


def test_patterns_that_fold_nothing_soundly_are_refused(tmp_path: Path) -> None:
    path, to = write(tmp_path / "good.jsonl", GOOD), ("--to", tmp_path / "store")
    assert "expected REGEX=NAME" in run("traces", "ingest", path, *to, "--agent-pattern", "a-.*").complaint
    assert "missing )" in run("traces", "ingest", path, *to, "--agent-pattern", "(=a").complaint
    assert "cannot be read" in run("traces", "ingest", path, *to, "--names", tmp_path / "absent.toml").complaint
    assert not (tmp_path / "store").exists()
    assert run("traces", "ingest", path, *to).code == 0
    assert "leave patterns out" in run("traces", "ingest", path, *to, "--agent-pattern", "a=c").complaint


def requests(start: object = 1_767_225_600, later: object = 1_767_225_700_000) -> list[dict[str, Any]]:
    """Two requests of one workflow, timed in seconds and in milliseconds, and one of another."""
    return [
        {"prompt": "What is a tree? ", "output": "A graph without circles.", "timestamp": start},
        {"prompt": "Good morning!", "output": "Good morning to you.", "timestamp": "2026-01-01T00:00:30Z"},
        {"prompt": "What is a tree? A graph without circles. And a forest?", "output": "Trees.", "timestamp": later},
    ]


def test_workflows_are_inferred_from_a_log_of_requests(tmp_path: Path) -> None:
    path = write(tmp_path / "log.jsonl", requests())
    told = "a log of requests (a prompt and a time a line) without workflow_id"
    assert told in (refused := run("traces", "ingest", path, "--to", tmp_path / "store").complaint)
    assert "--infer-workflows" in refused
    ran = run("traces", "ingest", path, "--infer-workflows", "--workflow-type", "chat", "--to", tmp_path / "store")
    assert ran.code == 0
    assert ran.out.splitlines() == [
        f"{tmp_path / 'store'}: 2 workflows, 3 steps added",
        "read with 1 × workflow of a single request: nothing in the logs goes on from it",
    ]
    table = read_store(tmp_path / "store")
    assert sorted(table["step"].to_pylist()) == [0, 0, 1]
    assert set(table["workflow_type"].to_pylist()) == {"chat"}
    again = run("traces", "ingest", path, "--infer-workflows", "--workflow-type", "chat", "--to", tmp_path / "store")
    assert "0 steps added; 2 workflows there already" in again.out


def test_a_bad_log_and_options_that_mean_nothing_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "log.jsonl", requests(later="soon"))
    options = ("--infer-workflows", "--to", tmp_path / "store")
    assert 'log.jsonl, line 3: "timestamp" is no time' in run("traces", "ingest", path, *options).complaint
    ran = run("traces", "ingest", path, *options, "--skip-bad", "--json")
    assert ran.json["skipped"] == {"line with timestamp that is no time": 1}
    assert "no request logs given" in run("traces", "ingest", *options).complaint
    alone = run("traces", "ingest", path, "--workflow-type", "chat", "--to", tmp_path / "other")
    assert "--workflow-type is of inferred workflows" in alone.complaint
    both = run("traces", "ingest", path, *options, "--mlflow-experiment", "e")
    assert "--mlflow-experiment" in both.complaint
