"""The report of a predictor of lengths says what its metrics say; bars are as long as their numbers."""

from __future__ import annotations

import copy
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element, fromstring

import numpy as np
import pytest

from presage.datasets.synthetic.lengths import generate_lengths
from presage.features.lengths import LengthEncoder, length_rows
from presage.features.rows import LabelledRows
from presage.report.files import document, markdown, page, write_report
from presage.report.plot import bar_plot
from presage.training.length.evaluate import Predict, evaluate

Json = dict[str, Any]
NASTY = "<script>alert('a|b')</script>"


def metrics_of(quantiles: tuple[float, ...], workflows: int = 60, baselines: bool = True) -> Json:
    """An evaluation alone, as `presage evaluate --json` prints it: no configuration, no traces."""
    table = generate_lengths(workflows, 0, censored=0.2).table
    rows = length_rows(table, LengthEncoder.fit(table))
    levels = np.array(quantiles)

    def like(factor: float) -> Predict:
        def said(of: LabelledRows) -> np.ndarray:
            noise = np.exp(factor * np.sin(np.arange(len(of))))
            return (of.label * noise)[:, None] * (levels + 0.5)[None].astype(np.float32)

        return said

    rivals = {"constant": lambda of: np.full((len(of), len(quantiles)), 300.0, np.float32), "rough": like(2.0)}
    found = evaluate(like(0.5), rows, quantiles, 0, baselines=rivals if baselines else {}, resamples=20)
    return {**found.to_dict(), "model": "lengths", "version": 4, "data": {"split": "by task"}}


@pytest.fixture(scope="module")
def metrics() -> Json:
    return metrics_of((0.5, 0.9, 0.99))


def interval(value: float, ends: list[float]) -> str:
    return f"{value:.3f} [{ends[0]:.3f}, {ends[1]:.3f}]"


def signed(value: float) -> str:
    return f"{value:+.3f}".replace("-", "−")


def test_every_number_that_matters_is_there(metrics: Json) -> None:
    text = markdown(document(metrics))
    assert "Remaining output tokens: lengths, version 4" in text
    assert f"Judged on {metrics['workflows']} workflows, {metrics['steps']} steps" in text
    assert f"Not judged: {metrics['left_out_steps']['cut']} steps (cut)" in text
    assert "(count missing)" not in text
    for of in (metrics, *metrics["baselines"].values()):
        for scope in ("all", "arrival"):
            assert interval(of["tau_distance"][scope], of["tau_distance_ci95"][scope]) in text
        for q in ("0.5", "0.9", "0.99"):
            assert f"| {of['pinball'][q]:.1f} |" in text.replace("**", "")
            assert interval(of["coverage"][q], of["coverage_ci95"][q]) in text
    for of in metrics["differences"].values():
        gain = of["tau_distance"]["all"]
        low, high = gain["ci95"]
        assert f"{signed(gain['difference'])} [{signed(low)}, {signed(high)}]" in text
    for name, tokens in metrics["queue"]["completion_tokens"].items():
        assert f"| {name} | {tokens:,.0f} | {metrics['queue']['saved'][name]:.1%} |" in text.replace("**", "")
    for name, of in metrics["by_workflow_type"].items():
        assert f"| {name} | {of['workflows']} | {of['steps']} | {of['tau_distance']['all']:.3f} |" in text
    assert f"| {metrics['width']['0.99']:.1f} |" in text


def test_the_lead_names_the_rival_that_orders_best(metrics: Json) -> None:
    assert "Against rough, the baseline that orders best" in markdown(document(metrics))
    swapped = copy.deepcopy(metrics)
    swapped["baselines"]["constant"]["tau_distance"]["all"] = 0.001
    assert "Against constant, the baseline that orders best" in markdown(document(swapped))


def marked(value: Any) -> Any:
    """The same JSON with a 7 as the third and last decimal of every figure."""
    if isinstance(value, dict):
        return {key: marked(one) for key, one in value.items()}
    if isinstance(value, list):
        return [marked(one) for one in value]
    if isinstance(value, float):
        return math.copysign(math.floor(abs(value) * 100) / 100 + 0.007, value)
    return value


def test_every_figure_is_copied_from_the_metrics_and_none_is_computed(metrics: Json) -> None:
    found = re.findall(r"\d*\.\d{3}(?!\d)", markdown(document(marked(metrics))))
    assert len(found) > 50
    assert {figure[-1] for figure in found} == {"7"}


def test_the_page_of_the_file_is_the_page_of_the_training(metrics: Json, tmp_path: Path) -> None:
    again = json.loads(json.dumps(metrics))
    assert page(document(again)) == page(document(metrics))
    write_report(tmp_path, metrics)
    assert {path.name for path in tmp_path.iterdir()} == {
        "report.html", "report.md", "coverage.svg", "predicted.svg", "queue.svg",
    }  # fmt: skip
    for picture in tmp_path.glob("*.svg"):
        assert fromstring(picture.read_text()).tag.endswith("svg")
        assert f"]({picture.name})" in (tmp_path / "report.md").read_text()


def test_without_a_queue_there_is_no_section_of_it(metrics: Json, tmp_path: Path) -> None:
    gone = {**metrics, "queue": None}
    assert "What the order is worth" in markdown(document(metrics))
    assert "What the order is worth" not in markdown(document(gone))
    write_report(tmp_path, gone)
    assert not (tmp_path / "queue.svg").exists()


@pytest.mark.parametrize("quantile", [0.9, 0.5, 0.1])
def test_one_quantile_and_no_baseline_make_a_report(quantile: float, tmp_path: Path) -> None:
    found = metrics_of((quantile,), baselines=False)
    write_report(tmp_path, found)
    text = (tmp_path / "report.md").read_text()
    assert f"within {quantile} [95 %]" in text
    assert "ours minus" not in text
    assert "Against" not in text
    assert (f"of the steps within the {quantile} quantile" in text) == (quantile > 0.5)
    row = next(line for line in text.splitlines() if line.startswith("| triage |"))
    assert row.split(" | ")[4] == f"{found['by_workflow_type']['triage']['pinball'][str(quantile)]:.1f}"


def test_one_type_with_one_step_makes_a_report(tmp_path: Path) -> None:
    table = generate_lengths(1, 3).table.slice(0, 1)
    rows = length_rows(table, LengthEncoder.fit(table))
    found = evaluate(lambda of: np.full((len(of), 2), 9.0, np.float32), rows, (0.5, 0.9), 0, resamples=10).to_dict()
    write_report(tmp_path, found)
    text = (tmp_path / "report.md").read_text()
    assert "Judged on 1 workflow, 1 step," in text
    assert "**–** tau distance over all steps" in text, "one step cannot be put in order"
    assert "predicted.svg" not in text, "one group of steps makes no line"
    assert "What it learnt from" not in text


def test_lengths_of_nothing_draw_no_logarithm(tmp_path: Path) -> None:
    table = generate_lengths(5, 0).table
    rows = length_rows(table, LengthEncoder.fit(table))
    found = evaluate(
        lambda of: np.zeros((len(of), 1), np.float32),
        replace(rows, label=np.zeros(len(rows), np.float32), lower_bound=np.zeros(len(rows), bool)),
        (0.5,),
        0,
    ).to_dict()
    write_report(tmp_path, found)
    assert not (tmp_path / "predicted.svg").exists()
    assert "| first come | 0 | 0.0% |" in (tmp_path / "report.md").read_text()


def test_names_are_text_and_never_markup(metrics: Json) -> None:
    nasty = json.loads(json.dumps(metrics).replace('"triage"', json.dumps(NASTY)))
    assert "<script" not in page(document(nasty))
    assert "<script" not in markdown(document(nasty))
    assert "&lt;script&gt;" in markdown(document(nasty))


def bars(values: dict[str, float]) -> tuple[list[float], list[str]]:
    svg: Element = bar_plot(values)
    lines = [line.attrib for line in svg.iter("line") if "bar" in line.attrib["class"]]
    return [float(of["x2"]) - float(of["x1"]) for of in lines], [text.text or "" for text in svg.iter("text")]


def test_bars_are_as_long_as_their_numbers_and_say_them() -> None:
    lengths, told = bars({"one": 1000.0, "two": 250.0, "none": 0.0})
    assert lengths == pytest.approx([lengths[0], lengths[0] / 4, 0], abs=0.1)
    assert lengths[0] > 0
    assert told == ["one", "1,000", "two", "250", "none", "0"]


@pytest.mark.parametrize("values", [{}, {"alone": 0.0}, {"a": 0.0, "b": 0.0}])
def test_bars_of_nothing_are_drawn(values: dict[str, float]) -> None:
    lengths, told = bars(values)
    assert lengths == [0.0] * len(values)
    assert len(told) == 2 * len(values)
    height = float(bar_plot(values).attrib["viewBox"].split()[3])
    assert height > 0


def test_a_bar_with_a_name_no_file_can_hold_is_a_whole_drawing() -> None:
    assert bars({"a\x00<b>": 1.0})[1][0] == "a\ufffd<b>"


def test_which_estimator_was_kept_is_told_where_there_was_a_choice(metrics: Json) -> None:
    losses = {"forest": {"0.5": 11.14, "0.9": 7.0, "0.99": 3.0}, "boosted": {"0.5": 12.25, "0.9": 8.0, "0.99": 2.0}}
    made = {"fit_seconds": 1.0, "latency_us": 2.0, "size_bytes": 3, "versions": {}}
    chosen = {**metrics, **made, "config": {"chosen": "boosted"}, "estimators": losses}
    assert "| **boosted** | **12.2** | **8.0** | **2.0** |" in markdown(document(chosen))
    assert "| forest | 11.1 | 7.0 | 3.0 |" in markdown(document(chosen))
    alone = {**chosen, "estimators": {"boosted": losses["boosted"]}}
    assert "Which estimator" not in markdown(document(alone))
