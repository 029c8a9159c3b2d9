"""Training of a router: figures, baselines, what is refused, and real outcomes where they are there."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from presage.datasets.outcomes import Outcomes, prompt_keys
from presage.datasets.outcomes.files import read_outcomes
from presage.datasets.outcomes.split import split_outcomes
from presage.datasets.synthetic.outcomes import generate_outcomes
from presage.errors import ConfigurationError, TraceError
from presage.predictors.router.predictor import RouterConfig, RouterPredictor
from presage.training.baselines import choose_names
from presage.training.router.baselines import BASELINES
from presage.training.router.evaluate import evaluate, held_out
from presage.training.router.train import (
    SHARED_PROMPTS,
    RouterTraining,
    evaluate_router,
    train_router,
)


@pytest.fixture(scope="module")
def training() -> RouterTraining:
    return train_router(generate_outcomes(1500, 0).outcomes, seed=0, name="law")


def test_the_object_of_the_contract_is_json(training: RouterTraining) -> None:
    told = json.loads(json.dumps(training.metrics, allow_nan=False))
    assert (told["kind"], told["model"]) == ("router", "law")
    for figure in ("macro_map", "brier", "ece", "picked_accuracy", "best_single", "oracle", "random"):
        assert 0 < told[figure] <= 1
    assert set(told["by_model"]) == {"large", "small", "slow", "specialist"}
    assert set(told["baselines"]) == set(BASELINES) == set(told["differences"])
    assert set(told["by_task"]) == {"algebra", "code", "history", "travel"}
    assert told["cost_quality"]["unit"] == "cost"
    assert sum(row["positions"] for row in told["reliability"]) == told["labels"]
    assert told["latency_us"] > 0


def test_it_beats_what_knows_no_prompt_and_is_honest(training: RouterTraining) -> None:
    evaluation = training.evaluation
    value, (low, _) = evaluation.differences["base-rate"]["macro_map"]
    assert value > low > 0.05
    assert evaluation.differences["base-rate"]["brier"][1][1] < 0
    assert evaluation.figures.ranking.ece < 0.05
    picking = evaluation.figures.picking
    assert picking.random < picking.best_single < picking.picked_accuracy < picking.oracle
    curve = evaluation.curve
    assert curve is not None
    assert curve.area > curve.area_of_singles


def test_a_training_tells_where_a_baseline_won(training: RouterTraining) -> None:
    assert training.metrics["behind"] == []
    test = generate_outcomes(1500, 7)

    class Oracle:
        def probabilities(self, prompts: Sequence[str]) -> NDArray[np.float32]:
            return test.probabilities.astype(np.float32)

        def picks(self, probabilities: NDArray[np.float32]) -> NDArray[np.int64]:
            return np.asarray(probabilities.argmax(axis=1), np.int64)

    knows_nothing = BASELINES["base-rate"]().fit(test.outcomes.prompts, test.outcomes.correct)
    behind = evaluate(knows_nothing, test.outcomes, 0, baselines={"oracle": Oracle()}).to_dict()["behind"]
    assert {one["at"] for one in behind} == {"in macro mAP", "in Brier score", "in accuracy of the picks"}
    assert all(one["baseline"] == "oracle" and 0 < one["ci95"][0] < one["by"] < one["ci95"][1] for one in behind)
    ahead = evaluate(Oracle(), test.outcomes, 0, baselines={"base-rate": knows_nothing}).to_dict()["behind"]
    assert ahead == []


def test_no_prompt_stands_on_both_sides(training: RouterTraining) -> None:
    outcomes = generate_outcomes(1500, 0).outcomes
    learnt = np.isin(prompt_keys(outcomes), training.predictor.trained_on)
    assert learnt.sum() == training.training_data["prompts"]
    assert training.metrics["data"]["test"].startswith(f"{len(outcomes) - learnt.sum()} prompts")


def test_a_saved_training_is_loaded_and_judged_the_same(training: RouterTraining, tmp_path: Path) -> None:
    training.save(tmp_path / "model")
    told = json.loads((tmp_path / "model" / "metrics.json").read_text())
    assert told["size_bytes"] == training.metrics["size_bytes"] > 0
    again = RouterPredictor.load(tmp_path / "model")
    outcomes = generate_outcomes(1500, 0).outcomes
    fresh, left_out = held_out(outcomes, again)
    judged = evaluate_router(again, fresh, 0)
    assert left_out == training.training_data["prompts"]
    assert judged.evaluation.figures.ranking.macro_map == training.evaluation.figures.ranking.macro_map
    seen = outcomes.take(np.isin(prompt_keys(outcomes), again.trained_on))
    with pytest.raises(TraceError, match="trained on"):
        held_out(seen, again)


def test_the_same_seed_gives_the_same_figures(training: RouterTraining) -> None:
    again = train_router(generate_outcomes(1500, 0).outcomes, seed=0, name="law").metrics
    timed = ("fit_seconds", "latency_us", "size_bytes")
    assert {k: v for k, v in again.items() if k not in timed} == {
        k: v for k, v in training.metrics.items() if k not in timed
    }


def test_separate_test_outcomes_leave_out_what_was_learnt() -> None:
    train = generate_outcomes(400, 0).outcomes
    test = generate_outcomes(200, 5).outcomes
    both = Outcomes(
        train.prompts[:50] + test.prompts,
        test.models,
        np.concatenate([train.correct[:50], test.correct]),
        np.concatenate([train.output_tokens[:50], test.output_tokens]),
        np.concatenate([train.cost[:50], test.cost]),
        train.task[:50] + test.task,
    )
    told = train_router(train, both, baselines=("base-rate",)).metrics
    assert told["data"][SHARED_PROMPTS] == 50
    assert told["prompts"] <= 200
    with pytest.raises(TraceError, match="all 400 test prompts"):
        train_router(train, train)


def test_an_oracle_and_a_liar_are_told_apart() -> None:
    drawn = generate_outcomes(600, 2)

    class Fixed:
        def __init__(self, said: np.ndarray) -> None:
            self.said = said.astype(np.float32)

        def probabilities(self, prompts: object) -> np.ndarray:
            return self.said

        def picks(self, probabilities: np.ndarray) -> np.ndarray:
            return probabilities.argmax(axis=1)

    found = evaluate(
        Fixed(drawn.probabilities), drawn.outcomes, 0, baselines={"liar": Fixed(1 - drawn.probabilities)}, resamples=100
    )
    for figure, sign in (("macro_map", 1), ("brier", -1), ("picked_accuracy", 1)):
        value, (low, high) = found.differences["liar"][figure]
        assert sign * value > 0.1
        assert low < value < high
        assert sign * (low if sign > 0 else high) > 0


@pytest.mark.parametrize("name", sorted(BASELINES))
def test_a_baseline_says_probabilities_without_labels_of_a_model(name: str) -> None:
    train = generate_outcomes(200, 0).outcomes
    correct = train.correct.copy()
    correct[:, 0] = np.nan
    correct[:, 1] = 1.0
    said = BASELINES[name]().fit(train.prompts, correct).probabilities(generate_outcomes(30, 1).outcomes.prompts)
    assert said.shape == (30, 4)
    assert ((said >= 0) & (said <= 1)).all()
    np.testing.assert_allclose(said[:, 0], 0.5, atol=1e-6)
    assert (said[:, 1] > 0.95).all()


def test_lists_of_baselines() -> None:
    assert choose_names("default", BASELINES) == choose_names("all", BASELINES) == tuple(BASELINES)
    assert choose_names("none", BASELINES) == ()
    assert choose_names("knn,knn", BASELINES) == ("knn",)
    with pytest.raises(ConfigurationError, match="no baseline 'magic'"):
        choose_names("magic", BASELINES)
    with pytest.raises(ConfigurationError, match="no baseline 'magic'"):
        train_router(generate_outcomes(50, 0).outcomes, baselines=("magic",))


@pytest.fixture(scope="module")
def outcomes_folder() -> Path:
    folder = Path(__file__).resolve().parents[3] / "shared" / "data" / "outcomes"
    if not folder.is_dir():
        pytest.skip(f"no public outcomes at {folder}")
    return folder


@pytest.mark.slow
@pytest.mark.realdata
@pytest.mark.parametrize("name", ["gsm8k", "routerbench_subset"])
def test_real_outcomes_rank_better_than_a_plain_classifier_a_model(outcomes_folder: Path, name: str) -> None:
    outcomes = read_outcomes([outcomes_folder / f"{name}.jsonl.gz"]).outcomes
    gained = []
    for seed in range(3):
        train, held = split_outcomes(outcomes, 0.2, seed)
        told = train_router(train, held, RouterConfig(), seed=seed, baselines=("tfidf-logistic",))
        gained.append(told.evaluation.differences["tfidf-logistic"]["macro_map"][0])
    assert np.mean(gained) > 0
