"""`train-predictor remaining-length --next-agent`: whose model it may be, and what becomes of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from cli_samples import FAST, Ran, run, write
from cli_samples import train as train_next_agent

from presage.cli.train_predictor import app as train_predictor
from presage.datasets.length_law import generate_lengths
from presage.datasets.store import append

QUICK = ("--estimator", "boosted", "--baselines", "none")


def train(*arguments: object) -> Ran:
    return Ran(train_predictor, "remaining-length", *arguments, *QUICK)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Traces to learn from, others to judge on, and a next-agent model of the former: a folder and version 1."""
    root = tmp_path_factory.mktemp("ahead")
    for name, workflows, seed in (("learnt", 60, 0), ("held", 30, 1)):
        append(generate_lengths(workflows, seed).table, root / name)
    uri = ("--tracking-uri", f"sqlite:///{root / 'mlflow.db'}")
    ran = train_next_agent(
        root / "learnt",
        "--test",
        root / "held",
        "--states",
        "none",
        "--out",
        root / "next",
        "--name",
        "next",
        *uri,
        *FAST,
    )
    assert ran.code == 0, ran.err
    return root


@pytest.mark.slow
def test_a_registered_model_becomes_part_of_the_version(root: Path, tmp_path: Path) -> None:
    uri = ("--tracking-uri", f"sqlite:///{root / 'mlflow.db'}")
    out = tmp_path / "out"
    ran = train(
        root / "learnt", "--test", root / "held", "--next-agent", "models:/next/1", "--out", out,
        "--name", "lengths", *uri, "--json",
    )  # fmt: skip
    assert ran.code == 0, ran.err
    assert "learnt from" not in ran.err, "no test task is the model's"
    assert ran.json["data"]["next-agent model"] == "next version 1"
    assert "3 copies in" in ran.json["data"]["out of fold"]
    assert "next version 1" in (out / "report.md").read_text()
    config = json.loads((out / "config.json").read_text())["config"]["next_agent"]
    assert (config["model"], config["digest"]) == (
        "next version 1",
        json.loads((root / "next" / "config.json").read_text())["digest"],
    )
    steps = write(
        tmp_path / "steps.jsonl", [{"workflow_type": "math", "workflow_id": "w", "step": 0, "agent": "solver"}]
    )
    in_folder = run("forecast", out, steps, "--json").json
    registered = run("forecast", "models:/lengths/1", steps, *uri, "--json").json
    assert in_folder["quantiles"] == registered["quantiles"]
    judged = run("evaluate", "models:/lengths/1", root / "held", *uri, "--json").json
    assert judged["tau_distance"] == ran.json["tau_distance"]


@pytest.mark.slow
def test_a_folder_is_enough_and_is_not_needed_again(root: Path, tmp_path: Path) -> None:
    model = shutil.copytree(root / "next", tmp_path / "who-is-next")
    out = tmp_path / "out"
    ran = train(root / "learnt", "--next-agent", model, "--out", out, "--no-register")
    assert ran.code == 0, ran.err
    # The model saw all of these traces, the lengths are judged on a fifth of them.
    assert "12 test workflows run a task the next-agent model learnt from: the figures may be too good" in ran.err
    assert "test workflows whose task the next-agent model learnt from: 12" in ran.out
    assert "next-agent model: who-is-next" in ran.out
    assert str(tmp_path) not in (out / "config.json").read_text()
    steps = write(
        tmp_path / "steps.jsonl", [{"workflow_type": "math", "workflow_id": "w", "step": 0, "agent": "solver"}]
    )
    before = run("forecast", out, steps, "--json").json
    shutil.rmtree(model)
    assert run("forecast", out, steps, "--json").json == before


def test_what_is_no_next_agent_model_is_named_and_nothing_is_read(root: Path, tmp_path: Path) -> None:
    lengths = tmp_path / "lengths"
    assert train(root / "learnt", "--out", lengths, "--no-register").code == 0
    uri = ("--tracking-uri", f"sqlite:///{tmp_path / 'none.db'}")
    for model, message in {
        str(lengths): "found kind 'remaining-length'; wanted kind 'next-agent'",
        str(tmp_path / "gone"): "found nothing",
        str(root / "learnt"): "wanted an artefact folder",
        "models:/nobody@champion": "no model 'nobody'",
        "models:nobody": "wanted models:/NAME@ALIAS",
    }.items():
        out = tmp_path / "out"
        assert message in train(tmp_path / "no-traces", "--next-agent", model, "--out", out, *uri).complaint
        assert not out.exists()


def test_traces_too_few_to_learn_apart_are_named(root: Path, tmp_path: Path) -> None:
    few = tmp_path / "few"
    table = generate_lengths(60, 0).table
    append(table.filter([name in {"lengths-0-0000000", "lengths-0-0000001", "lengths-0-0000002"}
                         for name in table["workflow_id"].to_pylist()]), few)  # fmt: skip
    ran = train(few, "--next-agent", root / "next", "--out", tmp_path / "out", "--no-register")
    assert "a single task is left for training" in ran.complaint
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_full_report_says_what_the_model_adds(root: Path, tmp_path: Path) -> None:
    learnt = (root / "learnt", "--test", root / "held", "--no-register", "--json")
    plain = train(*learnt, "--report", tmp_path / "plain")
    ran = train(*learnt, "--report", tmp_path / "full", "--next-agent", root / "next")
    assert ran.code == plain.code == 0, ran.err
    assert ran.json["report"] == str(tmp_path / "full")
    kept = json.loads((tmp_path / "full" / "metrics.json").read_text())
    without, gain = kept["without_next_agent"]["figures"], kept["without_next_agent"]["difference"]
    assert without["tau_distance"] == plain.json["tau_distance"], "the same training without it"
    moved = kept["tau_distance"]["all"] - without["tau_distance"]["all"]
    assert gain["tau_distance"]["all"]["difference"] == pytest.approx(moved)
    assert "What the next-agent model adds" in (tmp_path / "full" / "report.html").read_text()
    assert plain.json["without_next_agent"] is None
    assert {"report.html", "report.md", "metrics.json", "coverage.svg"} <= {
        path.name for path in (tmp_path / "plain").iterdir()
    }


def test_a_folder_no_report_fits_into_is_refused_before_anything_is_read(root: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    complaint = train(root / "learnt", "--report", tmp_path / "file", "--no-register").complaint
    assert "--report" in complaint
    assert "is a file" in complaint
