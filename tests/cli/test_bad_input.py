"""Bad input of every kind: one line that names what came, exit code 2, and nothing half-written."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from cli_samples import FAST, GOOD, Ran, changed, run, train, write
from tiny_model import WORKFLOWS, Tiny

from presage.cli.train_predictor import app as train_predictor
from presage.registry.connect import open_registry

TRACES: dict[str, tuple[Any, str]] = {
    "a misspelt column": (
        [{k if k != "agent" else "agent_nme": v for k, v in row.items()} for row in GOOD],
        "found: agent_nme, .* did you mean 'agent' by 'agent_nme'",
    ),
    "a missing value": (changed(4, workflow_id=...), r"line 5, column \"workflow_id\""),
    "an agent with a line break": (
        changed(3, agent="coder\nv2"),
        r"'coder\\nv2' holds a line break or control character",
    ),
    "a workflow with a control character": (changed(3, workflow_id="w\x00"), r"'w\\x00' holds a line break or control"),
    "an agent named END": (changed(3, agent="END"), "'END' is no agent"),
}
"""What else can be wrong with a trace: tests/datasets."""


@pytest.mark.parametrize("kind", TRACES)
def test_a_bad_trace_is_named_and_nothing_is_written(tmp_path: Path, kind: str) -> None:
    lines, message = TRACES[kind]
    path = write(tmp_path / "bad.jsonl", lines)
    for ran in (
        run("traces", "ingest", path, "--to", tmp_path / "store"),
        train(path, "--out", tmp_path / "out", "--tracking-uri", f"sqlite:///{tmp_path / 'mlflow.db'}", *FAST),
    ):
        assert "bad.jsonl" in ran.complaint
        assert re.search(message, ran.complaint)
    assert [entry.name for entry in tmp_path.iterdir()] == ["bad.jsonl"]


def test_a_trace_given_for_outcomes_and_the_reverse_are_called_what_they_are(tmp_path: Path) -> None:
    trace, store = write(tmp_path / "trace.jsonl", GOOD), tmp_path / "store"
    assert run("traces", "ingest", trace, "--to", store).code == 0
    pd.DataFrame(GOOD).to_csv(tmp_path / "trace.csv", index=False)
    spans = write(tmp_path / "spans.json", [{"resourceSpans": []}])
    for path in (trace, tmp_path / "trace.csv", spans):
        said = f"{path}: this is a trace; a router learns from outcomes: rows with prompt, model and correct"
        assert said in Ran(train_predictor, "router", path, "--no-register").complaint
    assert f"{store}: this is a trace store; a router" in run("outcomes", "describe", store).complaint
    outcomes = [{"prompt": "secret", "model": "m", "correct": 1}]
    pd.DataFrame(outcomes).to_parquet(tmp_path / "outcomes.parquet")
    pd.DataFrame(outcomes).to_csv(tmp_path / "outcomes.csv", index=False)
    for path in (write(tmp_path / "o.jsonl", outcomes), tmp_path / "outcomes.parquet", tmp_path / "outcomes.csv"):
        for ran in (train(path, "--no-register"), run("traces", "describe", path)):
            assert f"{path}: these are outcomes, which a router learns from; expected a trace" in ran.complaint
            assert "secret" not in ran.complaint


def test_skip_bad_counts_and_reports(tmp_path: Path) -> None:
    path = write(tmp_path / "bad.jsonl", [*changed(4, step="four"), "{"])
    ran = run("traces", "ingest", path, "--to", tmp_path / "store", "--skip-bad", "--json")
    assert ran.code == 0
    assert ran.json["skipped"] == {
        "line with step of a wrong type": 1,
        "line with no JSON": 1,
        "workflow with a skipped row": 2,
    }
    assert ran.json["workflows"] == 4
    trained = train(path, "--skip-bad", "--no-register", *FAST)
    assert trained.code == 0
    assert "skipped 1 × line with no JSON" in trained.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--set", "network.epoch=3"), "no key 'network.epoch'"),
        (("--set", "network.epochs=many"), "a value of type int is wanted"),
        (("--set", "network.epochs=0"), "at least 1"),
        (("--set", "network.epochs"), "wanted key=value"),
        (("--config", "nowhere.toml"), "nowhere.toml: cannot be read"),
        (("--states", "captured"), "no step of the training traces has a prefill_state"),
        (("--states", "text"), "no step of the training traces has an input_text"),
        (("--baselines", "markov-9"), "no baseline 'markov-9'"),
        (("--baselines", "default,rgcn-2"), "no baseline 'rgcn-2'; there are: markov-1,"),
        (("--test", "nowhere.jsonl"), "nowhere.jsonl: no such file"),
    ],
)
def test_options_that_cannot_be_are_named(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    path = write(tmp_path / "good.jsonl", GOOD)
    assert message in train(path, "--out", tmp_path / "out", "--no-register", *arguments).complaint
    assert not (tmp_path / "out").exists()


def test_a_text_encoder_that_is_not_there_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "good.jsonl", [{**row, "input_text": "hello there"} for row in GOOD])
    ran = train(path, "--states", "text", "--text-encoder", tmp_path / "nowhere", "--no-register", *FAST)
    assert "nowhere" in ran.complaint
    assert "hello" not in ran.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--horizon", "0"), "Invalid value for '--horizon'"),
        (("--horizon", "x"), "Invalid value for '--horizon'"),
        (("--seed", "-1"), "Invalid value for '--seed'"),
        (("--nonsense",), "No such option: --nonsense"),
        (("--states", "magic"), "'magic' is not one of 'auto', 'captured', 'text', 'none'"),
    ],
)
def test_usage_errors_exit_with_2(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    assert message in train(write(tmp_path / "good.jsonl", GOOD), *arguments).usage_error


@pytest.mark.parametrize("name", ["thesis.txt", "config.json"])
def test_an_output_folder_that_holds_something_else_is_refused_before_training(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "good.jsonl", GOOD)
    out = tmp_path / "out"
    out.mkdir()
    (out / name).write_text('{"years of": "work"}')
    ran = train(path, "--out", out, "--no-register", *FAST)
    assert "is no Presage artefact; nothing was overwritten" in ran.complaint
    assert "learning" not in ran.err
    assert [entry.name for entry in out.iterdir()] == [name]
    assert "is a file" in train(path, "--out", path, "--no-register", *FAST).complaint
    assert "is a file" in train(path, "--out", path / "inside", "--no-register", *FAST).complaint


def test_a_broken_model_folder_is_named(tmp_path: Path, tiny: Tiny) -> None:
    """What else can be wrong with one: tests/predictors/test_artefact.py."""
    steps = write(tmp_path / "steps.jsonl", WORKFLOWS["loop"])
    folder = shutil.copytree(tiny.folder, tmp_path / "model")
    (folder / "weights.pkl").write_bytes(b"\x80\x04.")
    for broken, message in ((folder, "looks like a pickle (weights.pkl)"), (tmp_path / "gone", "an artefact folder")):
        assert message in run("forecast", broken, steps).complaint
        assert message in run("evaluate", broken, tiny.held_out).complaint


def test_a_model_reference_that_means_nothing_is_named(tmp_path: Path) -> None:
    steps, database = write(tmp_path / "steps.jsonl", WORKFLOWS["loop"]), f"sqlite:///{tmp_path / 'r.db'}"
    assert "wanted models:/NAME@ALIAS" in run("forecast", "models:next-agent", steps).complaint
    for command in (
        ("forecast", "models:/nobody@champion", steps),
        ("promote", "nobody", "--version", 1, "--traces", steps),
        ("rollback", "nobody"),
    ):
        assert f"there is no {tmp_path / 'r.db'}" in run(*command, "--tracking-uri", database).complaint
        assert not (tmp_path / "r.db").exists()
    open_registry(database)
    assert "no model 'nobody'" in run("rollback", "nobody", "--tracking-uri", database).complaint


STEPS: dict[str, tuple[Any, str]] = {
    "nothing": ([], "an empty trace"),
    "two workflows": ([*WORKFLOWS["loop"], *WORKFLOWS["retries"]], "steps of 2 workflows; wanted one workflow"),
    "no beginning": (WORKFLOWS["loop"][1:], "step 1 of workflow"),
    "a state of another model": (
        [{**WORKFLOWS["one step"][0], "prefill_state": [1.0] * 5}],
        "prefill_state has 5 numbers; the predictor was trained with 16",
    ),
}


@pytest.mark.parametrize("kind", STEPS)
def test_steps_that_cannot_be_forecast_are_named(tmp_path: Path, tiny: Tiny, kind: str) -> None:
    lines, message = STEPS[kind]
    assert message in run("forecast", tiny.folder, write(tmp_path / "steps.jsonl", lines)).complaint


def test_a_registry_that_is_down_is_said_before_the_training(tmp_path: Path) -> None:
    path = write(tmp_path / "good.jsonl", GOOD)
    ran = train(path, "--out", tmp_path / "out", "--tracking-uri", "http://127.0.0.1:9", *FAST)
    assert "the MLflow server at http://127.0.0.1:9 does not answer" in ran.complaint
    assert "reading" not in ran.err
    assert not (tmp_path / "out").exists()
    for command in (("models",), ("rollback", "x"), ("promote", "x", "--version", 1, "--traces", path)):
        assert "does not answer" in run(*command, "--tracking-uri", "http://127.0.0.1:9").complaint


def test_a_name_that_no_model_may_have_is_refused_before_the_training(tmp_path: Path) -> None:
    path = write(tmp_path / "good.jsonl", GOOD)
    ran = train(path, "--name", "a/b", "--tracking-uri", f"sqlite:///{tmp_path / 'r.db'}", *FAST)
    assert "model name 'a/b'" in ran.complaint
    assert not (tmp_path / "r.db").exists()


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)


@pytest.mark.usefixtures("full_disk")
def test_a_full_disk_leaves_no_artefact_and_no_store(tmp_path: Path) -> None:
    path = write(tmp_path / "good.jsonl", GOOD)
    assert "No space left" in train(path, "--out", tmp_path / "out", "--no-register", *FAST).complaint
    assert not (tmp_path / "out").exists()
    assert "No space left" in run("traces", "ingest", path, "--to", tmp_path / "store").complaint
    assert not (tmp_path / "store").exists()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_a_full_disk_behind_standard_output_is_one_line(tiny: Tiny) -> None:
    code = "from presage.cli.presage import main; main()"
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", code, "traces", "describe", str(tiny.store), "--json"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("presage: standard output: No space left")
    assert "Traceback" not in done.stderr


def test_an_error_of_ours_is_called_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("at home")

    monkeypatch.setattr("presage.datasets.describe.describe", broken)
    path = write(tmp_path / "good.jsonl", GOOD)
    ran = run("traces", "describe", path)
    assert ran.code == 1
    last = ran.err.splitlines()[-1]
    assert last == "presage: failed unexpectedly: ZeroDivisionError (set PRESAGE_TRACEBACK=1 to see all of it)"
    monkeypatch.setenv("PRESAGE_TRACEBACK", "1")
    assert "Traceback" in run("traces", "describe", path).err


def test_an_interrupt_exits_with_130(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("presage.datasets.describe.describe", interrupted)
    ran = run("traces", "describe", write(tmp_path / "good.jsonl", GOOD))
    assert ran.code == 130
    assert ran.err.splitlines()[-1] == "presage: interrupted"
