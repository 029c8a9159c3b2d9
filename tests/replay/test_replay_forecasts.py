"""Forecasts for a replay: the truth, noise, names that mean nothing; policies by name."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from by_name import ByName
from profile_samples import table_of
from replay_samples import chain

from presage.errors import ConfigurationError, PresageError
from presage.features.sequences import sequences_of
from presage.predictors.profile.predictor import ProfilePredictor
from presage.replay.forecasts import OracleForecaster, OutputLengthOracle, source
from presage.replay.policies import POLICIES, Policy, crossed, ends, named
from presage.replay.runs import Setting, forecaster_for
from presage.replay.workload import Arrivals, PromptConvention
from presage.serving_hooks.engine_file import read_engine
from presage.serving_hooks.workflows.identity import Step

JOBS = [chain(0, "pqrp", PromptConvention()), chain(1, "qq", PromptConvention())]
BROADCAST = Policy("broadcast", frozenset({"eviction", "multicast"}), more={"radius": 2})


def test_the_truth_names_the_agents_to_come_and_then_the_end() -> None:
    truth = ByName(OracleForecaster(JOBS))
    said = truth.on_prefill("t", "w0", "q", step=1)
    assert said.agents == ("p", "q", "r")
    assert said.probabilities.tolist() == [[0, 0, 1, 0], [1, 0, 0, 0], [0, 0, 0, 1]]
    assert truth.on_completion("t", "w0").probabilities.tolist() == said.probabilities.tolist()
    assert truth.on_prefill("t", "w1", "q", step=1).probabilities[:, 3].tolist() == [1, 1, 1]


def test_noise_is_a_share_of_the_uniform() -> None:
    said: Any = ByName(source("noise:0.2")(JOBS, lambda: 0.0)).on_prefill("t", "w0", "p", step=0)
    assert said.probabilities[0] == pytest.approx([0.05, 0.85, 0.05, 0.05])
    assert said.probabilities.sum(axis=1) == pytest.approx(np.ones(3))
    nothing: Any = ByName(source("noise:1")(JOBS, lambda: 0.0)).on_prefill("t", "w0", "p", step=0)
    assert nothing.probabilities == pytest.approx(np.full((3, 4), 0.25))


def left(forecasts: str, workflow: str, number: int) -> float:
    of: Any = ByName(source(forecasts)(JOBS, lambda: 0.0))
    return of.remaining_tokens(Step("t", workflow, "p", number), 0)


def test_the_truth_knows_what_is_left_and_noise_mixes_it_with_that_of_some_step() -> None:
    assert [left("oracle", "w0", number) for number in range(4)] == [80, 60, 40, 20]  # 20 tokens a step
    assert [left("oracle", "w1", number) for number in range(2)] == [40, 20]
    everywhere = {left("noise:1", "w0", number) for number in range(4)}
    assert everywhere <= {80, 60, 40, 20}
    for workflow, number, true in (("w0", 0, 80), ("w0", 2, 40), ("w1", 1, 20)):
        some = left("noise:1", workflow, number)
        assert left("noise:0.25", workflow, number) == pytest.approx(0.75 * true + 0.25 * some)


def test_noise_at_its_most_says_nothing_of_what_is_left() -> None:
    many = [chain(n, "p" * (1 + n % 7), PromptConvention(), output=5 + n % 11) for n in range(400)]
    of: Any = ByName(source("noise:1")(many, lambda: 0.0))
    pairs = [
        (sum(s.output_tokens for s in job.steps), of.remaining_tokens(Step("t", job.workflow_id, "p", 0), 0))
        for job in many
    ]
    assert abs(np.corrcoef(np.array(pairs).T)[0, 1]) < 0.15


def test_the_shortest_request_goes_by_its_own_output_alone() -> None:
    jobs = [chain(0, "ppp", PromptConvention(), output=30), chain(1, "p", PromptConvention(), output=40)]
    of = ByName(OutputLengthOracle(jobs))
    assert of.remaining_tokens(Step("t", "w0", "p", 0), 0) == 30
    assert of.remaining_tokens(Step("t", "w1", "p", 0), 0) == 40


@pytest.mark.parametrize("name", ["noise:2", "noise:", "noise:x", "nowhere"])
def test_a_source_nobody_knows_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match="--forecasts"):
        source(name)


def test_policies_are_found_by_name_and_missing_switches_are_refused() -> None:
    assert [policy.name for policy in named("stock, oracle,stock")] == ["stock", "oracle"]
    with pytest.raises(ConfigurationError, match="there are stock, lifecycle"):
        named("best")
    with pytest.raises(ConfigurationError, match="cannot do multicast and radius"):
        named(f"{__name__}:BROADCAST")


def test_a_scheduler_changes_who_runs_next_and_nothing_else() -> None:
    fcfs, sjf, stjf = crossed([POLICIES["stock"]], "fcfs,sjf,stjf")
    assert (fcfs.name, fcfs.settings) == ("stock+fcfs", None)
    assert (sjf.settings, sjf.ranked, sjf.forecasts) == ({"priority"}, "output", None)
    assert stjf.ranked == "asked"
    first, clairvoyant = crossed([POLICIES["full"]], "fcfs, stjf-oracle")
    assert first.settings == {"eviction", "admission", "prefetch"}
    assert (clairvoyant.settings, clairvoyant.forecasts) == (POLICIES["full"].settings, "asked")
    assert clairvoyant.sources == {"asked", "oracle"}
    with pytest.raises(ConfigurationError, match="--scheduler 'best' is unknown; there are fcfs, sjf"):
        crossed([fcfs], "fcfs,best")


def test_gains_are_shares_of_what_can_be_gained_by_the_same_means() -> None:
    assert ends("full") == ("stock", "oracle")
    assert ends("lifecycle+stjf") == ("lifecycle+fcfs", "lifecycle+stjf-oracle")


def test_a_policy_switches_everything_else_off() -> None:
    assert POLICIES["stock"].presage() is None
    off = dict.fromkeys(("priority", "admission", "prefetch", "infer_workflows"), False)
    assert POLICIES["lifecycle"].presage() == {**off, "eviction": True}


def test_a_profile_stands_behind_counts_as_in_serving(tmp_path: Path) -> None:
    agents = ["planner", *["explorer"] * 3, "coder", "tester"]
    ProfilePredictor().fit(sequences_of(table_of([agents] * 40, output_tokens=20))).save(tmp_path)
    of: Any = ByName(source("counts", profile=str(tmp_path))(JOBS, lambda: 0.0))
    live = of.on_prefill("app", "w", "planner", step=0, input_tokens=1)
    assert (live.source, live.remaining.source, live.remaining.ranking) == ("profile", "profile", 120)
    assert live.agents[live.probabilities[0].argmax()] == "explorer"
    assert of.on_prefill("t", "w0", "p", step=0).source == "none"


@pytest.mark.parametrize("forecasts", ["oracle", "noise:0.2"])
def test_the_truth_needs_no_profile(forecasts: str) -> None:
    with pytest.raises(ConfigurationError, match=f"--profile with --forecasts {forecasts}"):
        source(forecasts, profile="profile")


@pytest.mark.parametrize("forecasts", ["oracle", "noise:0.2"])
def test_who_says_itself_what_is_left_is_asked_without_a_model_of_lengths(forecasts: str) -> None:
    with pytest.raises(ConfigurationError, match=f"--forecasts {forecasts}: {forecasts} already forecasts"):
        source(forecasts, lengths="lengths")


def test_a_model_of_lengths_is_for_who_asks_models_and_not_for_the_truth_beside_it() -> None:
    jobs, convention = (chain(0, "pq", PromptConvention()),), PromptConvention()
    setting = Setting(jobs, convention, Arrivals(1), read_engine("invented"), "counts", lengths="no such folder")
    assert isinstance(forecaster_for(setting, "oracle", lambda: 0.0), OracleForecaster)
    with pytest.raises(PresageError, match="no such folder"):
        forecaster_for(setting, "asked", lambda: 0.0)
