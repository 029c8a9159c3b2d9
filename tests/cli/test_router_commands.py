"""The commands on a router: from outcomes to a champion that picks models, and one prompt followed number by number."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import mlflow.pyfunc
import numpy as np
import pandas as pd
import pytest
from cli_samples import GOOD, Ran, run, write
from registry_database import new_database

from presage.cli.train_predictor import app as train_predictor
from presage.datasets.outcomes.files import write_outcomes
from presage.datasets.synthetic.outcomes import generate_outcomes
from presage.predictors.router.predictor import RouterPredictor
from presage.registry.connect import open_registry
from presage.testing.models import MODELS, planted, save_encoder

HARD = "derive without every minimal rigorous concurrent proof matrix integer of the series"


def train(*arguments: object) -> Ran:
    return Ran(train_predictor, "router", *arguments)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("outcomes")
    for name, prompts, seed in (("learnt", 700, 0), ("held", 400, 1)):
        write_outcomes(generate_outcomes(prompts, seed).outcomes, root / f"{name}.jsonl")
    return root / "learnt.jsonl", root / "held.jsonl"


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> str:
    return new_database(tmp_path_factory.mktemp("registry") / "mlflow.db")


@pytest.fixture(scope="module")
def registered(
    files: tuple[Path, Path], database: str, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, object]]:
    out = tmp_path_factory.mktemp("out") / "router"
    ran = train(files[0], "--out", out, "--baselines", "base-rate", "--tracking-uri", database, "--json")
    assert ran.code == 0, ran.err
    return out, ran.json


@pytest.fixture(scope="module")
def champion(registered: tuple[Path, object], files: tuple[Path, Path], database: str) -> dict[str, object]:
    return run("promote", "router", "--version", 1, "--traces", files[1], "--tracking-uri", database, "--json").json


@pytest.mark.slow
def test_a_training_tells_the_contract_and_leaves_artefact_and_report(
    registered: tuple[Path, dict[str, object]], files: tuple[Path, Path]
) -> None:
    out, told = registered
    kept = json.loads((out / "metrics.json").read_text())
    assert {key: told[key] for key in kept} == kept
    assert (kept["kind"], kept["version"]) == ("router", 1)
    assert kept["macro_map"] > kept["baselines"]["base-rate"]["macro_map"]
    assert kept["best_single"] <= kept["oracle"]
    assert set(kept["by_model"]) == {"large", "slow", "small", "specialist"}
    names = {file.name for file in out.iterdir()}
    assert names >= {"report.html", "report.md", "reliability.svg", "cost.svg", "model.safetensors"}
    page = (out / "report.md").read_text()
    assert f"{kept['macro_map']:.3f}" in page
    learnt = json.loads(files[0].read_text().splitlines()[0])["prompt"]
    assert not any(learnt in (out / name).read_text(errors="ignore") for name in names if not name.startswith("."))


@pytest.mark.slow
def test_the_gates_promote_it_and_refuse_one_that_learnt_from_next_to_nothing(
    champion: dict[str, object], files: tuple[Path, Path], database: str, tmp_path: Path
) -> None:
    assert champion["promoted"], champion
    assert {gate["name"] for gate in champion["gates"]} >= {"floor-macro-map", "calibration", "latency"}  # type: ignore[attr-defined]
    few = tmp_path / "few.jsonl"
    write_outcomes(generate_outcomes(60, 5).outcomes, few)
    uri = ("--tracking-uri", database)
    assert train(few, "--baselines", "none", *uri).code == 0
    ran = run("promote", "router", "--version", 2, "--traces", files[1], *uri, "--json")
    assert ran.code == 3
    assert "macro-map" in {gate["name"] for gate in ran.json["gates"] if not gate["passed"]}
    listed = run("models", *uri, "--json").json["models"]
    assert {entry["version"]: entry["verdict"] for entry in listed} == {1: "promoted", 2: "refused"}
    assert "macro mAP" in run("models", *uri).out


@pytest.mark.slow
def test_it_is_judged_under_no_input_profile(
    champion: dict[str, object], files: tuple[Path, Path], database: str
) -> None:
    assert champion["profile"] is None
    tags = open_registry(database).version("router", 1).tags
    assert tags["presage.verdict"] == "promoted"
    assert "presage.verdict.profile" not in tags
    again = ("promote", "router", "--version", 1, "--traces", files[1], "--tracking-uri", database, "--dry-run")
    assert "profile" not in run(*again).out
    assert run("models", "--tracking-uri", database, "--json").json["models"][-1]["lost"].keys() == {"full"}
    for option, value in (("--profile", "engine"), ("--types", "chat")):
        said = run(*again, option, value).complaint
        assert option in said
        assert "is a router, which reads prompts alone" in said


@pytest.mark.slow
def test_evaluate_leaves_out_what_was_trained_on(
    registered: tuple[Path, object], files: tuple[Path, Path], database: str
) -> None:
    out, _ = registered
    found = run("evaluate", out, *files, "--json").json
    learnt = len(RouterPredictor.load(out).trained_on)
    assert found["left_out"] == learnt > 400
    assert found["prompts"] == 1100 - learnt
    assert run("evaluate", out, files[1], "--json").json["left_out"] == 0


@pytest.mark.slow
def test_route_picks_within_limits(champion: object, database: str, tmp_path: Path) -> None:
    costs = tmp_path / "costs.toml"
    costs.write_text("large = 10\nslow = 14.0\nsmall = 1\nspecialist = 2\n")
    like_those_learnt = generate_outcomes(3, 5).outcomes.prompts[0]
    ask = ("route", "models:/router@champion", like_those_learnt, "--tracking-uri", database)
    free = run(*ask, "--json").json
    assert free["choice"] == free["pick"]
    assert (free["model"], free["version"], free["source"]) == ("router", 1, "champion")
    cheap = run(*ask, "--costs", costs, "--max-cost", 2, "--json").json
    assert cheap["choice"] in ("small", "specialist")
    assert cheap["probabilities"] == free["probabilities"]
    assert not run(*ask, "--costs", costs, "--min-quality", 1, "--json").json["limit_kept"]
    assert "the cheapest of" in run(*ask, "--costs", costs, "--min-quality", 0.01).out
    assert "no cost for large" in run(*ask, "--max-cost", 2).complaint
    assert "set only one of them" in run(*ask, "--costs", costs, "--max-cost", 2, "--min-quality", 0.5).complaint
    costs.write_text("large = 'much'")
    assert "the cost of 'large'" in run(*ask, "--costs", costs, "--max-cost", 2).complaint
    costs.write_bytes(b"large = 1\n'caf\xe9' = 2\n")
    assert (
        "costs.toml: cannot be read as TOML (line 2: byte 5 of the line is not UTF-8"
        in run(*ask, "--costs", costs).complaint
    )


@pytest.mark.slow
def test_one_prompt_is_followed_from_the_training_process_to_a_fresh_one(
    champion: object, registered: tuple[Path, object], database: str, tmp_path: Path
) -> None:
    out, _ = registered
    predictor = RouterPredictor.load(out)
    alone = predictor.forecast(HARD).to_dict()
    rows = predictor.probabilities([HARD, "please briefly"])[0]
    np.testing.assert_allclose(list(alone["probabilities"].values()), rows, rtol=1e-6)
    script = "from presage.cli.presage import main; main()"
    asked = [
        sys.executable,
        "-c",
        script,
        "route",
        "models:/router@champion",
        HARD,
        "--json",
        "--tracking-uri",
        database,
    ]
    fresh = json.loads(subprocess.run(asked, capture_output=True, text=True, check=True).stdout)
    assert {key: fresh[key] for key in alone} == alone
    step = write(tmp_path / "steps.jsonl", [{**GOOD[0], "input_text": HARD}])
    served = run("forecast", "models:/router@champion", step, "--tracking-uri", database, "--json").json
    assert {key: served[key] for key in alone} == alone
    version = open_registry(database).client.get_model_version_download_uri("router", "1")
    table = mlflow.pyfunc.load_model(version).predict(pd.DataFrame({"prompt": [HARD]}))
    assert table["forecast"][0] == alone


@pytest.mark.slow
def test_a_transformer_goes_the_same_way_and_is_trained_further(tmp_path: Path, database: str) -> None:
    encoder = save_encoder(tmp_path / "encoder")
    prompts, correct = planted(120, 0)
    rows = [
        {"prompt": prompt, "model": model, "correct": float(label)}
        for prompt, labels in zip(prompts, correct, strict=True)
        for model, label in zip(MODELS, labels, strict=True)
        if not np.isnan(label)
    ]
    fast = ("--epochs", 1, "--batch-size", 32, "--baselines", "none", "--checkpoints", tmp_path / "checkpoints")
    short, uri = ("--head-tokens", 64, "--tail-tokens", 64), ("--tracking-uri", database)
    path = write(tmp_path / "outcomes.jsonl", rows)
    ran = train(path, "--encoder", encoder, "--lr", 1e-3, *short, "--name", "deep", *fast, *uri, "--json")
    assert ran.code == 0, ran.err
    named = {"head": "transformer", "encoder": "encoder", "head_tokens": 64, "tail_tokens": 64}
    assert ran.json["config"].items() >= named.items()
    assert not (tmp_path / "checkpoints").exists()
    first = run("route", "models:/deep/1", prompts[0], *uri, "--json").json
    assert set(first["probabilities"]) == set(MODELS)

    for precision in ("fp32", "int8"):
        judged = run("evaluate", "models:/deep/1", path, "--precision", precision, *uri, "--json").json
        assert judged["prompts"] > 0
    assert "precision is 'int3'" in run("evaluate", "models:/deep/1", path, "--precision", "int3", *uri).complaint

    newer = [{**row, "model": "newcomer"} for row in rows if row["model"] == MODELS[0]]
    ran = train(write(path, rows + newer), "--start-from", "models:/deep/1", "--name", "deep", *fast, *uri, "--json")
    assert ran.code == 0, ran.err
    assert ran.json["config"].items() >= named.items(), "those of the router it was trained from"
    params = open_registry(database).client.get_run(open_registry(database).version("deep", 2).run_id).data.params
    assert params["head_tokens"] == "64"
    second = run("route", "models:/deep/2", prompts[0], *uri, "--json").json
    assert set(second["probabilities"]) == {*MODELS, "newcomer"}
    bare = tmp_path / "bare"
    bare.mkdir()
    assert "no tokenizer" in train(path, "--encoder", bare, *fast, "--no-register").complaint


@pytest.mark.parametrize(
    ("rows", "options", "said"),
    [
        ([{"prompt": "x", "model": "a", "correct": 2}], (), 'column "correct"'),
        ([{"prompt": f"p {i}", "model": "a", "correct": i % 2} for i in range(60)], (), "one model only"),
        (
            [{"prompt": f"p {i}", "model": m, "correct": 1} for i in range(60) for m in "ab"],
            (),
            "one class",
        ),
        ([{"prompt": "x", "model": "a", "correct": 1}], ("--head", "deep"), "head is 'deep'"),
        ([{"prompt": "x", "model": "a", "correct": 1}], ("--baselines", "best"), "no baseline 'best'"),
        (
            [{"prompt": "x", "model": "a", "correct": 1}],
            ("--start-from", "x", "--encoder", "y"),
            "omit --encoder",
        ),
    ],
)
def test_bad_outcomes_and_options_are_one_sentence(
    rows: list[dict[str, object]], options: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "outcomes.jsonl", rows)
    ran = train(path, "--no-register", "--out", tmp_path / "out", *options)
    assert said in ran.complaint
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_other_kinds_are_told_apart(registered: tuple[Path, object], tmp_path: Path) -> None:
    out, _ = registered
    assert "a linear router has no precision" in run("evaluate", out, tmp_path, "--precision", "bf16").complaint
    steps = write(tmp_path / "steps.jsonl", GOOD[:2])
    assert "no input_text" in run("forecast", out, steps).complaint
    assert "expected an artefact folder" in run("route", tmp_path / "nothing", "x").complaint


def test_outcomes_are_described_and_generated(tmp_path: Path) -> None:
    path = tmp_path / "o.jsonl"
    assert run("outcomes", "generate", "--prompts", 40, "--to", path, "--json").json["prompts"] == 40
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows += [{**rows[0], "correct": 1 - rows[0]["correct"]}]
    told = run("outcomes", "describe", write(path, rows), "--json").json
    assert (told["prompts"], told["rows"], told["duplicates"], told["contradictions"]) == (40, len(rows), 1, 1)
    assert "1 contradictory" in run("outcomes", "describe", path).out
    assert "wanted a .jsonl file" in run("outcomes", "generate", "--to", tmp_path / "o.csv").complaint


def test_outcomes_are_taken_from_traces(tmp_path: Path) -> None:
    base = {"workflow_type": "t", "step": 0, "agent": "a", "input_text": "What is 2+2?", "system_prompt": "Answer."}
    steps = [
        {**base, "workflow_id": "w0", "model": "small", "success": False, "output_tokens": 4},
        {**base, "workflow_id": "w1", "model": "large", "success": True},
        {**base, "workflow_id": "w2", "model": "large"},
    ]
    traces, to = write(tmp_path / "traces.jsonl", steps), tmp_path / "new" / "outcomes.jsonl"
    done = run("outcomes", "from-traces", traces, "--to", to, "--json")
    assert done.code == 0, done.err
    assert (done.json["rows"], done.json["prompts"]) == (2, 1)
    assert done.json["skipped"] == {"step without an outcome": 1}
    rows = [json.loads(line) for line in to.read_text().splitlines()]
    group = rows[0]["group"]
    assert rows == [
        {"prompt": "What is 2+2?", "model": "large", "correct": 1.0, "task": "t/a", "group": group},
        {"prompt": "What is 2+2?", "model": "small", "correct": 0.0, "task": "t/a", "group": group, "output_tokens": 4},
    ]
    assert run("outcomes", "describe", to, "--json").json["rows"] == 2
    assert "wanted a .jsonl file" in run("outcomes", "from-traces", traces, "--to", tmp_path / "o.csv").complaint
    nothing = write(tmp_path / "nothing.jsonl", steps[2:])
    complaint = run("outcomes", "from-traces", nothing, "--to", to).complaint
    assert "1 × step without an outcome" in complaint
    assert "2+2" not in complaint
