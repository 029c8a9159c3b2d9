"""Figures of routers: against scikit-learn, by hand, and as properties."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, brier_score_loss, roc_auc_score

from presage.datasets.outcomes import Outcomes
from presage.datasets.synthetic.outcomes import generate_outcomes
from presage.predictors.common.bootstrap import resample_weights
from presage.training.router.cost_quality import TRADE_OFFS, accuracy_cis, area_under, cost_quality
from presage.training.router.metrics import ModelFigures, macro_draws, measure, measure_picks

NAN = float("nan")


def drawn(seed: int, prompts: int = 300, models: int = 3) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    said = np.round(rng.random((prompts, models)), 1)  # many ties
    correct = (rng.random(said.shape) < said).astype(np.float64)
    correct[rng.random(said.shape) < 0.2] = NAN
    return said, correct


def of_one_model(scores: np.ndarray, truth: np.ndarray) -> ModelFigures:
    return measure(scores[:, None], truth[:, None], ["m"], 0, resamples=0).by_model["m"]


@given(st.integers(0, 10_000), st.integers(5, 60))
def test_ranking_figures_are_those_of_scikit_learn(seed: int, size: int) -> None:
    rng = np.random.default_rng(seed)
    scores = np.round(rng.random(size), 1)
    truth = (rng.random(size) < 0.5).astype(np.float64)
    truth[:2] = 0, 1
    found = of_one_model(scores, truth)
    assert found.average_precision == pytest.approx(average_precision_score(truth, scores))
    assert found.auroc == pytest.approx(roc_auc_score(truth, scores))


def test_a_share_of_tries_counts_as_so_many_of_them() -> None:
    rng = np.random.default_rng(0)
    scores, share = rng.random(50), rng.integers(0, 5, 50) / 4
    tries = np.concatenate([np.repeat([0.0, 1.0], [4 - n, n]) for n in (share * 4).astype(int)])
    found = of_one_model(scores, share)
    assert found.average_precision == pytest.approx(average_precision_score(tries, np.repeat(scores, 4)))
    assert found.auroc == pytest.approx(roc_auc_score(tries, np.repeat(scores, 4)))


def test_cells_without_a_label_are_left_out() -> None:
    said, correct = drawn(0)
    found = measure(said, correct, "abc", 0, resamples=0)
    known = [~np.isnan(column) for column in correct.T]
    of = [(correct[k, m], said[k, m]) for m, k in enumerate(known)]
    assert found.macro_map == pytest.approx(np.mean([average_precision_score(*pair) for pair in of]))
    assert found.macro_auroc == pytest.approx(np.mean([roc_auc_score(*pair) for pair in of]))
    everything = ~np.isnan(correct)
    assert found.brier == pytest.approx(brier_score_loss(correct[everything], said[everything]))
    assert found.by_model["b"].brier == pytest.approx(brier_score_loss(*of[1]))
    assert found.by_model["b"].labels == known[1].sum()
    assert found.labels == everything.sum()


def test_calibration_error_by_hand() -> None:
    said = np.array([[0.1], [0.1], [0.9], [0.9]])
    correct = np.array([[0.0], [1.0], [1.0], [1.0]])
    found = measure(said, correct, ["m"], 0, resamples=0)
    assert found.ece == pytest.approx(0.5 * 0.4 + 0.5 * 0.1)
    assert [row.positions for row in found.reliability] == [2, 2]


def test_a_model_of_one_class_has_no_ranking_and_does_not_count() -> None:
    said, correct = drawn(1)
    correct[:, 2] = np.where(np.isnan(correct[:, 2]), NAN, 1.0)
    found = measure(said, correct, "abc", 0, resamples=20)
    assert np.isnan(found.by_model["c"].average_precision)
    two = measure(said[:, :2], correct[:, :2], "ab", 0, resamples=20)
    assert found.macro_map == pytest.approx(two.macro_map)
    assert found.to_dict()["by_model"]["c"]["auroc"] is None
    np.testing.assert_allclose(found.map_draws, two.map_draws)


def test_a_resample_is_the_figure_of_the_prompts_drawn() -> None:
    said, correct = drawn(2, prompts=60)
    weights = next(resample_weights(60, np.random.default_rng(5), 4))
    found = macro_draws(said, correct, 5, 4)
    for row, value in zip(weights, found, strict=True):
        rows = np.repeat(np.arange(60), row)
        assert value == pytest.approx(measure(said[rows], correct[rows], "abc", 0, resamples=0).macro_map)


def test_intervals_hold_the_figure_and_narrow_with_prompts() -> None:
    few, many = (measure(*drawn(3, size), "abc", 0, resamples=200) for size in (100, 3000))
    for found in (few, many):
        assert found.macro_map_ci95[0] < found.macro_map < found.macro_map_ci95[1]
        assert found.brier_ci95[0] < found.brier < found.brier_ci95[1]
    assert np.diff(many.macro_map_ci95) < np.diff(few.macro_map_ci95) / 2


def test_shapes_that_do_not_fit_are_refused() -> None:
    said, correct = drawn(0)
    for bad in (
        lambda: measure(said[:5], correct, "abc", 0),
        lambda: measure(said, correct, "ab", 0),
        lambda: measure(said + 1, correct, "abc", 0),
        lambda: measure(said[:0], correct[:0], "abc", 0),
    ):
        with pytest.raises(ValueError, match=r"wanted|not between"):
            bad()


def test_picks_are_judged_on_prompts_with_every_label() -> None:
    correct = np.array([[1, 0], [0, 1], [1, 0], [NAN, 1], [0, 0]])
    found = measure_picks(np.array([0, 1, 1, 1, 0]), correct, ["a", "b"], 0)
    assert found.prompts_with_every_label == 4
    assert found.picked_accuracy == 0.5
    assert (found.best_single, found.best_single_model) == (0.5, "a")
    assert found.random == 0.375
    assert found.oracle == 0.75
    assert found.picked_shares == {"a": 0.5, "b": 0.5}
    none = measure_picks(np.array([0]), np.array([[1, NAN]]), ["a", "b"], 0)
    assert none.prompts_with_every_label == 0
    assert none.to_dict()["picked_accuracy"] is None


def test_always_the_best_single_model_gains_nothing() -> None:
    correct = drawn(4)[1]
    best = int(correct[~np.isnan(correct).any(axis=1)].mean(axis=0).argmax())
    found = measure_picks(np.full(300, best), correct, "abc", 0)
    assert found.picked_accuracy == found.best_single
    assert found.gain_over_best_single_ci95 == (0.0, 0.0)
    assert found.random < found.best_single < found.oracle


def outcomes(correct: np.ndarray, cost: np.ndarray, tokens: np.ndarray | None = None) -> Outcomes:
    blank = np.full(correct.shape, np.nan, np.float32)
    return Outcomes(
        tuple(map(str, range(len(correct)))),
        ("cheap", "dear"),
        correct.astype(np.float32),
        blank if tokens is None else tokens.astype(np.float32),
        cost.astype(np.float32),
        (None,) * len(correct),
    )


def test_the_curve_runs_from_quality_to_the_cheapest() -> None:
    correct = np.array([[1, 1], [1, 1], [0, 1], [0, 1]])
    cost = np.tile([1.0, 10.0], (4, 1))
    said = np.clip(correct, 0.05, 0.95)
    found = cost_quality(said, outcomes(correct, cost))
    assert found is not None
    assert found.unit == "cost"
    assert (found.points[0].cost, found.points[0].accuracy) == (5.5, 1.0)  # of equals the first, which is cheap
    assert (found.points[-1].cost, found.points[-1].accuracy) == (1.0, 0.5)
    assert found.singles == {"cheap": (1.0, 0.5), "dear": (10.0, 1.0)}
    # Half of the range at .5, half at 1; the line from (1, .5) to (10, 1) has .75 on the mean.
    assert found.area == pytest.approx(0.75)
    assert found.area_of_singles == pytest.approx(0.75)
    assert found.at_slack[0.0] is not None
    assert found.at_slack[0.0].cost == 5.5


def test_cost_falls_as_its_weight_grows() -> None:
    rng = np.random.default_rng(0)
    said = rng.random((400, 2))
    correct = rng.random(said.shape) < said
    found = cost_quality(said, outcomes(correct, np.tile([1.0, 3.0], (400, 1))))
    assert found is not None
    assert (np.diff([point.cost for point in found.points]) <= 0).all()


def test_without_costs_tokens_are_the_cost_and_without_both_there_is_no_curve() -> None:
    correct, blank = np.array([[1, 0], [0, 1]]), np.full((2, 2), NAN)
    found = cost_quality(correct * 0.5, outcomes(correct, blank, np.array([[5, 9], [7, NAN]])))
    assert found is not None
    assert found.unit == "output tokens"
    assert found.singles == {"cheap": (6.0, 0.5), "dear": (9.0, 0.5)}
    assert cost_quality(correct * 0.5, outcomes(correct, blank)) is None


def test_area_by_hand() -> None:
    points = [(1.0, 0.5), (2.0, 0.9), (3.0, 0.7)]
    assert area_under(points, 1.0, 4.0) == pytest.approx((0.5 + 0.9 + 0.9) / 3)
    assert area_under(points, 2.0, 2.0) == 0.9


def test_every_point_lies_in_its_interval_and_more_prompts_narrow_it() -> None:
    widths = []
    for prompts in (200, 3200):
        drawn = generate_outcomes(prompts, 0)
        curve, ends = (
            cost_quality(drawn.probabilities, drawn.outcomes),
            accuracy_cis(drawn.probabilities, drawn.outcomes, 0),
        )
        assert curve is not None
        assert len(ends) == len(TRADE_OFFS)
        assert all(low <= point.accuracy <= high for point, (low, high) in zip(curve.points, ends, strict=True))
        widths.append(np.mean([high - low for low, high in ends]))
    assert widths[1] < widths[0] / 2.5  # four times as narrow, but for chance


def test_without_costs_there_are_no_intervals() -> None:
    drawn = generate_outcomes(50, 0)
    unknown = np.full_like(drawn.outcomes.cost, np.nan)
    assert accuracy_cis(drawn.probabilities, replace(drawn.outcomes, cost=unknown, output_tokens=unknown), 0) == ()
