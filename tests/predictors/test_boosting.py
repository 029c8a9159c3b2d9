"""Trees with vector leaves: what they learn, what they must ignore, and the bounds that end growing."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from presage.features.prefixes import MASKED
from presage.predictors.common.probabilities import cross_entropy, softmax
from presage.predictors.next_agent.boosting import UNREACHED, BoostingConfig, TreeEnsemble, fit_trees

SMALL = BoostingConfig(rounds=30, rows=1.0, depth=3, columns=1.0)


def leaves_of(trees: TreeEnsemble, x: NDArray[np.float32]) -> list[int]:
    """The leaf of each tree that a row falls into, one comparison at a time."""
    return [
        sum((x[f] >= t) << level for level, (f, t) in enumerate(zip(feature, threshold, strict=True)))
        for feature, threshold in zip(trees.feature, trees.threshold, strict=True)
    ]


def logits_by_walking(trees: TreeEnsemble, inputs: NDArray[np.float32]) -> NDArray[np.float64]:
    """One row at a time, float64 [n, K (V+1)]."""
    leaves, scale = trees.leaves.astype(float), trees.scale.astype(float)
    return np.array(
        [trees.base + sum(leaves[tree, leaf] * scale for tree, leaf in enumerate(leaves_of(trees, x))) for x in inputs]
    )


def forecasts(trees: TreeEnsemble, inputs: NDArray[np.float32], horizon: int) -> NDArray[np.float64]:
    return softmax(logits_by_walking(trees, inputs).reshape(len(inputs), horizon, -1))


def xor(rows: int, seed: int, extra: int = 4) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """Outcome 0 or 1 by the exclusive or of two inputs, one and two steps ahead the other way round; the rest noise."""
    rng = np.random.default_rng(seed)
    inputs = rng.normal(size=(rows, 2 + extra)).astype(np.float32)
    label = ((inputs[:, 0] > 0) ^ (inputs[:, 1] > 0)).astype(np.int32)
    return inputs, np.stack([label, 1 - label], axis=1)


def compared(trees: TreeEnsemble) -> set[int]:
    """Inputs that the trees compare."""
    return set(trees.feature[trees.threshold < UNREACHED].tolist())


def assert_equal(first: TreeEnsemble, second: TreeEnsemble) -> None:
    for name, array in first.to_tensors().items():
        np.testing.assert_array_equal(array, second.to_tensors()[name])
        assert array.dtype == second.to_tensors()[name].dtype


def test_an_interaction_no_single_input_shows_is_learnt_for_all_horizons_at_once() -> None:
    (inputs, outcomes), (others, theirs) = xor(1500, 0), xor(500, 1)
    trees = fit_trees(inputs, outcomes, others, theirs, 3, SMALL, 0)
    right = forecasts(trees, others, 2).argmax(axis=2) == theirs
    assert right.mean(axis=0).min() > 0.93


def test_without_trees_the_answer_is_the_share_of_each_outcome() -> None:
    inputs, outcomes = xor(100, 0)
    trees = fit_trees(inputs, outcomes, inputs, outcomes, 3, replace(SMALL, rounds=0), 0)
    assert (len(trees), trees.leaves.shape, trees.feature.shape) == (0, (0, 8, 6), (0, 3))
    share = (np.bincount(outcomes[:, 0], minlength=3) + 0.5) / (100 + 1.5)
    np.testing.assert_allclose(forecasts(trees, inputs[:1], 2)[0, 0], share, rtol=1e-5)


def test_a_masked_label_contributes_nothing() -> None:
    inputs, outcomes = xor(400, 0)
    masked = outcomes.copy()
    masked[::2, 1] = MASKED
    unseen = np.where(masked == MASKED, 3, masked).astype(np.int32)  # an agent out of the vocabulary is masked as well
    first = fit_trees(inputs, masked, inputs, masked, 3, SMALL, 0)
    assert_equal(first, fit_trees(inputs, unseen, inputs, unseen, 3, SMALL, 0))


def test_rows_masked_throughout_change_no_leaf_and_no_base() -> None:
    inputs, outcomes = xor(400, 0)
    outcomes[:, 1] = MASKED
    trees = fit_trees(inputs, outcomes, inputs, outcomes, 3, SMALL, 0)
    assert not trees.leaves[:, :, 3:].any()
    np.testing.assert_allclose(trees.base[3:], np.log(1 / 3), rtol=1e-6)


def test_nothing_known_at_all_gives_uniform_forecasts() -> None:
    inputs, _ = xor(60, 0)
    nothing = np.full((60, 2), MASKED, np.int32)
    trees = fit_trees(inputs, nothing, inputs, nothing, 3, SMALL, 0)
    np.testing.assert_allclose(forecasts(trees, inputs, 2), 1 / 3, rtol=1e-6)


def test_a_seed_decides_every_array_and_another_seed_another_draw() -> None:
    inputs, outcomes = xor(300, 0)
    config = replace(SMALL, rows=0.7, columns=0.5)
    first = fit_trees(inputs, outcomes, inputs, outcomes, 3, config, 5)
    assert_equal(first, fit_trees(inputs, outcomes, inputs, outcomes, 3, config, 5))
    other = fit_trees(inputs, outcomes, inputs, outcomes, 3, config, 6)
    assert other.threshold.tolist() != first.threshold.tolist()


@pytest.mark.parametrize("leaf_cells", [0, 100, 200])
def test_leaf_cells_end_growing(leaf_cells: int) -> None:
    inputs, outcomes = xor(500, 0)
    trees = fit_trees(inputs, outcomes, inputs, outcomes, 3, replace(SMALL, leaf_cells=leaf_cells, fewest_leaves=0), 0)
    assert trees.leaves.size <= leaf_cells
    assert len(trees) == leaf_cells // 6 // 2**trees.depth
    exactly = fit_trees(
        inputs, outcomes, inputs, outcomes, 3, replace(SMALL, leaf_cells=leaf_cells, fewest_leaves=0), 0, rounds=30
    )
    assert exactly.leaves.size <= leaf_cells


@pytest.mark.parametrize(("fewest_leaves", "depth"), [(10_000, 3), (1024, 3), (1023, 2), (512, 2), (511, 1), (10, 1)])
def test_trees_are_as_shallow_as_it_takes_for_enough_of_them_to_fit(fewest_leaves: int, depth: int) -> None:
    inputs, outcomes = xor(100, 0)
    config = replace(SMALL, leaf_cells=0, fewest_leaves=fewest_leaves)
    assert fit_trees(inputs, outcomes, inputs, outcomes, 3, config, 0, rounds=1).depth == depth


def test_a_number_of_rounds_is_obeyed_and_validation_not_looked_at() -> None:
    inputs, outcomes = xor(300, 0)
    first = fit_trees(inputs, outcomes, inputs, outcomes, 3, SMALL, 0, rounds=7)
    assert len(first) == 7
    assert_equal(first, fit_trees(inputs, outcomes, inputs[:1], 1 - outcomes[:1], 3, SMALL, 0, rounds=7))


def test_validation_decides_how_many_are_kept() -> None:
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(300, 5)).astype(np.float32)
    noise = rng.integers(0, 3, (300, 2)).astype(np.int32)
    others, theirs = rng.normal(size=(300, 5)).astype(np.float32), rng.integers(0, 3, (300, 2)).astype(np.int32)
    config = replace(SMALL, rounds=200, patience=5)
    kept = len(fit_trees(inputs, noise, others, theirs, 3, config, 0))
    assert kept <= 15  # there is nothing to learn
    losses = [
        cross_entropy(forecasts(fit_trees(inputs, noise, others, theirs, 3, config, 0, rounds=r), others, 2), theirs)
        for r in (kept, kept + 5)
    ]
    assert losses[0] < losses[1]


def test_only_the_first_inputs_are_open_to_every_tree() -> None:
    inputs, outcomes = xor(400, 0)
    few = replace(SMALL, columns=0.0)
    trees = fit_trees(inputs, outcomes, inputs, outcomes, 3, few, 0, always=[0, 1], drawn=[2, 3, 4, 5])
    assert compared(trees) == {0, 1}
    half = replace(SMALL, columns=0.5, rounds=1)
    without = fit_trees(inputs, outcomes, inputs, outcomes, 3, half, 0, always=[], drawn=range(6))
    assert len(compared(without)) <= 3


def test_trees_go_on_from_where_others_ended() -> None:
    """The first ensemble reads one input, the second the other: together they tell what neither tells alone."""
    inputs, others = xor(1500, 0)[0], xor(500, 1)[0]
    label = (inputs[:, 0] + inputs[:, 1] > 0).astype(np.int32)[:, None]
    held = (others[:, 0] + others[:, 1] > 0).astype(np.int32)[:, None]
    first = fit_trees(inputs, label, others, held, 2, SMALL, 0, always=[0])
    start = first.logits(inputs), first.logits(others)
    second = fit_trees(inputs, label, others, held, 2, SMALL, 0, always=[0, 1], start=start)
    assert not second.base.any()
    right = [(logits.argmax(axis=1) == held[:, 0]).mean() for logits in (start[1], start[1] + second.logits(others))]
    assert right[0] < 0.85
    assert right[1] > 0.93


def test_where_nothing_is_to_be_added_no_tree_is() -> None:
    inputs, outcomes = xor(400, 0)
    noise = np.random.default_rng(0).integers(0, 3, outcomes.shape).astype(np.int32)
    start = np.zeros((400, 6), np.float32)
    uniform = fit_trees(inputs[:, 2:], noise, inputs[::-1, 2:], noise, 3, SMALL, 0, start=(start, start))
    assert len(uniform) <= 2


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1000))
def test_the_logits_of_an_ensemble_are_its_comparisons(seed: int) -> None:
    inputs, outcomes = xor(60, seed)
    trees = fit_trees(inputs, outcomes, inputs, outcomes, 3, replace(SMALL, rounds=5), seed)
    np.testing.assert_allclose(trees.logits(inputs), logits_by_walking(trees, inputs), rtol=1e-4, atol=1e-5)


def test_constant_inputs_are_never_compared() -> None:
    inputs, outcomes = xor(300, 0)
    inputs[:, 3:] = 2.0
    trees = fit_trees(inputs, outcomes, inputs, outcomes, 3, SMALL, 0)
    assert max(compared(trees)) <= 2


def test_inputs_that_are_all_constant_leave_single_leaves() -> None:
    inputs, outcomes = np.ones((50, 3), np.float32), np.zeros((50, 1), np.int32)
    trees = fit_trees(inputs, outcomes, inputs, outcomes, 2, replace(SMALL, rounds=3), 0)
    assert not compared(trees)
    assert forecasts(trees, inputs[:1], 1)[0, 0, 0] > 0.9


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 60), st.integers(1, 4), st.integers(1, 3), st.integers(0, 1000))
def test_every_leaf_and_threshold_stands_where_training_rows_do(rows: int, width: int, horizon: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    inputs = rng.integers(0, 4, (rows, width)).astype(np.float32)
    outcomes = rng.integers(-1, 4, (rows, horizon)).astype(np.int32)
    config = replace(SMALL, rounds=4, min_rows=1, bins=3, depth=4)
    trees = fit_trees(inputs, outcomes, inputs, outcomes, 3, config, seed)
    inner = trees.threshold < UNREACHED
    for feature, threshold in zip(trees.feature[inner], trees.threshold[inner], strict=True):
        assert threshold in inputs[:, feature]
        assert threshold > inputs[:, feature].min()
    reached = np.zeros(trees.leaves.shape[:2], bool)
    for x in inputs:
        reached[np.arange(len(trees)), leaves_of(trees, x)] = True
    assert not trees.leaves[~reached].any()
    assert np.isfinite(trees.scale).all()
    assert (trees.scale > 0).all()
    assert np.isfinite(logits_by_walking(trees, inputs)).all()
    again = TreeEnsemble.from_tensors(trees.to_tensors())
    assert_equal(trees, again)


def test_a_split_that_leaves_too_few_rows_on_a_side_gains_nothing() -> None:
    rng = np.random.default_rng(0)
    inputs = np.stack([np.arange(200) < 30, rng.random(200) < 0.5], axis=1).astype(np.float32)
    outcomes = inputs[:, :1].astype(np.int32)  # told by the first input alone, but 30 rows say so
    config = replace(SMALL, rounds=1)
    assert 0 in compared(fit_trees(inputs, outcomes, inputs, outcomes, 2, replace(config, min_rows=30), 0))
    assert 0 not in compared(fit_trees(inputs, outcomes, inputs, outcomes, 2, replace(config, min_rows=31), 0))


def test_the_first_split_is_the_best_there_is() -> None:
    rng = np.random.default_rng(1)
    inputs = rng.normal(size=(300, 6)).astype(np.float32)
    outcomes = (inputs[:, [3]] > 0.4).astype(np.int32)
    trees = fit_trees(inputs, outcomes, inputs, outcomes, 2, replace(SMALL, bins=256), 0, rounds=1)
    above = inputs[inputs[:, 3] > 0.4, 3].min()
    assert (trees.feature[0, 0], trees.threshold[0, 0]) == (3, pytest.approx(above, abs=0.02))


def test_trees_grown_from_others_add_to_them() -> None:
    inputs, outcomes = xor(600, 0)
    nothing = inputs[:0], outcomes[:0]
    first = fit_trees(inputs, outcomes, *nothing, 3, replace(SMALL, depth=2), 0, rounds=5)
    begun = first.logits(inputs)
    more, none = (
        fit_trees(inputs, outcomes, *nothing, 3, SMALL, 1, rounds=rounds, start=(begun, begun[:0]), depth=2)
        for rounds in (7, 0)
    )
    both = first.and_then(more)
    assert (len(both), both.depth, len(both.first(5))) == (12, 2, 5)
    rounded = both.scale * len(both)
    assert (np.abs(both.logits(inputs) - begun - more.logits(inputs)) <= rounded).all()
    np.testing.assert_allclose(first.and_then(none).logits(inputs), begun)
    losses = [cross_entropy(forecasts(trees, inputs, outcomes.shape[1]), outcomes) for trees in (both, first)]
    assert losses[0] < losses[1]
