"""Out of fold: no task's labels reach what is said of it, and so training rows can calibrate."""

import numpy as np
import pytest
from length_samples import QUANTILES, fresh_rows, law_rows, with_labels
from sklearn.linear_model import Ridge

from presage.datasets.tasks import parts, task_folds
from presage.features.rows import LabelledRows
from presage.predictors.quantiles.boosted import BoostedQuantiles
from presage.predictors.quantiles.estimator import LogEstimator
from presage.predictors.quantiles.forest import ForestQuantiles
from presage.predictors.quantiles.linear import InputEncoding, LogLine

OURS = (ForestQuantiles, BoostedQuantiles)


def test_the_others_of_a_single_fold_are_its_own_rows() -> None:
    (inside, learning), *others = parts(np.zeros(2, np.int64))
    assert (inside.tolist(), learning.tolist(), others) == ([0, 1], [0, 1], [])


def test_rows_of_a_task_share_a_fold() -> None:
    train = law_rows(120, 5)[1]
    fold = task_folds(train.task, 0, 3)
    assert set(fold) == {0, 1, 2}
    assert all(len(set(fold[train.task == task])) == 1 for task in np.unique(train.task))


def test_the_line_says_what_the_ridge_says() -> None:
    encoder, train, _ = law_rows(120, 5)
    labels = np.log1p(train.label.astype(np.float64))
    inputs = InputEncoding.fit(train, labels, len(encoder.models)).inputs(train)
    line = LogLine.fit(inputs, labels)
    smooth = np.where(inputs == -2.0, np.nan, inputs.astype(np.float64))
    smooth[:, 3:6] = 0.0
    smooth[:, 6:15] = np.log1p(smooth[:, 6:15])  # three counts of prompts and six of progress
    usual = np.nan_to_num(np.nansum(smooth, axis=0) / np.maximum(np.isfinite(smooth).sum(axis=0), 1))
    smooth = np.where(np.isnan(smooth), usual, smooth)
    spread = smooth.std(axis=0)
    spread[spread < 1e-9] = np.inf
    wanted = Ridge(alpha=3.0).fit(smooth / spread, labels).predict(smooth / spread)
    np.testing.assert_allclose(line(inputs), np.clip(wanted, labels.min(), labels.max()), atol=1e-4)


@pytest.mark.parametrize("estimator", OURS)
def test_rows_that_could_be_learnt_by_heart_still_calibrate(estimator: type[LogEstimator]) -> None:
    """A number names each task and its labels are all alike: only other tasks show how wrong a forecast is."""

    def drawn(rows: LabelledRows, seed: int) -> LabelledRows:
        rng = np.random.default_rng(seed)
        tasks, index = np.unique(rows.task, return_inverse=True)
        numbers = np.zeros_like(rows.numbers)
        numbers[:, -1] = rng.normal(size=len(tasks))[index]
        level = 5.0 + rng.normal(size=len(tasks))[index]
        alike = LabelledRows(**{**vars(rows), "numbers": numbers})
        return with_labels(alike, np.exp(level + 0.05 * rng.normal(size=len(rows))).astype(np.float32))

    train, fresh = drawn(law_rows()[1], 1), drawn(fresh_rows(), 2)
    said = estimator(0).fit(train, QUANTILES).predict(fresh)
    # 400 tasks calibrate, 300 are judged: ± 3 √(.09 / 400 + .09 / 300)
    assert (fresh.label <= said[:, 1]).mean() == pytest.approx(0.9, abs=0.07)


@pytest.mark.parametrize("estimator", OURS)
def test_training_rows_alone_make_quantiles_cover(estimator: type[LogEstimator]) -> None:
    train, rows = law_rows()[1], fresh_rows()
    fitted = estimator(0).fit(train, QUANTILES)
    assert fitted.conformal.rows.sum() == len(train)
    covered = (rows.label[:, None] <= fitted.predict(rows)).mean(axis=0)
    assert 0.84 < covered[1] < 0.96
    assert covered[2] > 0.97
