"""Figures of profiles on held-out workflows, beside baselines of the same training set."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from profile_samples import coding, rows_of, table_of

from presage.datasets.read import read_traces
from presage.errors import ConfigurationError, TraceError
from presage.features.sequences import sequences_of
from presage.predictors.profile.predictor import ProfilePredictor
from presage.training.profile.evaluate import NGRAM, VARIANTS, evaluate, fit_profile_baseline
from presage.training.profile.train import evaluate_profiles, train_profiles


def test_the_figures_are_counted_workflow_by_workflow() -> None:
    predictor = ProfilePredictor().fit(sequences_of(table_of(["abc"] * 60)))
    counts = evaluate(predictor, table_of(["abc", "abx", "ab"]), 0).counts
    assert counts.covered.tolist() == [1, 0, 0]
    assert counts.whole.tolist() == [1, 1, 1]
    assert counts.kept.tolist() == [4, 2, 2]  # a, b, c, END; not x nor what follows it; not END after b
    assert counts.calls.tolist() == [4, 4, 3]
    assert counts.correct.tolist() == [3, 1, 1]
    assert counts.positions.tolist() == [3, 3, 2]
    assert counts.sizes.tolist() == [3, 2, 2]  # nothing is known after x


def test_a_cut_workflow_is_judged_by_its_calls_alone() -> None:
    predictor = ProfilePredictor().fit(sequences_of(table_of(["abc"] * 60)))
    made = evaluate(predictor, table_of(["ab"], complete=False), 0)
    assert (made.counts.whole.tolist(), made.counts.kept.tolist(), made.counts.positions.tolist()) == ([0], [2], [1])
    assert made.to_dict()["coverage"] is None


def test_baselines_are_of_the_training_set() -> None:
    train, test = table_of(["abc"] * 30 + ["abd"] * 10), table_of(["abc", "abd", "abe"])
    variants = fit_profile_baseline(VARIANTS, train, test)
    assert variants.covered.tolist() == [1, 1, 0]
    ngram = fit_profile_baseline(NGRAM, train, test)
    assert ngram.positions.tolist() == [3, 3, 3]
    assert ngram.correct.tolist() == [3, 2, 1]
    assert ngram.two[1] == 3


def test_a_training_reports_what_the_contract_names() -> None:
    training = train_profiles(table_of(coding(300)), seed=1)
    metrics = training.metrics
    assert metrics["kind"] == "profile"
    assert metrics["coverage"] > 0.95
    of = metrics["by_workflow_type"]["app"]
    assert of["expression"] == "planner explorer{3,12} (coder tester){1,4} reviewer?"
    assert (of["coverage"], of["workflows"]) == (metrics["coverage"], 60)
    assert set(metrics["baselines"]) == {NGRAM, VARIANTS}
    assert metrics["baselines"][VARIANTS]["coverage"] < metrics["coverage"]
    assert set(metrics["profiles"]) == {"ids", "ids+tokens", "+text", "+states", "engine"}
    low, high = metrics["accuracy_ci95"]
    assert low < metrics["accuracy"] < high
    assert metrics["set_precision"] == pytest.approx(metrics["set_recall"] / metrics["set_size"])
    assert metrics["accuracy"] >= metrics["baselines"][NGRAM]["accuracy"] - 0.02


def test_a_better_baseline_is_named() -> None:
    """A predictor of another plan is behind everything that knows this one."""
    train = table_of(["abc"] * 60)
    predictor = ProfilePredictor().fit(sequences_of(table_of(["acb"] * 60)))
    rivals = {name: fit_profile_baseline(name, train, train) for name in (NGRAM, VARIANTS)}
    lost = evaluate(predictor, train, 0, rivals).to_dict()["behind"]
    assert {(one["baseline"], one["at"].split()[1]) for one in lost} >= {(NGRAM, "accuracy"), (VARIANTS, "coverage")}


def test_one_agent_alone_can_be_described() -> None:
    training = train_profiles(table_of([["main"] * (1 + at % 3) for at in range(60)]))
    assert training.metrics["by_workflow_type"]["app"]["expression"] == "main{1,3}"


def test_other_applications_and_unknown_baselines_are_refused() -> None:
    table = table_of(["abc"] * 40)
    predictor = train_profiles(table).predictor
    import pandas as pd

    other = read_traces(pd.DataFrame(rows_of(["xy"] * 3, workflow_type="other"))).table
    with pytest.raises(TraceError, match="the traces are of 'other', the profiles of 'app'"):
        evaluate_profiles(predictor, other, 0)
    with pytest.raises(ConfigurationError, match="markov-3, variants"):
        train_profiles(table, baselines=("nothing",))


@pytest.mark.realdata
@pytest.mark.parametrize("name", ["autocoderover", "taubench"])
def test_public_traces_are_covered(name: str, workflows_folder: Path) -> None:
    metrics = train_profiles(read_traces(workflows_folder / f"{name}.jsonl.gz").table).metrics
    assert metrics["coverage"] > 0.9
    assert metrics["call_coverage"] > 0.95
    assert np.isfinite(metrics["latency_us"])
