"""Counts learnt online: by hand, against the n-gram of a whole trace, and never more memory than agreed."""

import gc
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from presage.serving_hooks.forecasting.online_counts import BackoffConfig, OnlineCounts, WorkflowHistory
from presage.serving_hooks.workflows.live import STEPS_KEPT

SMALL = BackoffConfig(types=2, agents=3, contexts=4, lengths=4, min_evidence=1)


def run(counts: OnlineCounts, agents: str, tokens: float | None = 10, workflow_type: str = "t") -> None:
    """A whole workflow of agents with names of one letter, each step with so many tokens."""
    seen = WorkflowHistory()
    for agent in agents:
        seen.begun(counts, workflow_type, agent)
        seen.completed(tokens)
    seen.ended(counts, workflow_type)


def test_one_step_ahead_by_hand() -> None:
    """After (a): b twice, END once. Over everything: b twice, END three times, so N = 5 and T = 2; uniform is 1/3."""
    counts = OnlineCounts(BackoffConfig(min_evidence=1))
    for agents in ("ab", "ab", "a"):
        run(counts, agents)
    said = counts.next_agents("t", ["a"])
    assert said is not None
    assert (said.agents, said.evidence) == (("a", "b"), 3)
    everywhere = np.array([0 + 2 / 3, 2 + 2 / 3, 3 + 2 / 3]) / 7
    assert said.probabilities[0] == pytest.approx((np.array([0, 2, 1]) + 2 * everywhere) / 5)


def test_two_agents_back_say_more_than_one() -> None:
    counts = OnlineCounts()
    for _ in range(20):
        run(counts, "axb"), run(counts, "yxc")
    after = {first: counts.next_agents("t", [first, "x"]) for first in "ay"}
    for first, wanted in (("a", "b"), ("y", "c")):
        said = after[first]
        assert said is not None
        assert said.probabilities[0, said.agents.index(wanted)] > 0.9


def test_steps_ahead_are_counted_given_that_the_workflow_goes_that_far() -> None:
    counts = OnlineCounts()
    for _ in range(200):
        run(counts, "abc"), run(counts, "a")
    said = counts.next_agents("t", ["a"])
    assert said is not None
    b, c = said.agents.index("b"), said.agents.index("c")
    assert said.probabilities[0, [b, -1]] == pytest.approx([0.5, 0.5], abs=0.02)
    assert said.probabilities[1, c] == pytest.approx(1, abs=0.02)
    assert said.probabilities[2, -1] == pytest.approx(1, abs=0.02)


def test_an_agent_hardly_seen_is_not_spoken_of() -> None:
    counts = OnlineCounts(BackoffConfig(min_evidence=3))
    run(counts, "ab"), run(counts, "ab")
    assert counts.next_agents("t", ["a"]) is None
    run(counts, "ab")
    assert counts.next_agents("t", ["a"]) is not None
    for unknown in (("t", ["q"]), ("other", ["a"]), ("t", [])):
        assert counts.next_agents(*unknown) is None


def test_a_workflow_that_was_broken_off_teaches_no_end() -> None:
    counts = OnlineCounts(BackoffConfig(min_evidence=1))
    seen = WorkflowHistory()
    seen.begun(counts, "t", "a")
    seen.ended(counts, "t")
    assert counts.next_agents("t", ["a"]) is None


def test_what_was_left_is_the_sum_from_a_step_on() -> None:
    counts = OnlineCounts(BackoffConfig(min_evidence=1))
    run(counts, "aab", tokens=10)
    assert counts.remaining("t", "a") == (2, 25)
    assert counts.remaining("t", "b") == (1, 10)
    assert counts.remaining("t", "q") is None


def test_an_unknown_output_hides_what_was_left_before_it_and_not_after() -> None:
    counts = OnlineCounts(BackoffConfig(min_evidence=1))
    seen = WorkflowHistory()
    for agent, tokens in (("a", 5), ("b", None), ("c", 7), ("d", float("nan")), ("e", 3)):
        seen.begun(counts, "t", agent)
        seen.completed(tokens)
    seen.ended(counts, "t")
    assert {agent: counts.remaining("t", agent) for agent in "abcde"} == dict.fromkeys("abcd") | {"e": (1, 3)}


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=30))
def test_law_the_median_is_that_of_the_latest_values(values: list[float]) -> None:
    counts = OnlineCounts(SMALL)
    for value in values:
        counts.of_type("t").left("a", value)
    assert counts.remaining("t", "a") == (min(4, len(values)), pytest.approx(np.median(values[-4:])))


@given(st.lists(st.tuples(st.sampled_from("tuv"), st.text("abcdefgh", max_size=6)), max_size=25))
def test_law_whatever_is_seen_forecasts_are_distributions_and_the_same_twice(seen: list[tuple[str, str]]) -> None:
    first, second = OnlineCounts(SMALL), OnlineCounts(SMALL)
    for workflow_type, agents in seen:
        for counts in (first, second):
            run(counts, agents, workflow_type=workflow_type)
    assert len(first) <= SMALL.types
    for workflow_type in "tuv":
        for last in ("a", "ab", "hg"):
            said, again = first.next_agents(workflow_type, list(last)), second.next_agents(workflow_type, list(last))
            assert (said is None) == (again is None)
            if said is not None and again is not None:
                assert said.probabilities.shape == (3, len(said.agents) + 1)
                assert len(said.agents) <= SMALL.agents
                assert (said.probabilities > 0).all()
                assert said.probabilities.sum(axis=1) == pytest.approx(1, abs=1e-5)
                assert np.array_equal(said.probabilities, again.probabilities)


def test_a_forgotten_agent_leaves_nothing_behind() -> None:
    counts = OnlineCounts(BackoffConfig(agents=2, min_evidence=1))
    for _ in range(5):
        run(counts, "ab")
    run(counts, "c")
    said = counts.next_agents("t", ["c"])
    assert said is not None
    assert set(said.agents) == {"b", "c"}
    assert counts.next_agents("t", ["a"]) is None
    assert counts.remaining("t", "a") is None


def test_names_without_end_cost_no_memory_without_end() -> None:
    counts = OnlineCounts(BackoffConfig(types=4, agents=8, contexts=16))

    def many(of: str) -> int:
        for number in range(300):
            workflow, name = WorkflowHistory(), f"{of}-{number}-" + "x" * 100
            for agent in (name, name + "2", name + "3"):
                workflow.begun(counts, name if number % 3 else "t", agent)
                workflow.completed(1)
            workflow.ended(counts, "t")
        gc.collect()  # gives back the tuples that Python keeps for later as well
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        first = many("warm")
        assert many("later") - first < 20_000
    finally:
        tracemalloc.stop()


def test_a_workflow_keeps_a_bounded_memory_of_itself() -> None:
    counts, seen = OnlineCounts(BackoffConfig(lengths=1000)), WorkflowHistory()
    for _ in range(10 * STEPS_KEPT):
        seen.begun(counts, "t", "a")
        seen.completed(1)
    assert len(seen.recent) == counts.config.horizon + 1
    seen.ended(counts, "t")
    assert counts.remaining("t", "a") == (STEPS_KEPT, pytest.approx(9.5 * STEPS_KEPT, abs=1))
