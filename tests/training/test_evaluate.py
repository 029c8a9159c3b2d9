"""A predictor next to its baselines: the command contract, the types, and the ceiling of a known law."""

import json

import numpy as np
import pytest
from numpy.typing import NDArray

from presage.datasets.synthetic.workflows import generate
from presage.errors import TraceError
from presage.features.moment import Moment
from presage.features.prefixes import Prefixes, prefixes_of
from presage.features.vocabulary import Vocabulary
from presage.predictors.next_agent.ngram import BackoffNgram
from presage.training.next_agent.evaluate import Evaluation, evaluate


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture(scope="module")
def judged() -> tuple[Evaluation, Prefixes]:
    train, test = generate("retry", 150, 0), generate("retry", 100, 1)
    vocabulary = Vocabulary.from_table(train.table)
    prefixes, held = (prefixes_of(drawn.table, vocabulary, 3) for drawn in (train, test))
    grams = {f"markov-{n}": BackoffNgram(n).fit(prefixes, prefixes).predict for n in (1, 3)}

    def bayes(_: Prefixes, moment: Moment) -> NDArray[np.float32]:
        return test.forecasts[moment].astype(np.float32)

    return evaluate(bayes, held, rng(), baselines=grams, resamples=100), held


def test_the_dictionary_is_the_command_contract(judged: tuple[Evaluation, Prefixes]) -> None:
    evaluation, prefixes = judged
    found = json.loads(json.dumps(evaluation.to_dict(), allow_nan=False))
    assert (found["kind"], found["model"], found["version"]) == ("next-agent", None, None)
    assert (found["workflows"], found["steps"]) == (100, prefixes.steps)
    for moment in ("prefill", "completion"):
        figures = found["moments"][moment]
        for name in ("accuracy", "accuracy_by_workflow", "ci95", "nll", "ece", "top2", "positions", "reliability"):
            assert len(figures[name]) == 3
        assert figures["states"] is False
        assert all(low <= a <= high for a, (low, high) in zip(figures["accuracy"], figures["ci95"], strict=True))
    assert found["by_workflow_type"]["retry"]["prefill"]["accuracy"] == found["moments"]["prefill"]["accuracy"]
    assert found["baselines"]["markov-3"]["accuracy"] == found["baselines"]["markov-3"]["prefill"]["accuracy"]


def test_the_best_forecast_leads_and_completion_knows_more(judged: tuple[Evaluation, Prefixes]) -> None:
    found = judged[0].to_dict()
    bayes = found["moments"]["prefill"]["accuracy"][0]
    assert bayes > found["baselines"]["markov-3"]["accuracy"][0] + 0.03
    assert found["moments"]["completion"]["accuracy"][0] > bayes + 0.03


def test_gates_get_correct_and_positions_of_every_workflow(judged: tuple[Evaluation, Prefixes]) -> None:
    evaluation, prefixes = judged
    figures = evaluation.moments["prefill"]
    assert figures.correct.shape == figures.positions.shape == (prefixes.workflows, 3)
    assert figures.positions[:, 0].sum() == prefixes.steps


def test_workflow_types_are_told_apart_and_unknown_ones_named() -> None:
    tables = [generate(law, 20, 0).table for law in ("retry", "triage", "research")]
    full = Vocabulary(("retry", "triage"), Vocabulary.from_table(tables[0]).agents)
    parts = [prefixes_of(table, full, 3) for table in tables]
    together = Prefixes(
        vocabulary=full,
        offsets=np.cumsum([0, *(n for p in parts for n in np.diff(p.offsets))]).astype(np.int64),
        workflow_type=np.concatenate([p.workflow_type for p in parts]),
        task=np.arange(60, dtype=np.int32),
        agent=np.concatenate([p.agent for p in parts]),
        outcomes=np.concatenate([p.outcomes for p in parts]),
        sizes=np.concatenate([p.sizes for p in parts]),
        called=np.concatenate([p.called for p in parts]),
        states={"completion": np.zeros((sum(p.steps for p in parts), 2), np.float32)},
    )
    found = evaluate(BackoffNgram(1).fit(parts[0], parts[0]).predict, together, rng(), resamples=10)
    assert set(found.by_workflow_type) == {"retry", "triage", "unknown"}
    assert dict(found.states) == {"prefill": False, "completion": True}
    alone = evaluate(BackoffNgram(1).fit(parts[0], parts[0]).predict, parts[1], rng(), resamples=10)
    assert found.by_workflow_type["triage"]["prefill"].accuracy == alone.moments["prefill"].accuracy
    assert sum(len(figures["prefill"].positions) for figures in found.by_workflow_type.values()) == 60


def test_equal_forecasts_have_equal_intervals_wherever_they_stand(judged: tuple[Evaluation, Prefixes]) -> None:
    prefixes = judged[1]
    model = BackoffNgram(1).fit(prefixes, prefixes).predict
    found = evaluate(model, prefixes, rng(), baselines={"again": model}, resamples=20)
    interval = found.moments["prefill"].ci95
    assert found.moments["completion"].ci95 == interval
    assert found.baselines["again"]["prefill"].ci95 == interval
    assert evaluate(model, prefixes, rng(), resamples=20).moments["prefill"].ci95 == interval


def test_no_step_is_an_error_that_says_so(judged: tuple[Evaluation, Prefixes]) -> None:
    empty = judged[1].take(np.zeros(0, np.int64))
    with pytest.raises(TraceError, match="no step"):
        evaluate(lambda p, m: np.zeros((0, 3, 8), np.float32), empty, rng())
