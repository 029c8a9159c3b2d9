"""The commands as a user types them: from traces to a promoted version, and back."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from cli_samples import FAST, GOOD, run, train, write
from registry_database import new_database
from tiny_model import WORKFLOWS, Tiny

from presage.datasets.read import read_traces
from presage.registry.connect import open_registry
from presage.registry.resolve import resolve
from presage.registry.table import load_predictor


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> str:
    return new_database(tmp_path_factory.mktemp("registry") / "mlflow.db")


def test_ingest_appends_once_and_describe_counts(tmp_path: Path) -> None:
    path = write(tmp_path / "good.jsonl", GOOD)
    first, again = (run("traces", "ingest", path, "--to", tmp_path / "store", "--json") for _ in range(2))
    assert (first.code, first.json["workflows"], first.json["steps"]) == (0, 6, len(GOOD))
    assert (again.json["workflows"], again.json["already_present"]) == (0, 6)
    described = run("traces", "describe", tmp_path / "store", "--json").json
    assert described == run("traces", "describe", path, "--json").json
    assert described["workflow_types"]["t"]["agents"] == {"b": 8, "a": 7, "c": 4}
    text = run("traces", "describe", tmp_path / "store").out
    assert "call graph" in text
    assert "END" in text
    assert "finish reasons" not in text


def test_describe_says_why_requests_finished(tmp_path: Path) -> None:
    rows = [{**one, "finish_reason": "length" if one["step"] else "stop"} for one in GOOD]
    path, page = write(tmp_path / "good.jsonl", rows), tmp_path / "traces.html"
    shares = run("traces", "describe", path, "--json").json["workflow_types"]["t"]["finish_reasons"]
    assert shares == {"length": pytest.approx(13 / 19), "stop": pytest.approx(6 / 19)}
    assert "length 68.4%, stop 31.6%" in run("traces", "describe", path, "--html", page).out
    assert "length 0.684, stop 0.316" in page.read_text()


def test_generate_is_a_function_of_its_arguments(tmp_path: Path) -> None:
    options = ("triage", "--workflows", 20, "--seed", 3, "--state-size", 16, "--censored", 0.5)
    assert run("traces", "generate", "--process", *options, "--to", tmp_path / "one").code == 0
    renamed = run("traces", "generate", "--law", *options, "--to", tmp_path / "two")
    assert renamed.code == 0
    assert "--law is deprecated; use --process" in renamed.err
    assert read_traces([tmp_path / "one"]).table.equals(read_traces([tmp_path / "two"]).table)
    described = run("traces", "describe", tmp_path / "one", "--json").json["workflow_types"]["triage"]
    assert described["censored_share"] > 0
    assert described["states"]["prefill_state"] == {"size": 16, "share": 1.0}
    assert (
        "choose one of retry, research, triage, lengths"
        in run("traces", "generate", "--process", "murphy", "--to", tmp_path / "three").complaint
    )


def test_a_folder_gets_the_artefact_and_the_numbers_that_are_printed(tmp_path: Path, tiny: Tiny) -> None:
    ran = train(tiny.store, "--out", tmp_path / "out", "--no-register", "--json", *FAST)
    assert ran.code == 0
    kept = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert {key: ran.json[key] for key in kept} == kept
    assert (ran.json["folder"], ran.json["registered"], ran.json["version"]) == (str(tmp_path / "out"), None, None)
    report = ["call-graph.svg", "reliability.svg", "report.html", "report.md"]
    files = sorted(["config.json", "metrics.json", "model.safetensors", *report])
    assert sorted(entry.name for entry in (tmp_path / "out").iterdir()) == files
    before = {file: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    refused = train(tiny.store, "--out", tmp_path / "out", "--no-register", *FAST)
    assert "holds config.json and metrics.json and report.html of an earlier run: give --force" in refused.complaint
    assert "…" not in refused.err, "nothing was begun"
    assert {file: file.read_bytes() for file in (tmp_path / "out").iterdir()} == before
    again = train(tiny.store, "--out", tmp_path / "out", "--force", "--no-register", "--seed", 1, *FAST)
    assert again.code == 0, "with --force, an earlier artefact is replaced"
    assert (tmp_path / "out" / "config.json").read_bytes() != before[tmp_path / "out" / "config.json"]
    assert "Accuracy by steps ahead" in again.out
    assert "judging on the test set …" in again.err
    database = new_database(tmp_path / "later.db")
    for version in (1, 2):
        later = run("register", tmp_path / "out", "--name", "later", "--tracking-uri", database, "--json")
        assert (later.json["registered"], later.json["version"]) == (f"models:/later/{version}", version)
    known = run("models", "--tracking-uri", database, "--json").json["models"]
    assert [(one["name"], one["version"]) for one in known] == [("later", 2), ("later", 1)]
    (tmp_path / "out" / "metrics.json").unlink()
    assert "no metrics.json of a training" in run("register", tmp_path / "out").complaint


def test_from_traces_to_a_champion_to_a_refusal_and_back(tmp_path: Path, tiny: Tiny, database: str) -> None:
    uri = ("--tracking-uri", database, "--json")
    held = ("--traces", tiny.held_out)

    def registered(*options: object) -> dict[str, Any]:
        ran = train(*options, "--name", "spine", "--baselines", "markov-3", *uri)
        assert ran.code == 0, ran.err
        return ran.json

    good = ("--set", "network.epochs=6", "--set", "boosting.rounds=20")
    assert registered(tiny.store, *good, "--out", tmp_path / "good")["registered"] == "models:/spine/1"
    dry = run("promote", "spine", "--version", 1, *held, "--dry-run", *uri)
    assert (dry.code, dry.json["promoted"], dry.json["moved"]) == (0, True, False)
    first = run("promote", "spine", "--version", 1, *held, *uri)
    assert (first.code, first.json["promoted"], first.json["moved"]) == (0, True, True)
    assert {gate["name"] for gate in first.json["gates"]} >= {"evidence", "floor-prefill-1", "latency", "pickle"}

    worse = tmp_path / "worse"
    run("traces", "generate", "--process", "retry", "--workflows", 5, "--seed", 9, "--state-size", 16, "--to", worse)
    out = tmp_path / "out"
    poor = registered(worse, "--set", "network.epochs=1", "--set", "boosting.rounds=0", "--out", out)
    assert poor["version"] == json.loads((out / "metrics.json").read_text())["version"] == 2
    refused = run("promote", "spine", "--version", 2, *held, *uri)
    assert (refused.code, refused.json["promoted"]) == (3, False)
    assert any(not gate["passed"] and gate["reason"] for gate in refused.json["gates"])
    assert "was refused; champion stays" in run("promote", "spine", "--version", 2, *held, *uri[:2]).out

    assert run("register", tmp_path / "good", "--name", "spine", *uri).json["version"] == 3
    assert run("promote", "spine", "--version", 3, *held, "--to", "shadow", *uri).code == 0
    listed = {entry["version"]: entry for entry in run("models", *uri).json["models"]}
    assert [listed[version]["verdict"] for version in (1, 2, 3)] == ["promoted", "refused", "promoted"]
    assert (listed[1]["aliases"], listed[3]["aliases"]) == (["champion"], ["shadow"])
    assert "refused, " in run("models", *uri[:2]).out

    judged = run("evaluate", "models:/spine@champion", tiny.held_out, *uri).json
    assert (judged["model"], judged["version"], judged["workflows"]) == ("spine", 1, 40)
    assert judged["moments"]["prefill"]["accuracy"][0] > 0.5
    assert list(judged["baselines"]) == ["n-gram"]

    equal = run("promote", "spine", "--version", 3, *held, *uri)
    assert (equal.code, equal.json["previous"], equal.json["moved"]) == (0, 1, True)
    assert run("rollback", "spine", *uri).json == {"name": "spine", "alias": "champion", "from": 3, "to": 1}
    newest = run("models", *uri).json["models"][0]
    assert (newest["version"], newest["rolled_back"]) == (3, True)
    assert "nothing to roll back to" in run("rollback", "spine", *uri[:2]).complaint


def test_a_model_that_lost_says_so_last_and_is_not_promoted(tmp_path: Path, tiny: Tiny, database: str) -> None:
    poor = ("--test", tiny.held_out, "--set", "network.epochs=1", "--set", 'mixture=["network"]')
    poor += ("--baselines", "markov-3")
    ran = train(tiny.store, "--out", tmp_path / "out", "--name", "loser", "--tracking-uri", database, *poor)
    assert ran.code == 0
    last = ran.out[ran.out.index("LOST: ") :]
    assert "markov-3 is better before the output, 1 step ahead by 0." in last
    assert "registered as" not in last, "nothing comes after it"
    assert "What to try: more workflows" in last
    report = (tmp_path / "out" / "report.md").read_text()
    assert (
        report.index("LOST: ") < report.index("## Where a baseline is better") < report.index("## What it learnt from")
    )
    assert "LOST" in run("models", "--tracking-uri", database).out
    refused = run("promote", "loser", "--version", 1, "--traces", tiny.held_out, "--tracking-uri", database, "--json")
    assert refused.code == 3
    floor = next(gate for gate in refused.json["gates"] if gate["name"] == "floor-markov-3")
    assert not floor["passed"]
    quiet = train(tiny.store, "--no-register", *poor, "--json")
    assert quiet.json["behind"]
    assert "LOST: " in quiet.err


def test_a_version_is_judged_under_what_will_ask_it(tiny: Tiny, tmp_path: Path, database: str) -> None:
    uri = ("--tracking-uri", database, "--json")
    learnt = shutil.copytree(tiny.folder, tmp_path / "learnt")  # its metrics get name and version
    assert run("register", learnt, "--name", "profiles", *uri).code == 0
    judged = {}
    for target in ("engine", "gateway", "full"):
        ran = run("promote", "profiles", "--version", 1, "--traces", tiny.held_out, "--profile", target, *uri)
        assert ran.json["profile"] == target
        judged[target] = {gate["name"]: gate["value"] for gate in ran.json["gates"]}
        tags = open_registry(database).version("profiles", 1).tags
        assert tags["presage.verdict.profile"] == target
        assert len(tags) <= 6
        assert tags["presage.headline"].startswith("prefill 0.")
    assert judged["engine"]["calibration-prefill-1"] != judged["gateway"]["calibration-prefill-1"], (
        "a gateway sees no hidden state"
    )
    assert judged["engine"]["calibration-prefill-1"] == judged["full"]["calibration-prefill-1"], (
        "these states need no text"
    )
    wrong = run("promote", "profiles", "--version", 1, "--traces", tiny.held_out, "--profile", "router", *uri[:2])
    assert "'router' is not one of 'engine', 'gateway', 'full'" in wrong.usage_error


def test_a_champion_that_cannot_be_read_does_not_bar_its_successor(tiny: Tiny, tmp_path: Path) -> None:
    """As after an upgrade of Presage, where the champion has an earlier format."""
    database = new_database(tmp_path / "mlflow.db")
    uri = ("--tracking-uri", database, "--json")
    held = ("--traces", tiny.held_out)
    learnt = shutil.copytree(tiny.folder, tmp_path / "learnt")  # its metrics get name and version
    assert run("register", learnt, "--name", "old", *uri).code == 0
    assert run("promote", "old", "--version", 1, *held, *uri).code == 0
    for config in (tmp_path / "mlartifacts").rglob("artefact/config.json"):
        config.write_text(json.dumps(json.loads(config.read_text()) | {"format_version": 1}))
    assert run("register", learnt, "--name", "old", *uri).code == 0
    ran = run("promote", "old", "--version", 2, *held, *uri)
    assert (ran.code, ran.json["moved"], ran.json["previous"]) == (0, True, 1)
    assert "the champion, version 1, cannot be read" in ran.err
    assert "comparing with baselines only" in ran.err


def test_traces_of_another_application_are_no_table_of_zeros(tmp_path: Path, tiny: Tiny) -> None:
    said = run("evaluate", tiny.folder, write(tmp_path / "other.jsonl", GOOD)).complaint
    assert "none of these agents are known: the traces name 'a', 'b', 'c', the model was trained on " in said


def test_traces_of_the_training_prove_nothing(tmp_path: Path, tiny: Tiny, database: str) -> None:
    uri = ("--tracking-uri", database, "--json")
    ran = train(tiny.store, "--test", tiny.held_out, "--name", "own", *uri, *FAST[:-1], "markov-1")
    assert ran.code == 0
    again = run("promote", "own", "--version", 1, "--traces", tiny.store, *uri)
    assert "of tasks that the model was trained on" in again.complaint
    both = run("promote", "own", "--version", 1, "--traces", tiny.store, "--traces", tiny.held_out, *uri)
    assert (both.code, both.json["left_out"]) == (0, 80)


def test_a_registered_version_shows_no_text_and_no_state_of_the_traces(tiny: Tiny, tmp_path: Path) -> None:
    database = new_database(tmp_path / "mlflow.db")
    assert train(tiny.store, "--name", "private", "--tracking-uri", database, *FAST).code == 0
    table = read_traces([tiny.store]).table
    texts = [text[:20] for text in table["input_text"].to_pylist()[:50] if text]
    examples = list((tmp_path / "mlartifacts").rglob("*input_example*.json"))
    assert examples
    for path in (tmp_path / "mlartifacts").rglob("*.json"):
        content = path.read_text()
        assert not any(text in content for text in texts), path
    for path in examples:
        said = json.loads(path.read_text())
        said = said.get("dataframe_split", said)  # the one MLflow keeps, and the one it would send to a server
        rows = [dict(zip(said["columns"], row, strict=True)) for row in said["data"]]
        assert [row["prefill_state"] for row in rows] == [[0.0] * 16] * len(rows)
        assert {row["workflow_id"] for row in rows} == {"example"}


def test_forecast_prints_a_table_for_people(tmp_path: Path, tiny: Tiny) -> None:
    ran = run("forecast", tiny.folder, write(tmp_path / "steps.jsonl", WORKFLOWS["loop"]))
    assert ran.code == 0
    assert "Before the output of step 6 (tester) of retry-7: probabilities" in ran.out
    assert "END: the workflow ends there." in ran.out
    assert "source champion" in ran.out


@pytest.mark.slow
def test_what_pandas_wrote_serves_every_command(tmp_path: Path, tiny: Tiny) -> None:
    frame = pd.DataFrame(read_traces([tiny.held_out]).table.to_pylist())
    plain = frame.drop(columns=["prefill_state", "completion_state"])
    csv, parquet = tmp_path / "held-out.csv", tmp_path / "held-out.parquet"
    plain.to_csv(csv, index=False)
    frame.to_parquet(parquet)
    as_store = run("traces", "describe", tiny.held_out, "--json").json
    assert run("traces", "describe", parquet, "--json").json == as_store
    for file in (csv, parquet):
        assert run("traces", "ingest", file, "--to", tmp_path / file.suffix).code == 0
    assert run("traces", "describe", tmp_path / ".parquet", "--json").json == as_store
    judged = [run("evaluate", tiny.folder, traces, "--json").json for traces in (parquet, tiny.held_out)]
    lines = tmp_path / "lines.jsonl"
    plain.to_json(lines, orient="records", lines=True, date_format="iso", date_unit="us")
    learnt = [
        train(file, "--out", tmp_path / file.stem, "--no-register", *FAST, "--json").json for file in (csv, lines)
    ]
    for these in (judged, learnt):
        one, other = (
            {key: value for key, value in found.items() if key not in ("latency_us", "fit_seconds", "folder")}
            for found in these
        )
        assert one == other
    steps = pd.DataFrame(WORKFLOWS["loop"])
    for file in (tmp_path / "steps.csv", tmp_path / "steps.parquet"):
        steps.to_csv(file, index=False) if file.suffix == ".csv" else steps.to_parquet(file)
        found = run("forecast", tiny.folder, file, "--json").json
        assert found == run("forecast", tiny.folder, write(tmp_path / "steps.jsonl", WORKFLOWS["loop"]), "--json").json


def test_what_is_not_known_is_answered_by_the_back_off(tmp_path: Path, tiny: Tiny) -> None:
    for shape, known in (("an unknown agent now", False), ("an unknown workflow type", True)):
        found = run("forecast", tiny.folder, write(tmp_path / "steps.jsonl", WORKFLOWS[shape]), "--json").json
        assert (found["source"], found["evidence"] > 0) == ("back-off", known)


def _fresh(*arguments: object, given: str | None = None) -> dict[str, Any]:
    code = "from presage.cli.presage import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        input=given,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.slow
def test_one_forecast_wherever_it_is_asked_for(tmp_path: Path, tiny: Tiny, database: str) -> None:
    """Training process, artefact folder, registry and fresh process: the same numbers, bit by bit."""
    from presage.registry.package import register

    registry = open_registry(database)
    made = register(
        registry,
        tiny.folder,
        name="same",
        metrics=tiny.training.metrics,
        params={},
        tags={},
        input_example=WORKFLOWS["one step"],
    )
    trained = tiny.training.predictor
    loaded = load_predictor(tiny.folder)
    resolved = load_predictor(resolve(made.uri, lambda: registry).folder)
    for shape, steps in WORKFLOWS.items():
        expected = trained.forecast(steps).to_dict()
        total = [sum(h["agents"].values()) + h["end"] for h in expected["horizons"]]
        assert total == pytest.approx([1.0] * 3, abs=1e-5), shape
        for predictor in (loaded, resolved):
            assert predictor.forecast(steps).to_dict() == expected, shape
        path = write(tmp_path / "steps.jsonl", steps)
        asked = run("forecast", made.uri, path, "--tracking-uri", database, "--json").json
        assert asked == {"model": "same", "version": 1, **expected}, shape
    # A process costs seconds: one is asked by the name of a file, and one on standard input.
    path = write(tmp_path / "steps.jsonl", WORKFLOWS["siblings"])
    found = _fresh("forecast", tiny.folder, path, "--json")
    expected = trained.forecast(WORKFLOWS["siblings"]).to_dict()
    assert found == {"model": str(tiny.folder), "version": None, **expected}
    stranger = WORKFLOWS["an unknown agent"]
    given = write(tmp_path / "steps.jsonl", stranger).read_text()
    registered = _fresh("forecast", made.uri, "-", "--tracking-uri", database, "--json", given=given)
    assert registered == {"model": "same", "version": 1, **trained.forecast(stranger).to_dict()}


@pytest.mark.slow
def test_standard_output_is_one_json_object_in_a_fresh_process(tmp_path: Path, tiny: Tiny) -> None:
    code = "from presage.cli.train_predictor import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "next-agent", str(tiny.store), "--json", *FAST],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["registered"] == "models:/next-agent/1"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["mlartifacts", "mlflow.db"]
    doing = done.stderr.partition("LOST:")[0]  # two epochs and two trees may lose to a baseline, and say so
    assert all(line.endswith("…") for line in doing.splitlines()), done.stderr
