"""Figures and paired differences by hand, against plain loops, and as properties."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from presage.features.prefixes import MASKED
from presage.predictors.common.bootstrap import ratio_ci, ratio_cis
from presage.predictors.common.probabilities import BINS, calibration_error, reliability
from presage.training.metrics import Figures, differences, json_values, measure

UNSEEN = 3  # over two agents and END


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def one_horizon(probabilities: list[list[float]], outcomes: list[int], workflow: list[int]) -> Figures:
    return measure(
        np.array(probabilities, np.float32)[:, None],
        np.array(outcomes, np.int32)[:, None],
        np.array(workflow, np.int64),
        rng(),
    )


BY_HAND = one_horizon(
    [[0.7, 0.2, 0.1], [0.3, 0.6, 0.1], [0.1, 0.2, 0.7], [0.5, 0.3, 0.2], [0.9, 0.05, 0.05], [0.2, 0.2, 0.6]],
    [0, 0, 0, 2, UNSEEN, MASKED],
    [0, 0, 0, 1, 1, 1],
)


def test_accuracy_over_steps_and_as_a_mean_over_workflows() -> None:
    assert BY_HAND.accuracy == (1 / 5,)
    assert BY_HAND.accuracy_by_workflow == pytest.approx(((1 / 3 + 0 / 2) / 2,))
    assert BY_HAND.correct.tolist() == [[1], [0]]
    assert BY_HAND.positions.tolist() == [[3], [2]]
    assert BY_HAND.top2 == (2 / 5,)


def test_an_unseen_outcome_is_wrong_in_accuracy_and_left_out_of_the_likelihood() -> None:
    assert BY_HAND.unseen == (1 / 5,)
    assert BY_HAND.nll == pytest.approx((-(np.log(0.7) + np.log(0.3) + np.log(0.1) + np.log(0.2)) / 4,), rel=1e-6)


def test_the_interval_is_the_bootstrap_of_correct_and_positions() -> None:
    expected = ratio_ci(BY_HAND.correct[:, 0], BY_HAND.positions[:, 0], rng())
    assert BY_HAND.ci95 == (expected,)


def test_an_impossible_outcome_that_came_costs_much_and_not_infinity() -> None:
    assert one_horizon([[1.0, 0.0, 0.0]], [1], [0]).nll == pytest.approx((27.63,), abs=0.01)


def test_parts_by_step_and_workflow_add_up_to_the_figures() -> None:
    end, stranger = 2, 3
    probabilities = [[0.6, 0.3, 0.1], [0.2, 0.2, 0.6], [0.1, 0.2, 0.7], [0.5, 0.3, 0.2], [0.5, 0.3, 0.2]]
    found = one_horizon(probabilities, [0, end, 1, stranger, MASKED], [0, 0, 1, 1, 1])
    np.testing.assert_allclose(found.surprise[:3, 0], -np.log([0.6, 0.6, 0.2]), rtol=1e-6)
    assert np.isnan(found.surprise[3:, 0]).all()
    assert found.nll[0] == pytest.approx(np.nanmean(found.surprise))
    assert found.ece[0] == pytest.approx(np.abs(found.bin_gaps.sum(axis=0)).sum() / found.positions.sum())
    assert (found.ends, found.end_errors) == ((1,), (1,))  # forecast once right, once in vain


def test_nothing_judged_is_null_in_json() -> None:
    nothing = one_horizon([[0.2, 0.3, 0.5]], [MASKED], [0]).to_dict()
    assert json.loads(json.dumps(nothing, allow_nan=False)) == {
        "accuracy": [None],
        "accuracy_by_workflow": [None],
        "ci95": [[None, None]],
        "top2": [None],
        "nll": [None],
        "ece": [None],
        "unseen": [None],
        "ends": [0],
        "end_errors": [0],
        "workflows": 1,
        "positions": [0],
        "reliability": [[]],
    }


def test_shapes_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match=r"wanted \[n, K, V\+1\]"):
        measure(np.ones((2, 1, 3), np.float32), np.zeros((3, 1), np.int32), np.zeros(2, np.int64), rng())


@settings(max_examples=30)
@given(st.integers(0, 10_000), st.integers(1, 40), st.integers(1, 4))
def test_every_figure_against_a_plain_loop(seed: int, steps: int, horizon: int) -> None:
    draw = np.random.default_rng(seed)
    probabilities = draw.dirichlet(np.ones(4), (steps, horizon)).astype(np.float32)
    outcomes = draw.integers(-1, 5, (steps, horizon)).astype(np.int32)
    workflow = np.sort(draw.integers(0, 3, steps))
    workflow = np.unique(workflow, return_inverse=True)[1].astype(np.int64)
    found = measure(probabilities, outcomes, workflow, rng(), 20)
    for k in range(horizon):
        rows = [i for i in range(steps) if outcomes[i, k] != MASKED]
        if not rows:
            assert np.isnan(found.accuracy[k])
            continue
        ranked = [sorted(range(4), key=lambda o, i=i: -probabilities[i, k, o]) for i in rows]
        hits = [order[0] == outcomes[i, k] for i, order in zip(rows, ranked, strict=True)]
        two = [outcomes[i, k] in order[:2] for i, order in zip(rows, ranked, strict=True)]
        assert found.accuracy[k] == pytest.approx(np.mean(hits))
        assert found.top2[k] == pytest.approx(np.mean(two))
        known = [i for i in rows if outcomes[i, k] < 4]
        if known:
            surprise = [-np.log(probabilities[i, k, outcomes[i, k]]) for i in known]
            assert found.nll[k] == pytest.approx(np.mean(surprise), rel=1e-5)
        gap = 0.0
        for b in range(BINS):
            inside = [
                (probabilities[i, k].max(), hit)
                for i, hit in zip(rows, hits, strict=True)
                if min(int(probabilities[i, k].max() * np.float32(BINS)), BINS - 1) == b
            ]
            if inside:
                sure, right = np.mean(inside, axis=0)
                gap += len(inside) / len(rows) * abs(right - sure)
        assert found.ece[k] == pytest.approx(gap, abs=1e-6)
        assert found.accuracy[k] <= found.top2[k] <= 1 - found.unseen[k]


def test_bins_by_hand() -> None:
    found = reliability(np.array([0.05, 0.5, 0.52, 1.0]), np.array([0, 1, 0.5, 1]))
    assert [row.positions for row in found] == [1, 2, 1]
    assert [row.confidence for row in found] == pytest.approx([0.05, 0.51, 1.0])
    assert [row.accuracy for row in found] == pytest.approx([0, 0.75, 1])
    assert calibration_error(found) == pytest.approx((0.05 + 2 * 0.24) / 4)


def figures(seed: int, skill: float) -> Figures:
    draw = np.random.default_rng(7)
    outcomes = draw.integers(-1, 3, (120, 2)).astype(np.int32)
    guess = np.random.default_rng(seed)
    likely = np.where(guess.random((120, 2)) < skill, np.maximum(outcomes, 0), guess.integers(0, 3, (120, 2)))
    probabilities = np.full((120, 2, 3), 0.1, np.float32)
    np.put_along_axis(probabilities, likely[..., None], 0.8, axis=-1)
    workflow = np.repeat(np.arange(24), 5).astype(np.int64)
    return measure(probabilities, outcomes, workflow, np.random.default_rng(0), 10)


def test_differences_are_those_of_the_accuracies_with_the_paired_interval() -> None:
    ours, theirs, worse = figures(1, 0.8), figures(2, 0.6), figures(3, 0.1)
    found = differences({"a": (ours, theirs), "b": (ours, worse)}, 5, 200)
    for name, other in (("a", theirs), ("b", worse)):
        for k in range(2):
            assert found[name].difference[k] == pytest.approx(ours.accuracy[k] - other.accuracy[k])
            gain = ours.correct[:, k] - other.correct[:, k]
            alone = ratio_ci(gain, ours.positions[:, k], np.random.default_rng(5), 200)
            assert found[name].ci95[k] == pytest.approx(alone)
    assert found["b"].ci95[0][0] > 0


def test_nothing_to_compare_is_nothing() -> None:
    assert differences({}, 0) == {}
    ours = figures(1, 0.8)
    same = json_values(differences({"same": (ours, ours)}, 0, 20))["same"]
    assert same == {"difference": [0.0, 0.0], "ci95": [[0.0, 0.0], [0.0, 0.0]]}


def test_where_nothing_was_judged_there_is_null() -> None:
    empty = measure(
        np.full((3, 1, 2), 0.5, np.float32), np.full((3, 1), -1, np.int32), np.arange(3), np.random.default_rng(0), 5
    )
    none = json_values(differences({"x": (empty, empty)}, 0, 5))["x"]
    assert none == {"difference": [None], "ci95": [[None, None]]}


def test_many_ratios_are_drawn_as_one_is() -> None:
    above, below = np.random.default_rng(1).integers(0, 5, (2, 30, 3))
    together = ratio_cis(above, below, np.random.default_rng(3), 100)
    assert together == [ratio_ci(above[:, m], below[:, m], np.random.default_rng(3), 100) for m in range(3)]
