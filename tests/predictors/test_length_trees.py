"""Flat trees: they decide as the libraries they come from, and a forest's quantiles are quantile-forest's own."""

import lightgbm
import numpy as np
import pytest
from numpy.typing import NDArray
from quantile_forest import RandomForestQuantileRegressor
from sklearn.ensemble import RandomForestRegressor

from presage.predictors.quantiles.boosted import Ensemble
from presage.predictors.quantiles.forest import FOLD_TREES, INPUT_SHARE, LEAF_ROWS, FlatForest, Grown, grow
from presage.predictors.quantiles.trees import not_above

LEVELS = [0.01, 0.25, 0.5, 0.9, 0.99]


def samples(rows: int, distinct: int | None = None, seed: int = 0) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
    rng = np.random.default_rng(seed)
    inputs = rng.normal(size=(rows, 6)).astype(np.float32)
    inputs[:, 3] = inputs[:, 3].round()  # ties
    labels = inputs[:, 0] + inputs[:, 1] * inputs[:, 2] + rng.normal(size=rows)
    return inputs, labels if distinct is None else np.floor(labels * distinct / 8)


def grown(forest: RandomForestRegressor) -> list[Grown]:
    return [(tree.tree_, rows) for tree, rows in zip(forest.estimators_, forest.estimators_samples_, strict=True)]


@pytest.mark.parametrize(("rows", "distinct"), [(300, None), (2000, None), (600, 20), (40, None)])
def test_quantiles_are_those_of_quantile_forest_on_the_same_leaves(rows: int, distinct: int | None) -> None:
    inputs, labels = samples(rows, distinct)
    settings = {"n_estimators": 12, "min_samples_leaf": 5, "max_features": 0.5, "random_state": 3}
    library = RandomForestQuantileRegressor(max_samples_leaf=None, **settings).fit(inputs, labels)
    fresh = samples(200, seed=1)[0]
    wanted = library.predict(fresh, quantiles=LEVELS)
    found = FlatForest.of(grown(library), inputs, labels).quantiles(fresh, LEVELS)
    # The library keeps labels as float64, we as float32 (24 bits): a relative 6e-8 of the largest label, twice.
    np.testing.assert_allclose(found, wanted, atol=2e-7 * np.abs(labels).max())


def test_the_forest_we_train_answers_as_quantile_forest_does() -> None:
    inputs, labels = samples(900)
    settings = {"min_samples_leaf": LEAF_ROWS, "max_features": INPUT_SHARE, "random_state": 3}
    library = RandomForestQuantileRegressor(FOLD_TREES, max_samples_leaf=None, **settings).fit(inputs, labels)
    fresh = samples(200, seed=1)[0]
    found, wanted = grow(inputs, labels, 3).quantiles(fresh, LEVELS), library.predict(fresh, quantiles=LEVELS)
    np.testing.assert_allclose(found, wanted, atol=2e-7 * np.abs(labels).max())


def test_forests_joined_answer_from_the_leaves_of_all() -> None:
    several = [samples(300, seed=seed) for seed in range(3)]
    settings = {"n_estimators": 5, "min_samples_leaf": 4, "random_state": 0}
    trees = [grown(RandomForestRegressor(**settings).fit(*of)) for of in several]
    joined = FlatForest.joined([FlatForest.of(of, *data) for of, data in zip(trees, several, strict=True)])
    inputs, labels = (np.concatenate(of) for of in zip(*several, strict=True))
    together = [(tree, rows + 300 * number) for number, of in enumerate(trees) for tree, rows in of]
    fresh = samples(100, seed=9)[0]
    wanted = FlatForest.of(together, inputs, labels).quantiles(fresh, LEVELS)
    np.testing.assert_array_equal(joined.quantiles(fresh, LEVELS), wanted)
    joined.trees.check(6, len(joined.starts) - 1)


def test_quantiles_are_numpys_over_all_labels_in_the_leaves() -> None:
    inputs, labels = samples(500)
    forest = RandomForestRegressor(7, min_samples_leaf=4, random_state=0).fit(inputs, labels)
    fresh = samples(20, seed=2)[0]
    at, inside = forest.apply(inputs), forest.apply(fresh)
    found = FlatForest.of(grown(forest), inputs, labels).quantiles(fresh, LEVELS)
    for row in range(len(fresh)):
        drawn = [rows[at[rows, tree] == inside[row, tree]] for tree, rows in enumerate(forest.estimators_samples_)]
        np.testing.assert_allclose(found[row], np.quantile(labels[np.concatenate(drawn)], LEVELS), rtol=1e-6, atol=1e-6)


def test_a_row_alone_gets_what_it_gets_among_others() -> None:
    inputs, labels = samples(400)
    forest = FlatForest.of(grown(RandomForestRegressor(9, random_state=0).fit(inputs, labels)), inputs, labels)
    together = forest.quantiles(inputs, LEVELS)
    alone = np.concatenate([forest.quantiles(row[None], LEVELS) for row in inputs])
    np.testing.assert_array_equal(alone, together)


@pytest.mark.parametrize("objective", ["l2", "l1"])
def test_boosted_trees_sum_to_what_lightgbm_says(objective: str) -> None:
    inputs, labels = samples(1000)
    settings = {"objective": objective, "verbosity": -1, "use_missing": False, "num_leaves": 12}
    booster = lightgbm.train(settings, lightgbm.Dataset(inputs, labels), 40)
    fresh = samples(300, seed=4)[0]
    # Leaf values as float32, 40 of them added up.
    np.testing.assert_allclose(Ensemble.of(booster)(fresh), booster.predict(fresh), atol=40 * 6e-8 * 4)


def test_boosted_trees_without_a_split_say_the_mean() -> None:
    inputs = np.zeros((50, 2), np.float32)
    booster = lightgbm.train({"verbosity": -1}, lightgbm.Dataset(inputs, np.full(50, 3.0)), 5)
    np.testing.assert_allclose(Ensemble.of(booster)(inputs[:2]), booster.predict(inputs[:2]), rtol=1e-6)


def test_thresholds_decide_every_float32_as_before() -> None:
    thresholds = np.random.default_rng(0).normal(size=500)
    near = thresholds.astype(np.float32)
    for values in (near, np.nextafter(near, np.float32(9)), np.nextafter(near, np.float32(-9))):
        np.testing.assert_array_equal(values <= not_above(thresholds), values.astype(np.float64) <= thresholds)


def test_trees_that_lead_astray_are_refused() -> None:
    inputs, labels = samples(100)
    forest = RandomForestRegressor(3, random_state=0).fit(inputs, labels)
    tensors = FlatForest.of(grown(forest), inputs, labels).to_tensors()
    FlatForest.from_tensors(tensors, 6)
    circle = tensors["child"].copy()
    circle[0] = 0
    entries = tensors["entries"] + np.uint16(1000)
    for wrong in (
        {"child": circle},
        {"feature": tensors["feature"] + np.int16(6)},
        {"entries": entries},
        {"starts": tensors["starts"][:-1]},
    ):
        with pytest.raises(ValueError, match=r"lead|leaves"):
            FlatForest.from_tensors({**tensors, **wrong}, 6)
