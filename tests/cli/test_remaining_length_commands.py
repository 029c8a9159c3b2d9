"""The commands on a predictor of lengths: from traces to a champion, and one request followed number by number."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from cli_samples import GOOD, Ran, run, write
from registry_database import new_database

from presage.cli.train_predictor import app as train_predictor
from presage.datasets.ingest import append
from presage.datasets.read import read_traces
from presage.datasets.synthetic.lengths import generate_lengths
from presage.features.input_profiles import as_served
from presage.features.lengths import LengthWorkflow, length_rows
from presage.predictors.length.predictor import RemainingLengthPredictor
from presage.registry.connect import open_registry
from presage.registry.package import register
from presage.registry.resolve import resolve
from presage.registry.table import load_predictor
from presage.training.length.train import LengthTraining, train_lengths


def train(*arguments: object) -> Ran:
    return Ran(train_predictor, "remaining-length", *arguments)


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("lengths")
    for name, workflows, seed in (("learnt", 60, 0), ("held", 30, 1)):
        append(generate_lengths(workflows, seed).table, root / name)
    return root / "learnt", root / "held"


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> str:
    return new_database(tmp_path_factory.mktemp("registry") / "mlflow.db")


@pytest.fixture(scope="module")
def training(stores: tuple[Path, Path]) -> LengthTraining:
    tables = [read_traces([store]).table for store in stores]
    return train_lengths(*tables, baselines=("constant",), name="lengths")


@pytest.mark.slow
def test_from_traces_to_a_champion_and_what_evaluate_says_of_it(
    tmp_path: Path, stores: tuple[Path, Path], database: str
) -> None:
    learnt, held = stores
    uri = ("--tracking-uri", database, "--json")
    ran = train(learnt, "--out", tmp_path / "out", "--estimator", "boosted", *uri)
    assert ran.code == 0, ran.err
    kept = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert {key: ran.json[key] for key in kept} == kept
    assert (kept["kind"], kept["version"], kept["target"]) == ("remaining-length", 1, "remaining")
    assert set(kept["baselines"]) == {"constant", "input-length", "median-per-step", "ridge"}
    assert kept["baselines"]["constant"]["tau_distance"]["all"] == 0.5
    assert {file.name for file in (tmp_path / "out").iterdir()} >= {
        "report.html",
        "report.md",
        "predicted.svg",
        "coverage.svg",
        "queue.svg",
    }

    judged = run("promote", "remaining-length", "--version", 1, "--traces", held, "--to", "shadow", *uri).json
    assert {gate["name"] for gate in judged["gates"]} >= {"floor-tau-distance-all", "coverage-0.99", "latency"}
    listed = run("models", *uri).json["models"][0]
    assert (listed["kind"], listed["version"]) == ("remaining-length", 1)
    assert listed["figures"]["tau_distance_all"] == as_served(kept)["tau_distance"]["all"]
    assert f"{kept['tau_distance']['all']:.3f}" in run("models", *uri[:2]).out

    found = run("evaluate", "models:/remaining-length/1", held, *uri).json
    assert (found["model"], found["version"], found["workflows"]) == ("remaining-length", 1, 30)
    assert found["tau_distance"]["all"] < 0.4
    assert "Mean completion of" in run("evaluate", tmp_path / "out", held).out


@pytest.mark.slow
def test_one_request_wherever_it_is_asked_about(
    tmp_path: Path, training: LengthTraining, stores: tuple[Path, Path], database: str
) -> None:
    """From JSON to quantiles: training process, artefact folder, registry and a fresh process, number by number."""
    predictor = training.predictor
    table = read_traces([stores[1]]).table
    steps = [{k: v for k, v in row.items() if v is not None} for row in table.slice(0, 400).to_pylist()]
    steps = [step for step in steps if step["workflow_id"] == steps[0]["workflow_id"]]
    for step in steps:
        step.pop("started_at", None)
        step.pop("ended_at", None)
    for name in ("output_tokens", "output_text"):
        steps[-1].pop(name, None)  # the request that is running now

    # What the request becomes is the row that training would have made of it ...
    whole = length_rows(table, predictor.encoder)
    at = len(steps) - 1
    running = LengthWorkflow(predictor.encoder, steps[0]["workflow_type"])
    for step in steps[:-1]:
        running.begun(step)
        running.completed(step)
    for column, value in zip(("workflow_type", "agent", "model", "numbers"), running.begun(steps[-1]), strict=True):
        np.testing.assert_array_equal(value, getattr(whole, column)[at], err_msg=column)
    # ... and its quantiles are those the evaluation judged.
    expected = predictor.forecast(steps).to_dict()
    told = [expected["quantiles"][str(q)] for q in predictor.quantiles]
    np.testing.assert_allclose(told, predictor.predict(whole)[at], rtol=1e-6)

    training.save(tmp_path / "model")
    registry = open_registry(database)
    made = register(
        registry,
        tmp_path / "model",
        name="followed",
        metrics=training.metrics,
        params={},
        tags={},
        input_example=[{"workflow_type": "x", "workflow_id": "w", "step": 0, "agent": "a", "input_tokens": 1}],
    )
    for folder in (tmp_path / "model", resolve(made.uri, lambda: registry).folder):
        loaded = load_predictor(folder)
        assert isinstance(loaded, RemainingLengthPredictor)
        assert loaded.forecast(steps).to_dict() == expected
    request = write(tmp_path / "steps.jsonl", steps)
    arguments = ("forecast", made.uri, str(request), "--tracking-uri", database, "--json")
    assert run(*arguments).json == {"model": "followed", "version": 1, **expected}
    done = subprocess.run(
        [sys.executable, "-c", "from presage.cli.presage import main; main()", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"model": "followed", "version": 1, **expected}
    for_people = run(*arguments[:-1]).out
    assert all(f"{told[place]:,.0f}" in for_people for place in range(len(told)))


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--estimator", "oracle"), "estimator"),
        (("--quantiles", "0.9,0.5"), "rising numbers"),
        (("--quantiles", "half"), "quantiles"),
        (("--baselines", "tarot"), "no baseline 'tarot'"),
        (("--set", "depth=3"), "no key 'depth'"),
    ],
)
def test_a_wrong_option_is_refused_before_anything_is_read(options: tuple[str, ...], complaint: str) -> None:
    assert complaint in train("no-such-traces", "--no-register", *options).complaint


def test_traces_without_output_tokens_teach_no_lengths(tmp_path: Path) -> None:
    path = write(tmp_path / "bare.jsonl", GOOD)
    assert "output_tokens" in train(path, "--no-register").complaint


def test_the_commands_know_their_kinds_and_no_other() -> None:
    from presage.errors import ArtefactError
    from presage.kinds.loaded import kind_of

    kinds = ("next-agent", "remaining-length", "router")
    assert tuple(kind_of(name).name for name in kinds) == kinds
    with pytest.raises(
        ArtefactError, match="next-agent, remaining-length, context-growth, return-time, profile, router"
    ):
        kind_of("oracle")
