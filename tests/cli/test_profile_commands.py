"""The commands on profiles: from traces to a champion, what it shows, and what changed between two."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_samples import Ran, run, write
from profile_samples import coding, rows_of
from registry_database import new_database

import presage
from presage.cli.train_predictor import app as train_predictor

PLAN = "planner explorer{3,12} (coder tester){1,4} reviewer?"


def train(*arguments: object) -> Ran:
    return Ran(train_predictor, "profile", *arguments)


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("profiles")
    held = [row | {"workflow_id": f"held-{row['workflow_id']}"} for row in rows_of(coding(60, seed=1))]
    return write(root / "learnt.jsonl", rows_of(coding(300))), write(root / "held.jsonl", held)


def test_from_traces_to_a_champion_a_forecast_and_the_api(
    traces: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learnt, held = traces
    monkeypatch.setenv("MLFLOW_TRACKING_URI", new_database(tmp_path / "mlflow.db"))
    ran = train(learnt, "--out", tmp_path / "out", "--json")
    assert ran.code == 0, ran.err
    kept = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert {key: ran.json[key] for key in kept} == kept
    assert (kept["kind"], kept["version"]) == ("profile", 1)
    assert kept["by_workflow_type"]["app"]["expression"] == PLAN
    page = (tmp_path / "out" / "report.html").read_text()
    assert "planner explorer{3,12}" in page
    assert "<svg" in page
    assert (tmp_path / "out" / "graph-app.svg").exists()

    judged = run("evaluate", tmp_path / "out", held, "--json").json
    assert judged["coverage"] == 1.0
    promoted = run("promote", "profile", "--version", 1, "--traces", held, "--json")
    assert promoted.code == 0, promoted.err
    assert {"confident", "coverage", "floor-markov-3", "floor-variants"} <= {
        of["name"] for of in promoted.json["gates"]
    }

    steps = write(tmp_path / "steps.jsonl", rows_of([["planner", "explorer", "explorer", "explorer"]]))
    answer = run("forecast", "models:/profile@champion", steps, "--json").json
    assert (answer["source"], answer["version"]) == ("champion", 1)
    shown = run("forecast", "models:/profile@champion", steps).out
    assert f"the application: {PLAN}" in shown
    assert "on the graph" in shown
    model = presage.load("models:/profile@champion")
    assert model.profiles_["app"].text == PLAN
    assert "profile" in run("models").out

    again = train(learnt, "--no-register", "--set", "max_names=1", "--json")
    assert again.json["by_workflow_type"]["app"]["level"] != "states"


def test_a_profile_of_few_workflows_is_not_promoted(traces: tuple[Path, Path], tmp_path: Path) -> None:
    few = write(tmp_path / "few.jsonl", rows_of(coding(12)))
    uri = new_database(tmp_path / "mlflow.db")
    ran = train(few, "--tracking-uri", uri)
    assert "NOT CONFIDENT" in ran.out
    refused = run("promote", "profile", "--version", 1, "--traces", traces[1], "--tracking-uri", uri, "--json")
    assert refused.code == 3
    assert "confident" in {of["name"] for of in refused.json["gates"] if not of["passed"]}


def test_a_champion_is_not_replaced_by_a_profile_that_covers_less(traces: tuple[Path, Path], tmp_path: Path) -> None:
    uri = new_database(tmp_path / "mlflow.db")
    shorter = [agents for agents in coding(600) if len(agents) < 11]
    for workflows in (coding(300), shorter):
        assert train(write(tmp_path / "traces.jsonl", rows_of(workflows)), "--tracking-uri", uri).code == 0
    promote = ("promote", "profile", "--traces", traces[1], "--tracking-uri", uri, "--json")
    assert run(*promote, "--version", 1).code == 0
    refused = run(*promote, "--version", 2)
    assert refused.code == 3
    assert "coverage-champion" in {of["name"] for of in refused.json["gates"] if not of["passed"]}


def test_show_and_diff(tmp_path: Path) -> None:
    for name, share, kind in (("before", 0.4, "app@1"), ("after", 0.8, "app@2")):
        made = rows_of(coding(400, reviewer=share), workflow_type=kind)
        assert train(write(tmp_path / f"{name}.jsonl", made), "--no-register", "--out", tmp_path / name).code == 0
    before, after = tmp_path / "before", tmp_path / "after"
    shown = run("profile", "show", before).out
    assert PLAN in shown
    assert "confident: yes" in shown
    assert run("profile", "show", before, "--json").json["workflow_types"]["app@1"]["expression"] == PLAN

    told = run("profile", "diff", before, after).out
    assert "app@1 → app@2" in told
    assert "reviewer now runs" in told
    data = run("profile", "diff", before, after, "--json").json
    (of,) = data["types"]
    assert of["changed"]
    assert of["agents"][0]["agent"] == "reviewer"
    assert of["agents"][0]["ratio"][1] < of["agents"][0]["ratio"][0] < of["agents"][0]["ratio"][2]
    assert "Nothing changed beyond chance" in run("profile", "diff", before, before).out

    assert "no workflow type 'x'; there are app@1" in run("profile", "show", before, "--type", "x").complaint


def test_another_kind_of_artefact_is_refused(traces: tuple[Path, Path], tmp_path: Path) -> None:
    from cli_samples import FAST
    from cli_samples import train as train_next_agent

    assert train_next_agent(traces[0], "--no-register", "--out", tmp_path / "other", *FAST).code == 0
    wanted = "a next-agent predictor; expected a profile (train-predictor profile)"
    assert wanted in run("profile", "show", tmp_path / "other").complaint
