"""Paired differences by hand, and as the bootstrap of one pair at a time."""

from __future__ import annotations

import numpy as np
import pytest

from presage.predictors.common.bootstrap import paired_difference_ci, ratio_ci, ratio_cis
from presage.training.metrics import Figures, differences, measure


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
            alone = paired_difference_ci(
                ours.correct[:, k], other.correct[:, k], ours.positions[:, k], np.random.default_rng(5), 200
            )
            assert found[name].ci95[k] == pytest.approx(alone)
    assert found["b"].ci95[0][0] > 0


def test_nothing_to_compare_is_nothing() -> None:
    assert differences({}, 0) == {}
    ours = figures(1, 0.8)
    same = differences({"same": (ours, ours)}, 0, 20)["same"].to_dict()
    assert same == {"difference": [0.0, 0.0], "ci95": [[0.0, 0.0], [0.0, 0.0]]}


def test_where_nothing_was_judged_there_is_null() -> None:
    empty = measure(
        np.full((3, 1, 2), 0.5, np.float32), np.full((3, 1), -1, np.int32), np.arange(3), np.random.default_rng(0), 5
    )
    assert differences({"x": (empty, empty)}, 0, 5)["x"].to_dict() == {"difference": [None], "ci95": [[None, None]]}


def test_many_ratios_are_drawn_as_one_is() -> None:
    above, below = np.random.default_rng(1).integers(0, 5, (2, 30, 3))
    together = ratio_cis(above, below, np.random.default_rng(3), 100)
    assert together == [ratio_ci(above[:, m], below[:, m], np.random.default_rng(3), 100) for m in range(3)]
