"""Estimators of lengths on the known law: what they reach, what bounds and gaps do, and the calibration by hand."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from length_samples import QUANTILES, fresh_rows, law_rows, pinball, with_labels
from scipy.special import ndtr

from presage.errors import TraceError
from presage.features.rows import LEARNT_PROFILES, LabelledRows
from presage.predictors.length.baselines import LENGTH_BASELINES
from presage.predictors.quantiles.choice import ESTIMATORS
from presage.predictors.quantiles.conformal import Conformal, least_rows
from presage.predictors.quantiles.estimator import LogEstimator

OURS = tuple(ESTIMATORS.values())
ALL = {**ESTIMATORS, **{f"baseline {name}": fit for name, fit in LENGTH_BASELINES.items()}}


def predictions(name: str, train: LabelledRows, others: LabelledRows) -> np.ndarray:
    """Quantiles of other rows by an estimator or a baseline."""
    if name in ESTIMATORS:
        return ESTIMATORS[name](0).fit(train, QUANTILES).predict(others)
    return ALL[name](train, QUANTILES)(others)


@pytest.fixture(scope="module", params=OURS, ids=lambda c: c.name)
def fitted(request: pytest.FixtureRequest) -> LogEstimator:
    return request.param(seed=0).fit(law_rows()[1], QUANTILES)


def test_quantiles_rise_and_beat_the_median_per_step(fitted: LogEstimator) -> None:
    _, train, _ = law_rows()
    rows = fresh_rows()
    said = fitted.predict(rows)
    assert said.shape == (len(rows), 3)
    assert said.dtype == np.float32
    assert (np.diff(said, axis=1) >= 0).all()
    assert (said >= 0).all()
    usual = LENGTH_BASELINES["median-per-step"](train, QUANTILES)(rows)
    assert pinball(rows.label, said[:, 0], 0.5) < 0.9 * pinball(rows.label, usual[:, 0], 0.5)
    assert 0.84 < (rows.label <= said[:, 1]).mean() < 0.96


def test_one_row_gets_what_it_gets_among_many(fitted: LogEstimator) -> None:
    rows = fresh_rows().take(np.arange(40))
    together = fitted.predict(rows)
    for at in range(len(rows)):
        alone = fitted.predict_one(
            int(rows.workflow_type[at]), int(rows.agent[at]), int(rows.model[at]), rows.numbers[at]
        )
        np.testing.assert_array_equal(alone, together[at])


def test_tensors_make_the_same_estimator(fitted: LogEstimator) -> None:
    again = type(fitted).from_tensors(fitted.to_tensors(), fitted.quantiles)
    np.testing.assert_array_equal(again.predict(fresh_rows()), fitted.predict(fresh_rows()))


def test_unknown_names_and_missing_numbers_are_answered(fitted: LogEstimator) -> None:
    rows = fresh_rows()
    types, agents = len(rows.vocabulary.workflow_types), len(rows.vocabulary.agents)
    said = fitted.predict_one(types, agents, 99, np.full(rows.numbers.shape[1], np.nan, np.float32))
    assert np.isfinite(said).all()
    assert (np.diff(said) >= 0).all()


@pytest.mark.parametrize("of", OURS, ids=lambda c: c.name)
def test_quantiles_hold_for_agents_and_types_with_other_names_and_are_not_much_wider(of: type[LogEstimator]) -> None:
    (encoder, train, _), rows = law_rows(), fresh_rows()
    fitted = of(seed=0).fit(train, QUANTILES, encoder.observed, encoder.nameless)
    types = len(rows.vocabulary.workflow_types)
    retyped = replace(rows, workflow_type=np.full_like(rows.workflow_type, types))
    constant = LENGTH_BASELINES["constant"](train, QUANTILES)(rows)
    for changed in (encoder.nameless(rows), retyped):
        said = fitted.predict(changed)
        assert 0.86 < (rows.label <= said[:, 1]).mean() <= 0.99
        assert pinball(rows.label, said[:, 1], 0.9) < pinball(rows.label, constant[:, 1], 0.9)
    both = fitted.predict(replace(encoder.nameless(rows), workflow_type=retyped.workflow_type))
    assert np.median(both[:, 2]) > np.median(said[:, 2]), "nothing says that it is an application that was learnt"


def test_estimators_from_before_there_were_quantiles_for_other_names_are_read(fitted: LogEstimator) -> None:
    rows = fresh_rows()
    unknown = replace(rows, agent=np.full_like(rows.agent, len(rows.vocabulary.agents)))
    tensors = fitted.to_tensors()
    older = {**tensors, "conformal/shifts": tensors["conformal/shifts"][: len(LEARNT_PROFILES)]}
    read = type(fitted).from_tensors(older, fitted.quantiles)
    np.testing.assert_array_equal(read.predict(rows), fitted.predict(rows))
    assert np.median(read.predict(unknown)[:, 2]) > np.median(fitted.predict(unknown)[:, 2])


@pytest.mark.parametrize("name", ALL)
def test_bounds_and_unknown_labels_teach_nothing(name: str) -> None:
    _, train, others = law_rows(120, 5)
    spoilt = np.arange(len(train)) % 3 == 0
    clean = train.take(~spoilt)
    remaining = np.where(spoilt, np.float32(9e6), train.label)
    remaining[np.flatnonzero(spoilt)[::2]] = np.nan
    dirty = LabelledRows(**{**vars(train), "label": remaining, "lower_bound": spoilt})
    np.testing.assert_array_equal(*(predictions(name, rows, others) for rows in (dirty, clean)))


@pytest.mark.parametrize("name", ALL)
def test_rows_without_any_label_are_refused(name: str) -> None:
    _, train, others = law_rows(120, 5)
    with pytest.raises(TraceError, match=r"none of .* LLM steps"):
        predictions(name, with_labels(train, np.full(len(train), np.nan, np.float32)), others)


@pytest.mark.parametrize("name", ALL)
def test_equal_lengths_are_predicted(name: str) -> None:
    _, *parts = law_rows(120, 5)
    same = [with_labels(r, np.full(len(r), 70, np.float32)) for r in parts]
    said = predictions(name, same[0], same[1])
    if name == "baseline input-length":
        assert np.isfinite(said).all()
    else:
        np.testing.assert_allclose(said[:, 0], 70, rtol=1e-3)


def test_input_length_ranks_by_input_length() -> None:
    encoder, train, _ = law_rows()
    rows = fresh_rows()
    said = LENGTH_BASELINES["input-length"](train, QUANTILES)(rows)[:, 0]
    tokens = rows.numbers[:, encoder.names.index("prompt_tokens")]
    np.testing.assert_array_equal(np.argsort(said, kind="stable"), np.argsort(tokens, kind="stable"))


def test_medians_are_those_of_the_narrowest_group_with_enough_rows() -> None:
    _, train, _ = law_rows()
    said = LENGTH_BASELINES["median-per-step"](train, QUANTILES)(train)
    group = (train.workflow_type == 0) & (train.agent == train.agent[0]) & (train.step == train.step[0])
    assert group.sum() >= 5
    np.testing.assert_allclose(said[0], np.quantile(train.label[group], QUANTILES), rtol=1e-6)


# --- conformal ---


def test_a_shift_is_the_score_of_the_rank_that_the_paper_names() -> None:
    scores = np.random.default_rng(0).permutation(199).astype(float)
    fitted = Conformal.fit(np.stack([scores] * 3, axis=1)[None], np.zeros(199, np.int32), 1, QUANTILES, 100)
    # ⌈200 · q⌉-th smallest of 0..198
    assert fitted.shifts[0, 0].tolist() == [99, 179, 197]
    assert fitted.calibrated.tolist() == [True, False]


@given(st.integers(99, 400), st.sampled_from(QUANTILES[1:]), st.integers(0, 1000))
def test_the_promised_share_of_calibration_rows_is_covered_to_one_standard_error(
    rows: int, quantile: float, seed: int
) -> None:
    scores = np.random.default_rng(seed).normal(size=(rows, 1))
    fitted = Conformal.fit(scores[None], np.zeros(rows, np.int32), 1, (quantile,), 1)
    covered = float((scores <= fitted.shifts[0, 0, 0] + 1e-6).mean())
    error = np.sqrt(covered * (1 - covered) / rows)
    assert quantile <= covered + error + 1e-6
    assert covered * rows <= quantile * (rows + 1) + 1


def test_rows_of_a_task_count_as_the_independent_rows_that_they_are_worth() -> None:
    """By hand: ten tasks of 20 equal rows are worth ten rows, 200 tasks of one row 200: ranks ⌈200 q (m + 1) / m⌉."""
    kind, apart, together = np.zeros(200, np.int32), np.arange(200), np.repeat(np.arange(10), 20)
    found = [Conformal.fit(task[None, :, None], kind, 1, (0.8,), 1, task=task).shifts for task in (apart, together)]
    assert [float(of[0, 0, 0]) for of in found] == [160, 8]  # of 200 rows the 161st, of ten tasks the ninth: ⌈11 · .8⌉


LOCATIONS = np.array([0.0, 1.2816, 2.3263])
"""Of the quantiles of a standard normal."""


def drawn_scores(rng: np.random.Generator, tasks: int, rows: int, between: float) -> tuple[np.ndarray, np.ndarray]:
    """The task of each row, and scores of QUANTILES with 1.15 times the predicted spread; `between` tasks differ."""
    task = np.repeat(np.arange(tasks), rows)
    own = np.sqrt(1 - between**2) * rng.normal(size=len(task))
    return task, 1.15 * (between * rng.normal(size=tasks)[task] + own)[:, None] - LOCATIONS


@pytest.mark.parametrize(
    ("tasks", "rows", "between", "types"),
    [(60, 20, 0.5, 1), (150, 20, 0.5, 1), (150, 20, 0.7, 1), (60, 8, 0.5, 1), (150, 20, 0.5, 3), (60, 20, 0.9, 1)],
)
def test_rows_of_new_tasks_are_covered_as_often_as_named_at_hardly_more_width_than_by_split_conformal(
    tasks: int, rows: int, between: float, types: int
) -> None:
    covered, widths = [], []
    rng = np.random.default_rng(5)
    ranks = np.ceil((tasks * rows + 1) * np.array(QUANTILES) - 1e-9).astype(int) - 1
    for _ in range(400):
        task, scores = drawn_scores(rng, tasks, rows, between)
        fitted = Conformal.fit(scores[None], (task % types).astype(np.int32), types, QUANTILES, 100, task=task)
        shifts = fitted.shifts[0, :types]
        # The exact probability that a row of a new task lies within.
        covered.append(ndtr((shifts + LOCATIONS) / 1.15).mean(axis=0))
        plain = np.sort(scores, axis=0)[ranks, np.arange(3)]
        widths.append(np.stack([shifts.mean(axis=0) + LOCATIONS, plain + LOCATIONS])[:, 1:])
    assert (np.mean(covered, axis=0) >= np.array(QUANTILES) - 0.002).all()
    ours, plains = np.mean(widths, axis=0)
    assert (ours <= 1.1 * plains).all()


@pytest.mark.parametrize("rows", [0, 5, 60])
def test_below_the_floor_upper_quantiles_are_cautious_and_marked(rows: int) -> None:
    rng = np.random.default_rng(1)
    scores = rng.normal(size=(500 + rows, 3))
    kind = np.r_[np.zeros(500, np.int32), np.ones(rows, np.int32)]
    fitted = Conformal.fit(scores[None], kind, 2, QUANTILES, 100)
    assert fitted.calibrated.tolist() == [True, False, False]
    assert (fitted.shifts[0, 1:, 1:] >= fitted.shifts[0, 0, 1:]).all()
    # an unknown type is wider than anything seen, one with a few rows only where its own are
    assert (fitted.shifts[0, 2, 1:] >= scores[:, 1:].max(axis=0) - 1e-6).all()
    if rows == 60:
        assert fitted.shifts[0, 1, 1] < scores[:, 1].max() - 1
        wide = Conformal.fit((scores + 5 * kind[:, None])[None], kind, 2, QUANTILES, 100)
        covered = (scores[kind == 1] + 5 <= wide.shifts[0, 1] + 1e-6).mean(axis=0)
        assert (covered[1:] >= np.array(QUANTILES[1:]) - 0.08).all()  # to two standard errors of 60 rows
    few = Conformal.fit(scores[None, :20], kind[:20], 2, QUANTILES, 100)
    assert not few.calibrated.any()
    assert (few.shifts[0, :, 1:] > scores[:20, 1:].max(axis=0) + 1).all()


def test_rows_of_unknown_types_do_not_make_the_unknown_type_known() -> None:
    scores = np.random.default_rng(1).normal(size=(560, 1))
    kind = np.repeat(np.arange(2, dtype=np.int32), (500, 60))  # of one type, so 1 stands for all others
    fitted = Conformal.fit(scores[None], kind, 1, (0.9,), 100)
    assert fitted.shifts[0, 1, 0] == pytest.approx(scores.max())


def test_types_that_are_one_are_shifted_as_one() -> None:
    """Seven types drawn at random out of one, 28 tasks each, whose five rows stand and fall together."""
    rng = np.random.default_rng(3)
    task = np.repeat(np.arange(196), 5)
    scores = np.repeat(rng.normal(size=196), 5)[:, None]
    kind = (task % 7).astype(np.int32)
    together = np.sort(scores[:, 0])[np.ceil(980 * np.array([0.5, 0.9]) * 197 / 196).astype(int) - 1]
    fitted = Conformal.fit(np.repeat(scores, 2, axis=1)[None], kind, 7, (0.5, 0.9), 100, task=task)
    np.testing.assert_allclose(fitted.shifts[0, :7, 0], together[0], atol=1e-6)
    # An upper shift is the larger of the own and the common one: a type that is wider is not under-covered.
    assert (fitted.shifts[0, :7, 1] >= together[1] - 1e-6).all()
    for own in range(7):
        assert (scores[kind == own, 0] <= fitted.shifts[0, own, 1] + 1e-6).mean() >= 0.9


def test_a_type_that_is_another_is_shifted_by_its_own_rows() -> None:
    rng = np.random.default_rng(3)
    kind = np.repeat(np.arange(2, dtype=np.int32), 500)
    scores = (rng.normal(size=1000) + 3 * kind)[:, None]
    fitted = Conformal.fit(scores[None], kind, 2, (0.9,), 100)
    for own in (0, 1):
        mine = scores[kind == own, 0]
        assert abs((mine <= fitted.shifts[0, own, 0]).mean() - 0.9) < 0.03


def test_the_floor_is_no_lower_than_what_a_quantile_can_be_promised_with() -> None:
    assert [least_rows(q) for q in (0.5, 0.9, 0.99)] == [1, 9, 99]
    scores = np.zeros((1, 98, 1))
    assert not Conformal.fit(scores, np.zeros(98, np.int32), 1, (0.99,), 10).calibrated.any()
