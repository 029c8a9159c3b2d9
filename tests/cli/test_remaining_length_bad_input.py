"""Lengths from traces and requests that are odd or wrong: one line and exit code 2, or an answer that owns up."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_samples import Ran, run, write

from presage.cli.train_predictor import app as train_predictor

STEP = {"workflow_type": "app", "workflow_id": "new", "step": 0, "agent": "a", "input_tokens": 100, "model": "m"}
Tokens = Callable[[int, int], int | None]


def counted(workflow: int, step: int) -> int:
    return 40 + 37 * workflow % 211 + 90 * step


def traced(
    workflows: int = 40, steps: int = 3, kind: str = "app", tokens: Tokens = counted, **more: Any
) -> list[dict[str, Any]]:
    """Steps of agents a, b, c, in turn, of so many workflows."""
    made = []
    for workflow, step in itertools.product(range(workflows), range(steps)):
        row = {
            **STEP,
            "workflow_type": kind,
            "workflow_id": f"{kind}-{workflow}",
            "step": step,
            "agent": "abc"[step % 3],
        }
        row |= {"input_tokens": 100 + workflow, **more}
        if (length := tokens(workflow, step)) is not None:
            row["output_tokens"] = length
        made.append(row)
    return made


def train(folder: Path, lines: list[dict[str, Any]], *arguments: object) -> Ran:
    """Trains on these steps, for the folder `out`, without a registry."""
    path = write(folder / "traces.jsonl", lines)
    chosen = () if "--estimator" in arguments else ("--estimator", "forest")
    return Ran(train_predictor, "remaining-length", path, "--out", folder / "out", "--no-register", *chosen, *arguments)


def trained(folder: Path, lines: list[dict[str, Any]], *arguments: object) -> dict[str, Any]:
    ran = train(folder, lines, *arguments, "--json")
    assert ran.code == 0, ran.err
    assert (folder / "out" / "report.md").is_file()
    return ran.json


def asked(folder: Path, **changes: Any) -> dict[str, Any]:
    ran = run("forecast", folder / "out", write(folder / "steps.jsonl", [{**STEP, **changes}]), "--json")
    assert ran.code == 0, ran.err
    return ran.json


def sound(answer: dict[str, Any]) -> list[float]:
    """The tokens of an answer: numbers, none below 0, none falling."""
    tokens = list(answer["quantiles"].values())
    assert all(math.isfinite(one) and one >= 0 for one in tokens)
    assert tokens == sorted(tokens)
    return tokens


REFUSED: dict[str, tuple[list[dict[str, Any]], str]] = {
    "no output tokens in any row": (traced(tokens=lambda *_: None), "expected output_tokens on every LLM step"),
    "only workflows that were cut": (traced(complete=False), "72 are of workflows that were cut"),
    "only tool calls": ([{**row, "kind": "tool"} for row in traced()], 'no LLM step (kind "llm")'),
}


def test_an_unknown_count_at_every_end_is_estimated_and_the_agent_is_named(tmp_path: Path) -> None:
    ran = train(tmp_path, traced(tokens=lambda w, s: None if s == 2 else 5), "--estimator", "ridge")
    assert ran.code == 0, ran.err
    assert "output_tokens are missing on 32 of 96 LLM steps (33.3%): c 100% of their steps." in ran.out
    assert "Not judged" not in ran.out
    described = run("traces", "describe", tmp_path / "traces.jsonl")
    assert "warning: output_tokens are missing on 40 of 120 LLM steps" in described.err


@pytest.mark.parametrize("what", REFUSED)
def test_traces_that_teach_no_lengths_are_named_and_nothing_is_written(tmp_path: Path, what: str) -> None:
    lines, message = REFUSED[what]
    assert message in train(tmp_path, lines).complaint
    assert [entry.name for entry in tmp_path.iterdir()] == ["traces.jsonl"]


def test_a_workflow_with_a_negative_count_can_be_left_out(tmp_path: Path) -> None:
    lines = traced(tokens=lambda w, s: -5 if (w, s) == (3, 1) else 9 + w)
    ran = train(tmp_path, lines, "--skip-bad", "--json")
    assert ran.code == 0
    assert "skipped 1 ×" in ran.err
    parts = [int(ran.json["data"][part].split()[0]) for part in ("training", "selection")]
    assert sum(parts) + ran.json["workflows"] == 39


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--quantiles", ""), "--quantiles : wanted ascending numbers between 0 and 1, such as 0.5,0.9,0.99"),
        (("--quantiles", "half"), "--quantiles half: wanted ascending numbers"),
        (("--quantiles", "0.5;0.9"), "--quantiles 0.5;0.9: wanted ascending numbers"),
        (("--quantiles", "0.5]\nfloor=3#"), "wanted ascending numbers"),
        (("--quantiles", "0.9,0.5"), "expected rising numbers between 0 and 1"),
        (("--quantiles", "0.5,0.5"), "expected rising numbers between 0 and 1"),
        (("--quantiles", "0,1"), "expected rising numbers between 0 and 1"),
        (("--quantiles", "nan"), "quantiles are [nan]"),
        (("--quantiles", "50"), "quantiles are [50.0]"),
        (("--set", "quantiles=0.5"), "a value of type list of float is wanted"),
        (("--estimator", ""), "expected one of forest, boosted, ridge, auto"),
        (("--estimator", "oracle"), "estimator is 'oracle'; expected one of forest, boosted, ridge, auto"),
        (("--set", "estimator=oracle"), "one of forest, boosted, ridge, auto is wanted"),
        (("--set", "floor=0"), "floor is 0; a finite number of at least 1"),
    ],
)
def test_nonsense_in_an_option_is_named_and_nothing_is_read(
    tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    out = tmp_path / "out"
    ran = Ran(train_predictor, "remaining-length", tmp_path / "gone", "--out", out, "--no-register", *arguments)
    assert message in ran.complaint
    assert not out.exists()


@pytest.mark.parametrize("arguments", [("--target", ""), ("--target", "steps"), ("--states", "captured")])
def test_a_value_that_an_option_does_not_take_is_named(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    option, value = arguments
    ran = Ran(train_predictor, "remaining-length", tmp_path / "gone", "--no-register", *arguments)
    assert f"Invalid value for '{option}'" in ran.usage_error
    assert f"'{value}' is not one of " in ran.usage_error


def test_the_options_go_before_the_settings(tmp_path: Path) -> None:
    told = trained(
        tmp_path, traced(), "--set", "quantiles=[0.5]", "--set", "estimator=boosted", "--quantiles", "0.25,0.75"
    )
    assert told["config"]["quantiles"] == [0.25, 0.75]
    assert told["config"]["chosen"] == "forest"


def test_a_workflow_type_with_one_workflow_is_learnt_beside_the_others(tmp_path: Path) -> None:
    trained(tmp_path, [*traced(), *traced(1, kind="rare")])
    answer = asked(tmp_path, workflow_type="rare")
    sound(answer)
    assert not answer["calibrated"]
    assert answer["source"] == "back-off"


@pytest.mark.parametrize("tokens", [1, 2**31 - 1])
def test_the_least_and_the_greatest_count_are_learnt(tmp_path: Path, tokens: int) -> None:
    trained(tmp_path, traced(tokens=lambda *_: tokens, steps=2))
    assert sound(asked(tmp_path))[0] == pytest.approx(2 * tokens, rel=0.01, abs=0.1)


def test_below_the_floor_an_answer_is_wide_and_says_that_it_is_not_calibrated(tmp_path: Path) -> None:
    lines = traced(240)
    trained(tmp_path, lines, "--set", "floor=100")
    calibrated = asked(tmp_path)
    assert calibrated["calibrated"]
    told = trained(tmp_path, lines, "--set", "floor=1000", "--force")
    answer = asked(tmp_path)
    assert (answer["calibrated"], answer["source"]) == (False, "champion")
    assert answer["calibration"] == calibrated["calibration"] < 1000
    assert sound(answer)[1] > sound(calibrated)[1], "the bound is wider than one that is calibrated"
    assert told["coverage"]["0.9"] == 1.0
    for_people = run("forecast", tmp_path / "out", tmp_path / "steps.jsonl").out
    assert "NOT CALIBRATED: the upper quantiles have no coverage guarantee here" in for_people
    assert answer["beyond_calibration"]
    assert f"extrapolated: no calibration step had more than {answer['largest']:,.0f}" in for_people


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that reads prompts, learnt from short ones, an empty one, and one of a megabyte."""
    folder = tmp_path_factory.mktemp("texts")
    lines = traced(input_text="please write the report", output_text="here it is")
    lines[0]["input_text"], lines[3]["input_text"] = "", "word " * 210_000
    assert trained(folder, lines)["data"]["texts"]
    return folder


@pytest.mark.parametrize("text", ["", "word " * 210_000], ids=["empty", "a megabyte"])
def test_any_size_of_prompt_is_answered_and_none_of_it_is_repeated(texts: Path, text: str) -> None:
    sound(asked(texts, input_text=text))
    ran = run("forecast", texts / "out", texts / "steps.jsonl")
    assert ran.err.split() == ["loading", "the", "model", "…"]
    assert len(ran.out) < 1000
    assert "word" not in ran.out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input_tokens": -1}, 'column "input_tokens": a negative count'),
        ({"input_tokens": "many"}, 'column "input_tokens"'),
        ({"input_text": 7}, 'column "input_text"'),
        ({"agent": "\ud800 secret"}, "(in valid Unicode)"),
        ({"agent": ""}, "agent"),
    ],
)
def test_a_request_that_is_wrong_is_named(texts: Path, changes: dict[str, Any], message: str) -> None:
    steps = texts / "wrong.jsonl"
    steps.write_text(json.dumps({**STEP, **changes}) + "\n")
    complaint = run("forecast", texts / "out", steps).complaint
    assert message in complaint
    assert "secret" not in complaint


def test_a_folder_no_report_fits_into_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    complaint = train(tmp_path, traced(), "--report", tmp_path / "file").complaint
    assert "--report" in complaint
    assert "is a file" in complaint
