"""The commands on a predictor of return times: from traces to a champion, a forecast, and traces without times."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_samples import Ran, run, write
from registry_database import new_database
from return_samples import sessions

import presage
from presage.cli.train_predictor import app as train_predictor
from presage.datasets.ingest import append
from presage.training.return_time.train import evaluate_return_times, train_return_times


def train(*arguments: object) -> Ran:
    return Ran(train_predictor, "return-time", *arguments)


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("returns")
    for name, workflows, seed in (("learnt", 240, 0), ("held", 60, 1)):
        append(sessions(workflows, seed), root / name)
    return root / "learnt", root / "held"


def test_from_traces_to_a_champion_a_forecast_and_the_api(
    stores: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learnt, held = stores
    monkeypatch.setenv("MLFLOW_TRACKING_URI", new_database(tmp_path / "mlflow.db"))
    ran = train(learnt, "--out", tmp_path / "out", "--set", "estimator=forest", "--json")
    assert ran.code == 0, ran.err
    kept = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert {key: ran.json[key] for key in kept} == kept
    assert (kept["kind"], kept["version"]) == ("return-time", 1)
    assert list(kept["pinball"]) == ["0.05", "0.1", "0.25", "0.5", "0.75", "0.9", "0.95", "0.99"]
    usual = kept["baselines"]["agent-and-reason"]["pinball"]["0.5"]
    assert kept["pinball"]["0.5"] < 0.7 * usual
    assert kept["baselines"]["agent-and-tool"]["pinball"]["0.5"] < 0.7 * usual
    assert kept["end"]["brier"] < 0.95 * kept["end"]["brier_base_rate"]
    assert set(kept["profiles"]) == {"ids", "ids+tokens", "+text", "+states", "engine"}
    assert kept["profiles"]["ids+tokens"]["pinball"]["0.5"] > kept["pinball"]["0.5"]  # it cannot see the tools
    assert kept["profiles"]["engine"]["pinball"]["0.5"] == kept["pinball"]["0.5"]

    promoted = run("promote", "return-time", "--version", 1, "--traces", held, "--profile", "full", "--json")
    assert promoted.code == 0, promoted.err
    gates = {gate["name"]: gate for gate in promoted.json["gates"]}
    assert "log seconds" in gates["floor-pinball-0.5"]["reason"]

    steps = [json.loads(line) for line in write_session(tmp_path / "session.jsonl").read_text().splitlines()]
    answer = run("forecast", "models:/return-time@champion", tmp_path / "session.jsonl", "--json").json
    assert (answer["source"], answer["version"]) == ("champion", 1)
    assert list(answer["quantiles"].values()) == sorted(answer["quantiles"].values())
    shown = run("forecast", "models:/return-time@champion", tmp_path / "session.jsonl").out
    assert "It has ended with this step with probability" in shown
    assert "Caches should keep it for" in shown
    model = presage.load("models:/return-time@champion")
    assert model.forecast(steps).to_dict() == {key: answer[key] for key in model.forecast(steps).to_dict()}
    table = presage.read_traces(held)
    assert list(model.predict(table).columns) == list(model.quantiles_)
    assert model.predict_end(table).between(0, 1).all()


def write_session(path: Path) -> Path:
    of = {"workflow_type": "coding", "workflow_id": "now", "agent": "main", "finish_reason": "tool_calls"}
    steps = [
        {**of, "step": 0, "start_time": 0.0, "end_time": 3.0, "input_tokens": 800, "output_tokens": 90},
        {"workflow_type": "coding", "workflow_id": "now", "step": 1, "agent": "pytest", "kind": "tool"},
    ]
    return write(path, steps)


def test_traces_without_times_are_one_error(tmp_path: Path) -> None:
    steps = [
        {"workflow_type": "app", "workflow_id": f"w{w}", "step": s, "agent": "main"} for w in range(8) for s in range(2)
    ]
    ran = train(write(tmp_path / "traces.jsonl", steps), "--no-register", "--out", tmp_path / "out")
    assert ran.code == 2
    assert "expected started_at and ended_at on every LLM step" in ran.err
    assert not (tmp_path / "out").exists()


def test_the_same_traces_and_seed_give_the_same_artefact(stores: tuple[Path, Path], tmp_path: Path) -> None:
    table = presage.read_traces(stores[0]).table
    for name in ("a", "b"):
        train_return_times(table, seed=3, baselines=()).predictor.save(tmp_path / name)
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()


def test_an_evaluation_counts_what_it_leaves_out(stores: tuple[Path, Path]) -> None:
    tables = [presage.read_traces(store).table for store in stores]
    training = train_return_times(*tables, baselines=())
    judged = evaluate_return_times(training.predictor, tables[1], 0, profile="engine").evaluation
    llm = sum(kind == "llm" for kind in tables[1]["kind"].to_pylist())
    assert judged.left_out["the workflow ended"] == 60
    assert int(judged.figures.positions.sum()) == llm - 60
