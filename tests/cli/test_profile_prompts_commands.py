"""What the commands on profiles say of prompts: how they are composed, how well that is foreseen, never a word."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from cli_samples import Ran, run, write
from prompt_samples import leaks, prompted
from registry_database import new_database

from presage.cli.train_predictor import app as train_predictor


def train(*arguments: object) -> Ran:
    return Ran(train_predictor, "profile", *arguments)


def test_templates_from_traces_to_the_report(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    traces = write(tmp_path / "traces.jsonl", prompted(80))
    out, uri = tmp_path / "out", new_database(tmp_path / "mlflow.db")
    ran = train(traces, "--out", out, "--report", tmp_path / "report", "--tracking-uri", uri, "--json")
    assert ran.code == 0, ran.err
    of = ran.json["by_workflow_type"]["loop"]["templates"]
    assert json.loads((out / "metrics.json").read_text())["by_workflow_type"]["loop"]["templates"] == of
    assert (of["precision"], of["prompts"] > 20) == (1.0, True)
    assert of["recall_beyond_cache"] > 0.5
    assert (out / "templates.json").exists()
    page = (out / "report.html").read_text()
    assert "last answer of coder" in page
    assert "with a predicted beginning: precision 1.000" in page

    shown = run("profile", "show", out)
    assert "last answer of tester" in shown.out
    assert "100%" in shown.out
    listed = run("profile", "show", out, "--json")
    assert listed.json["workflow_types"]["loop"]["templates"]["of_agents"][0]["segments"][0]["support"] == 1.0
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path != traces]  # of MLflow, too
    written = [path.read_bytes().decode(errors="replace") for path in files]
    for said in (ran.out, ran.err, caplog.text, shown.out, shown.err, listed.out, *written):
        assert not leaks(said)


def test_stems_are_shown_if_they_are_kept(tmp_path: Path) -> None:
    traces = write(tmp_path / "traces.jsonl", prompted(80))
    assert train(traces, "--no-register", "--out", tmp_path / "out", "--set", "keep_stems=true").code == 0
    assert "You run tests, quixotically." in run("profile", "show", tmp_path / "out").out


@pytest.mark.parametrize(
    ("texts", "settings", "line"),
    [
        (False, (), "prompts: no templates: no prompt (input_text) in the training traces"),
        (True, ("--set", "templates=false"), "prompts: no templates: templates = false"),
    ],
)
def test_one_line_says_why_there_is_no_template(
    tmp_path: Path, texts: bool, settings: tuple[str, ...], line: str
) -> None:
    rows = [row if texts else {**row, "input_text": None, "output_text": None} for row in prompted(40)]
    ran = train(write(tmp_path / "traces.jsonl", rows), "--no-register", "--out", tmp_path / "out", *settings)
    assert ran.out.count(line) == 1
    assert run("profile", "show", tmp_path / "out").out.count(line) == 1
    assert not (tmp_path / "out" / "templates.json").exists()
