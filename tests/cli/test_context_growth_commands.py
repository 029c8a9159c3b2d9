"""The commands on a predictor of context growth: from traces to a champion, a forecast and the API."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_samples import Ran, run, write
from context_samples import loops
from registry_database import new_database

import presage
from presage.cli.train_predictor import app as train_predictor
from presage.datasets.ingest import append


def test_from_traces_to_a_champion_a_forecast_and_the_api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seed in (("learnt", 0), ("held", 1)):
        append(loops(120, seed), tmp_path / name)
    learnt, held = tmp_path / "learnt", tmp_path / "held"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", new_database(tmp_path / "mlflow.db"))
    ran = Ran(train_predictor, "context-growth", learnt, "--estimator", "boosted", "--out", tmp_path / "out", "--json")
    assert ran.code == 0, ran.err
    kept = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert (kept["kind"], kept["version"], kept["target"]) == ("context-growth", 1, "final-context")
    assert list(kept["pinball"]) == ["0.1", "0.5", "0.9", "0.99"]
    for rival in ("constant", "median-per-step", "unchanged", "extrapolated"):
        assert kept["pinball"]["0.5"] < kept["baselines"][rival]["pinball"]["0.5"], rival
    assert "Growth of the context" in (tmp_path / "out" / "report.md").read_text()

    promoted = run("promote", "context-growth", "--version", 1, "--traces", held, "--json")
    assert promoted.code == 0, promoted.err
    assert {gate["name"] for gate in promoted.json["gates"]} >= {"floor-pinball-0.5", "coverage-0.9", "latency"}
    next_one = Ran(train_predictor, "context-growth", learnt, "--target", "next-context", "--estimator", "ridge")
    assert next_one.code == 0, next_one.err
    refused = run("promote", "context-growth", "--version", 2, "--traces", held)
    assert "target next-context, the champion's is final-context" in refused.out + refused.err

    of = {"workflow_type": "fix", "workflow_id": "now", "agent": "coder", "output_tokens": 50}
    steps = [{**of, "step": place, "input_tokens": 4000 + 1500 * place} for place in range(4)]
    file = write(tmp_path / "steps.jsonl", steps)
    answer = run("forecast", "models:/context-growth@champion", file, "--json").json
    assert answer["source"] == "champion"
    assert 5000 < answer["quantiles"]["0.5"] < 60_000  # 20 steps of 1,500 are to come, give or take
    shown = run("forecast", "models:/context-growth@champion", file).out
    assert "Tokens by which the context will exceed the prompt" in shown
    model = presage.load("models:/context-growth@champion")
    assert isinstance(model, presage.ContextGrowth)
    assert model.forecast(steps).prediction == answer["quantiles"]["0.5"]
    assert list(model.predict(presage.read_traces(held)).columns) == [0.1, 0.5, 0.9, 0.99]
