"""Forecasts for a replay: the truth, noise, names that mean nothing; policies by name."""

from typing import Any

import numpy as np
import pytest
from replay_samples import chain

from presage.errors import ConfigurationError
from presage.serving_hooks.replay.forecasts import Truth, source
from presage.serving_hooks.replay.policies import POLICIES, choose
from presage.serving_hooks.replay.workload import Convention

JOBS = [chain(0, "pqrp", Convention()), chain(1, "qq", Convention())]
SWITCHES = ("priority", "eviction")


def test_the_truth_names_the_agents_to_come_and_then_the_end() -> None:
    truth = Truth(JOBS)
    said = truth.on_prefill("t", "w0", "q", step=1)
    assert said.agents == ("p", "q", "r")
    assert said.probabilities.tolist() == [[0, 0, 1, 0], [1, 0, 0, 0], [0, 0, 0, 1]]
    assert truth.on_completion("t", "w0").probabilities.tolist() == said.probabilities.tolist()
    assert truth.on_prefill("t", "w1", "q", step=1).probabilities[:, 3].tolist() == [1, 1, 1]


def test_noise_is_a_share_of_the_uniform() -> None:
    said: Any = source("noise:0.2")(JOBS, lambda: 0.0).on_prefill("t", "w0", "p", step=0)
    assert said.probabilities[0] == pytest.approx([0.05, 0.85, 0.05, 0.05])
    assert said.probabilities.sum(axis=1) == pytest.approx(np.ones(3))
    nothing: Any = source("noise:1")(JOBS, lambda: 0.0).on_prefill("t", "w0", "p", step=0)
    assert nothing.probabilities == pytest.approx(np.full((3, 4), 0.25))


@pytest.mark.parametrize("name", ["noise:2", "noise:", "noise:x", "nowhere"])
def test_a_source_nobody_knows_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match="--forecasts"):
        source(name)


def test_policies_are_found_by_name_and_missing_switches_are_refused() -> None:
    assert [policy.name for policy in choose("stock, oracle,stock", SWITCHES)] == ["stock", "oracle"]
    with pytest.raises(ConfigurationError, match="there are stock, lifecycle"):
        choose("best", SWITCHES)
    with pytest.raises(ConfigurationError, match="admission and prefetch"):
        choose("full", SWITCHES)


def test_a_policy_switches_everything_else_off() -> None:
    assert POLICIES["stock"].presage(SWITCHES) is None
    assert POLICIES["lifecycle"].presage(SWITCHES) == {"priority": False, "eviction": True}
    assert POLICIES["lifecycle"].presage((*SWITCHES, "prefetch"))["prefetch"] is False  # type: ignore[index]
