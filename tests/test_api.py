"""The Python API: what a data scientist types, from traces to a promoted version and back."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from IPython.core.formatters import HTMLFormatter
from mlflow import MlflowClient
from sklearn.base import clone
from sklearn.exceptions import NotFittedError

import presage
from presage.datasets.synthetic.lengths import generate_lengths
from presage.datasets.synthetic.outcomes import generate_outcomes
from presage.datasets.synthetic.workflows import generate
from presage.errors import ConfigurationError, TraceError
from presage.predictors.next_agent.parts import NextAgentConfig
from presage.predictors.quantiles.choice import QuantileConfig
from presage.training.configuration import read_configuration
from presage.training.next_agent.train import LIMITS

FAST = read_configuration(NextAgentConfig, None, ("network.epochs=2", "boosting.rounds=10"), LIMITS)


@pytest.fixture(scope="module")
def traces() -> presage.Traces:
    return presage.read_traces(generate("triage", 80, 0).table.to_pandas())


@pytest.fixture(scope="module")
def model(traces: presage.Traces) -> presage.NextAgent:
    train, _ = presage.split(traces)
    return presage.NextAgent(horizon=2, states="none", config=FAST).fit(train)


def test_importing_the_api_is_light() -> None:
    code = "import sys, presage; presage.__all__; print([m for m in ('torch', 'mlflow', 'vllm') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
    assert {name for name in presage.__all__ if getattr(presage, name, None) is None} == set()
    with pytest.raises(AttributeError, match="no attribute 'NextAgents'"):
        _ = presage.NextAgents


def test_traces_show_what_they_hold(traces: presage.Traces) -> None:
    assert repr(traces) == f"Traces(80 workflows, {len(traces):,} steps; workflow types: triage)"
    train, test = presage.split(traces, test_size=0.25)
    assert (train.workflows + test.workflows, test.workflows) == (80, 20)
    assert not set(train.to_pandas()["workflow_id"]) & set(test.to_pandas()["workflow_id"])


def test_parameters_follow_scikit_learn(model: presage.NextAgent) -> None:
    fresh = clone(model)
    assert fresh.get_params() == model.get_params()
    assert fresh.set_params(horizon=5).horizon == 5
    assert "horizon=2" in repr(model)
    with pytest.raises(NotFittedError):
        fresh.predict([])


@pytest.mark.parametrize("verbose", [False, True])
def test_a_fit_prints_what_it_does_if_it_is_asked_to(
    traces: presage.Traces, capsys: pytest.CaptureFixture[str], verbose: bool
) -> None:
    presage.Profile(verbose=verbose).fit(traces)
    said = capsys.readouterr()
    assert (said.out, bool(said.err)) == ("", verbose)
    assert "…" in said.err or not verbose


@pytest.mark.slow
def test_probabilities_are_those_of_the_forecast_of_one_workflow(
    model: presage.NextAgent, traces: presage.Traces
) -> None:
    test = presage.split(traces)[1]
    found = model.predict_proba(test, steps_ahead=2)
    assert list(found.columns) == list(model.classes_)
    np.testing.assert_allclose(found.sum(axis=1), 1, atol=1e-5)
    frame = test.to_pandas()
    one = frame[frame["workflow_id"] == frame["workflow_id"][0]]
    steps = one[["workflow_type", "workflow_id", "step", "agent", "input_tokens", "output_tokens"]].to_dict("records")
    forecast = model.forecast(steps)
    np.testing.assert_allclose(forecast.to_frame().sum(axis=1), 1, atol=1e-5)
    last = found.loc[(one["workflow_type"].iloc[-1], one["workflow_id"].iloc[-1], one["step"].iloc[-1])]
    np.testing.assert_allclose(last.drop("END"), list(forecast.agents[1].values()), atol=1e-6)
    assert last["END"] == pytest.approx(forecast.end[1], abs=1e-6)
    assert (model.predict(test, steps_ahead=2) == found.idxmax(axis=1)).all()
    with pytest.raises(ConfigurationError, match="steps_ahead is 3; the model forecasts 1 to 2"):
        model.predict_proba(test, steps_ahead=3)
    with pytest.raises(ConfigurationError, match="moment is 'middle'"):
        model.predict_proba(test, moment="middle")  # type: ignore[arg-type]


@pytest.mark.slow
def test_from_traces_to_a_champion_and_back(
    model: presage.NextAgent, traces: presage.Traces, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    report = model.evaluate(traces, baselines="markov-1")  # its training workflows are left out
    assert report.metrics["workflows"] == 16
    frame = report.to_frame()
    assert list(frame.index) == ["presage", "markov-1"]
    assert frame.loc["markov-1", "completion_accuracy_1"] == report.metrics["baselines"]["markov-1"]["accuracy"][0]
    assert "completion" in repr(report)
    assert "fit_seconds" not in repr(report)
    assert "<table" in HTMLFormatter()(report)
    assert len(report.plot().axes) == 2
    made = model.register("agents", report)
    assert made.uri == "models:/agents/1"
    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    version, run = client.get_model_version("agents", "1"), client.get_run(made.run_id)
    assert version.description == run.data.tags["mlflow.note.content"]
    assert "all held out" in version.description
    assert [one.dataset.name for one in run.inputs.dataset_inputs] == ["training traces", "test traces"]
    (logged,) = client.search_logged_models([run.info.experiment_id])
    of_model = {one.key: one.value for one in sorted(logged.metrics, key=lambda one: one.step)}
    assert of_model == run.data.metrics
    assert logged.params == run.data.params
    assert [one.model_id for one in run.outputs.model_outputs] == [logged.model_id]
    assert json.loads(logged.tags["mlflow.modelVersions"]) == [{"name": "agents", "version": 1}]
    assert {one.dataset_name for one in logged.metrics if "accuracy" in one.key} == {"test traces"}
    losses = client.get_metric_history(made.run_id, "epoch/validation_loss")
    assert [one.step for one in losses] == list(range(1, len(losses) + 1))
    assert [one.value for one in losses] == pytest.approx(report.metrics["curves"]["validation_loss"])
    assert len(losses) > 1
    (child,) = client.search_runs([run.info.experiment_id], f"tags.`mlflow.parentRunId` = '{made.run_id}'")
    assert child.info.run_name == "markov-1"
    assert child.data.metrics["completion_accuracy_1"] == frame.loc["markov-1", "completion_accuracy_1"]
    assert set(child.data.metrics) - {"workflows"} <= set(run.data.metrics)
    later = generate("triage", 60, 1).table.to_pandas()
    verdict = presage.promote("agents", 1, later, profile="full")
    assert (verdict.promoted, {gate.passed for gate in verdict.gates}) == (True, {True})
    assert verdict.to_frame()["passed"].all()
    assert "every gate passed" in HTMLFormatter()(verdict)
    again = presage.load("models:/agents@champion")
    assert isinstance(again, presage.NextAgent)
    pd.testing.assert_frame_equal(again.predict_proba(later), model.predict_proba(later))
    judged = again.evaluate(later)
    assert list(judged.metrics["baselines"]) == ["n-gram"]
    with pytest.raises(ConfigurationError, match="not of this fitted estimator"):
        again.register("agents", judged)
    with pytest.raises(TraceError, match="the model was trained on"):
        again.evaluate(presage.split(traces)[0])
    model.save("folder", report)
    assert {path.name for path in Path("folder").iterdir()} >= {"config.json", "model.safetensors", "report.html"}
    assert presage.load("folder").get_params()["horizon"] == 2


def test_a_model_is_trained_further_from_where_an_older_one_stands(
    model: presage.NextAgent, traces: presage.Traces, tmp_path: Path
) -> None:
    model.save(tmp_path / "old")
    renamed = generate("triage", 40, 1).table.to_pandas()
    (gone, *_), new = sorted(set(renamed["agent"])), "newcomer"
    renamed["agent"] = renamed["agent"].replace(gone, new)
    newer, test = presage.split(presage.read_traces(renamed))
    further = presage.NextAgent(horizon=2, start_from=tmp_path / "old").fit(newer)
    assert set(further.classes_) == {*model.classes_, new}
    report = further.evaluate(test, baselines="none")
    assert list(report.to_frame().index) == ["presage", "old model"]
    assert report.metrics["started_from"]["model"] == str(tmp_path / "old")
    with pytest.raises(ConfigurationError, match=r"horizon is 3; .* forecasts 2 steps"):
        presage.NextAgent(start_from=tmp_path / "old").fit(newer)
    with pytest.raises(ConfigurationError, match="omit config, states and text_encoder"):
        presage.NextAgent(horizon=2, config=FAST, start_from=tmp_path / "old").fit(newer)


@pytest.mark.slow
def test_remaining_length(tmp_path: Path) -> None:
    train, test = presage.split(presage.Traces(generate_lengths(120, 0).table, {}))
    model = presage.RemainingLength(config=QuantileConfig(estimator="boosted")).fit(train)
    found = model.predict(test)
    assert (tuple(found.columns), len(found)) == (model.quantiles_, sum(test.to_pandas()["kind"] == "llm"))
    assert (found.diff(axis=1).iloc[:, 1:] >= 0).all(axis=None)
    beyond, first = model.beyond_calibration(test), test.to_pandas().iloc[0].dropna().to_dict()
    assert beyond.columns.equals(found.columns)
    assert beyond.iloc[0].any() == model.forecast([first]).beyond_calibration
    estimator = model.predictor_.estimator
    kept, estimator.largest = estimator.largest, np.full_like(estimator.largest, 1.0)
    assert model.beyond_calibration(test).equals(found.round() > 1.0)
    estimator.largest = kept
    report = model.evaluate(test, baselines="constant")
    assert list(report.to_frame().index) == ["presage", "constant"]
    report.plot()
    model.save(tmp_path / "model", report)
    pd.testing.assert_frame_equal(presage.load(tmp_path / "model").predict(test), found)


@pytest.mark.slow
def test_router(tmp_path: Path) -> None:
    train, test = presage.split(generate_outcomes(500, 0).outcomes)
    lines = [{"prompt": f"add {i}", "model": m, "correct": i % 2} for i in range(20) for m in ("small", "large")]
    (tmp_path / "o.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [len(part) for part in presage.split(presage.read_outcomes(tmp_path / "o.jsonl"))] == [17, 3]
    model = presage.Router().fit(train)
    found = model.predict_proba(test.prompts[:5])
    assert (list(found.columns), len(found)) == (list(model.classes_), 5)
    assert set(model.predict(test.prompts[:5])) <= set(model.classes_)
    report = model.evaluate(test, baselines="base-rate")
    assert list(report.to_frame().index) == ["presage", "base-rate"]
    report.plot()
    model.save(tmp_path / "model")
    pd.testing.assert_frame_equal(presage.load(tmp_path / "model").predict_proba(test.prompts[:5]), found)
