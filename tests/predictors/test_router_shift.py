"""The router on topics that training never saw: what is flagged, how opinions shrink, what the artefact keeps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from presage.datasets.outcomes.split import split_outcomes
from presage.datasets.synthetic.outcomes import generate_outcomes
from presage.errors import ArtefactError
from presage.features.prompt_terms import prompt_form
from presage.predictors.common.artefact import read_artefact, write_artefact
from presage.predictors.router.calibration import FOLDS, Opinions, Widening, leave_out_folds
from presage.predictors.router.factors import logit, sigmoid
from presage.predictors.router.novelty import Novelty, PromptEvidence, TrainingPrompts, words_of
from presage.predictors.router.predictor import KIND, RouterPredictor
from presage.training.router.metrics import measure

NEW = "travel"


@pytest.fixture(scope="module")
def router() -> RouterPredictor:
    outcomes = generate_outcomes(1200, 0).outcomes
    known = outcomes.take(np.array([task != NEW for task in outcomes.task]))
    train, calibration = split_outcomes(known, 0.25, 0)
    return RouterPredictor().fit(
        train.prompts,
        train.correct,
        calibration.prompts,
        calibration.correct,
        models=train.models,
        groups=train.task,
    )


def test_a_new_topic_is_flagged_and_known_ones_are_not(router: RouterPredictor) -> None:
    fresh = generate_outcomes(800, 9).outcomes
    new = np.array([task == NEW for task in fresh.task])
    far = router.evidence.far(fresh.prompts)
    assert far[new].mean() > 0.5
    assert far[~new].mean() <= 0.1
    forecast = router.forecast(fresh.prompts[int(np.flatnonzero(new & far)[0])])
    assert forecast.source == "back-off"
    assert forecast.distance > 0.9


def test_on_a_new_topic_what_holds_of_an_opinion_is_kept(router: RouterPredictor) -> None:
    drawn = generate_outcomes(800, 9)
    new = np.array([task == NEW for task in drawn.outcomes.task])
    fresh = drawn.outcomes.take(new)
    ours = measure(router.probabilities(fresh.prompts), fresh.correct, fresh.models, 0, resamples=0)
    base = measure(np.tile(router.base, (len(fresh), 1)), fresh.correct, fresh.models, 0, resamples=0)
    assert ours.macro_map > base.macro_map + 0.05
    assert ours.brier < base.brier


def test_probabilities_shrink_towards_one_point_as_distance_grows(router: RouterPredictor) -> None:
    widening = router.widening
    assert widening is not None
    opinion = np.array([[2.0, -1.0, 0.5, 0.0]])
    base = logit(router.base)
    spread = [
        np.abs(
            logit(widening.probabilities(opinion, base, np.array([d]))) - base - widening.shift - widening.drift * d
        ).sum()
        for d in np.linspace(0, 1, 6)
    ]
    assert (np.diff(spread) <= 1e-4).all()


@given(
    st.floats(0, 2),
    st.floats(0, 2),
    st.floats(-5, 5),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_the_farther_the_less_an_opinion_counts(slope: float, loss: float, opinion: float, a: float, b: float) -> None:
    near, far = sorted((a, b))
    said = [
        float(Widening(0.0, 0.0, slope, loss).probabilities(np.array([[opinion]]), np.zeros(1), np.array([d]))[0, 0])
        for d in (near, far)
    ]
    assert abs(said[1] - 0.5) <= abs(said[0] - 0.5) + 1e-6


def test_what_an_opinion_is_worth_is_learnt_from_families_left_out() -> None:
    rng = np.random.default_rng(0)
    base = np.array([0.6, 0.3])

    def drawn(slope: float, distance: float) -> Opinions:
        opinion = rng.normal(size=(20_000, 2))
        correct = rng.random(opinion.shape) < sigmoid(logit(base) + slope * opinion)
        return Opinions(opinion, base, np.full(len(opinion), distance), correct.astype(np.float32))

    found = Widening.fit([drawn(0.3, 0.9), drawn(0.3, 0.9)], drawn(1.0, 0.1))
    assert found.slope - 0.1 * found.loss == pytest.approx(1.0, abs=0.06)
    assert found.slope - 0.9 * found.loss == pytest.approx(0.3, abs=0.06)
    assert (found.shift, found.drift) == pytest.approx((0, 0), abs=0.06)
    nearer_worse = Widening.fit([drawn(1.0, 0.9), drawn(1.0, 0.9)], drawn(0.3, 0.1))
    assert nearer_worse.loss == 0


def test_families_are_left_out_whole_and_fewer_than_three_not_at_all() -> None:
    groups = ["a"] * 50 + ["b"] * 30 + ["c"] * 30 + ["d"] * 25 + [None] * 10
    folds = leave_out_folds(groups)
    assert set(folds.tolist()) == set(range(FOLDS))
    for name in ("a", "b", "c", "d"):
        assert len({fold for fold, group in zip(folds.tolist(), groups, strict=True) if group == name}) == 1
    assert not leave_out_folds(["a"] * 50 + ["b"] * 50).any()
    assert not leave_out_folds([None] * 100).any()


def test_fewer_known_words_or_a_stranger_form_are_never_nearer(router: RouterPredictor) -> None:
    shares = np.linspace(0, 1, 50)
    by_words = router.evidence.distance(Novelty(shares, np.full(50, 0.5)))
    by_form = router.evidence.distance(Novelty(np.full(50, 0.9), 10 * shares))
    assert (np.diff(by_words) <= 0).all()
    assert (np.diff(by_form) >= 0).all()
    assert by_words[0] == 1


def test_the_artefact_keeps_how_opinions_shrink(router: RouterPredictor, tmp_path: Path) -> None:
    router.save(tmp_path / "model")
    again = RouterPredictor.load(tmp_path / "model")
    assert again.widening == router.widening is not None
    prompts = generate_outcomes(60, 3).outcomes.prompts
    np.testing.assert_array_equal(again.probabilities(prompts), router.probabilities(prompts))
    assert again.forecast(prompts[0]) == router.forecast(prompts[0])


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"widening": {"shift": 0.0, "drift": 0.0, "slope": 1.0, "loss": -1.0}}, "widening"),
        ({"widening": {"shift": 0.0}}, "widening|Widening|missing"),
    ],
)
def test_a_widening_that_does_not_shrink_opinions_is_refused_in_one_sentence(
    router: RouterPredictor, tmp_path: Path, change: dict[str, object], complaint: str
) -> None:
    router.save(tmp_path / "model")
    kept = read_artefact(tmp_path / "model", kind=KIND)
    write_artefact(
        tmp_path / "other", kind=KIND, config={**kept.config, **change}, tensors=kept.tensors, training_data={}
    )
    with pytest.raises(ArtefactError, match=complaint):
        RouterPredictor.load(tmp_path / "other")


def test_nothing_held_out_means_that_only_unknown_words_are_far() -> None:
    prompts = ["one two three", "two three four"]
    training = TrainingPrompts.of(words_of(prompts), prompt_form(prompts))
    evidence = PromptEvidence.of(training, training.novelty([], prompt_form([])))
    assert evidence.far(["one two", "zzz"]).tolist() == [False, True]
