"""Live figures are those of evaluation on the same workflows, and of the latest ones alone."""

import json

import numpy as np
import pytest
from monitoring_samples import followed

from presage.datasets.synthetic.workflows import generate
from presage.features.moment import MOMENTS
from presage.features.prefixes import prefixes_of
from presage.features.vocabulary import Vocabulary
from presage.predictors.common.bootstrap import ratio_ci
from presage.serving_hooks.monitoring.live_accuracy import LiveAccuracy
from presage.serving_hooks.monitoring.retrain_check import TraceForecasts, followed_of
from presage.training.metrics import measure
from presage.training.quantiles import measure as measure_lengths


def test_figures_are_those_of_evaluation() -> None:
    table = generate("triage", 50, 4, state_size=16).table
    vocabulary = Vocabulary.from_table(table)
    prefixes = prefixes_of(table, vocabulary, 3)
    rng = np.random.default_rng(1)
    shape = (prefixes.steps, 3, vocabulary.outcomes)
    forecasts = {moment: rng.dirichlet(np.full(shape[2], 0.3), shape[:2]).astype(np.float32) for moment in MOMENTS}
    tokens = np.sort(rng.uniform(0, 2000, (prefixes.steps, 2)), axis=1).astype(np.float32)
    of_rows = TraceForecasts(vocabulary.agents, forecasts, 7, (0.5, 0.9), tokens, 8)
    live = LiveAccuracy()
    for workflow in followed_of(table, of_rows):
        live.followed(workflow)
    assert live.models() == (("triage", "version 7"), ("triage", "version 8"))
    for moment, of in live.agents("triage", "version 7").items():
        figures = measure(forecasts[moment], prefixes.outcomes, prefixes.workflow, np.random.default_rng(0), 1000)
        assert of["accuracy"] == pytest.approx(figures.accuracy)
        assert of["ece"] == pytest.approx(figures.ece, abs=1e-6)
        assert of["nll"] == pytest.approx(figures.nll, rel=1e-5)
        assert of["unseen"] == pytest.approx(figures.unseen)
        assert np.allclose(of["ci95"], figures.ci95, atol=0.02), "another order of workflows draws others"

    lengths = live.lengths("triage", "version 8")
    outputs = table["output_tokens"].to_numpy().astype(float)
    bounds = zip(prefixes.offsets[:-1], prefixes.offsets[1:], strict=True)
    left = np.concatenate([outputs[low:high][::-1].cumsum()[::-1] for low, high in bounds])
    expected = measure_lengths(tokens, left, prefixes.workflow, prefixes.position == 0, (0.5, 0.9), rng, 1)
    assert list(lengths["coverage"].values()) == pytest.approx([share.value for share in expected.coverage])
    assert lengths["steps"] == prefixes.steps


def test_intervals_are_clustered_by_workflow() -> None:
    """Workflows all right or all wrong: 40 workflows are 40 coins, however many steps they have."""
    live = LiveAccuracy()
    for number in range(40):
        live.followed(followed("abc", right=50 * (number % 2), judged=50))
    (low, high) = live.agents("t", "version 1")["prefill"]["ci95"][0]
    hits = np.array([50 * (number % 2) for number in range(40)])
    assert (low, high) == pytest.approx(ratio_ci(hits, np.full(40, 50), np.random.default_rng(0)))
    assert high - low > 0.25


def test_what_is_behind_the_window_is_forgotten() -> None:
    live = LiveAccuracy(window=3)
    for right in (0, 0, 0, 10, 10, 10):
        live.followed(followed("abc", right=right, judged=10, within=right))
    figures, lengths = live.agents("t", "version 1", resamples=0)["prefill"], live.lengths("t", "version 1", 0)
    assert figures["accuracy"] == [1]
    assert figures["positions"] == [30]
    assert lengths["coverage"] == {"0.9": 1.0}
    assert json.dumps([figures, lengths], allow_nan=False)


def test_calibration_error_by_hand() -> None:
    live = LiveAccuracy()
    live.followed(followed("abc", right=9, judged=10, confidence=0.5))
    assert live.agents("t", "version 1")["prefill"]["ece"][0] == pytest.approx(0.4)


def test_models_and_types_are_apart_and_bounded() -> None:
    live = LiveAccuracy(most=2)
    for number in range(5):
        live.followed(followed("abc", workflow_type=f"type {number}"))
    assert live.models() == (("type 3", "version 1"), ("type 4", "version 1"))
    assert live.agents("type 0", "version 1") == {}
    assert live.lengths("type 0", "version 1") == {}


def test_what_is_told_without_intervals_is_that_of_now() -> None:
    """Kept between two questions, and made again for a type that has had a workflow since."""
    asked, fresh = LiveAccuracy(window=3, most=2), LiveAccuracy(window=3, most=2)
    for number, right in enumerate((0, 10, 10, 4, 7, 1, 10, 3)):
        for live in (asked, fresh):
            live.followed(followed("abc", workflow_type=f"type {number % 3}", right=right, judged=10, within=right))
        figures = asked.to_dict(resamples=0)
        assert figures.keys() == {name for name, _ in asked.models()}
    assert figures == fresh.to_dict(resamples=0)
