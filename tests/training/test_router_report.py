"""The report of a router: its numbers stand on the page, and what was not measured leaves its section out."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from presage.datasets.synthetic.outcomes import generate_outcomes
from presage.report.files import document, markdown, page
from presage.training.router.train import train_router


@pytest.fixture(scope="module")
def metrics() -> dict[str, Any]:
    training = train_router(generate_outcomes(400, 0).outcomes, baselines=("base-rate",), name="demo")
    told: dict[str, Any] = json.loads(json.dumps({**training.metrics, "size_bytes": 1234}))
    return told


def test_the_figures_stand_on_the_page(metrics: dict[str, Any]) -> None:
    told = markdown(document(metrics))
    for value in (metrics["macro_map"], metrics["ece"], metrics["picked_accuracy"], metrics["best_single"]):
        assert f"{value:.3f}" in told
    for name, of in metrics["by_model"].items():
        assert name in told
        assert f"{of['average_precision']:.3f}" in told
    for heading in ("What picking is worth", "What quality costs", "Are the probabilities calibrated?", "By task"):
        assert f"## {heading}" in told
    assert "models left out for few labels" in told


def test_the_page_names_models_and_no_prompt(metrics: dict[str, Any]) -> None:
    shown = page(document(metrics))
    assert "always specialist" in shown
    assert not any(prompt in shown for prompt in generate_outcomes(400, 0).outcomes.prompts)


def test_what_was_not_measured_is_left_out(metrics: dict[str, Any]) -> None:
    bare = copy.deepcopy(metrics)
    for key in ("data", "config", "traces"):
        bare.pop(key, None)
    none = dict.fromkeys(("best_single_model", "best_single", "picked_accuracy", "random", "oracle", "cost_quality"))
    bare |= none | {"baselines": {}, "differences": {}, "by_task": {}, "reliability": [], "picked_shares": {}}
    told = markdown(document(bare))
    for heading in ("What picking is worth", "What quality costs", "calibrated?", "By task", "What it learnt from"):
        assert heading not in told
    assert f"{metrics['macro_map']:.3f}" in told
