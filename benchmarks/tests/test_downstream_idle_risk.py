"""Downstream idle risk of fleet_priority.py: expected steps by counting, risk, and the order of keys."""

import math

import pytest
from fleet_priority import AGEING, BOARD, BaseAndAgeing, Transitions, idle_risk
from hypothesis import given
from hypothesis import strategies as st


def counted(*workflows: str) -> Transitions:
    found = Transitions()
    for agents in workflows:
        for agent, after in zip(agents, [*agents[1:], None], strict=True):
            found.follow(agent, after)
    return found


def test_steps_of_a_chain_count_the_present_one_and_end() -> None:
    chain = counted("abc")
    assert [chain.ahead(agent)[0] for agent in "abc"] == pytest.approx([3, 2, 1])
    assert chain.ahead("a")[1] == pytest.approx({"b": 1.0, "c": 0.5})
    assert chain.ahead("c")[1] == {}


def test_a_loop_takes_the_expected_number_of_steps_and_an_agent_may_come_again() -> None:
    loop = counted("abab", "ab")  # after b: one of three times a again
    steps, near = loop.ahead("b")
    assert steps == pytest.approx(2.0)  # 1 + (1 + steps) / 3
    assert near == pytest.approx({"a": 1 / 3, "b": 1 / 3 / 2})


def test_an_agent_that_may_never_come_counts_by_its_probability() -> None:
    branches = counted("ab", "ac", "ac", "ac")
    assert branches.ahead("a")[1] == pytest.approx({"b": 0.25, "c": 0.75})


def test_an_unknown_agent_has_the_lowest_priority_and_no_risk() -> None:
    assert counted("ab").ahead("z") == (math.inf, {})


def test_only_agents_of_starved_models_are_at_risk() -> None:
    near = counted("abc").ahead("a")[1]
    models = {"a": "large", "b": "code", "c": "text"}
    assert idle_risk(near, models, set()) == 0
    assert idle_risk(near, models, {"text"}) == pytest.approx(0.5)
    assert idle_risk(near, models, {"code", "text"}) == pytest.approx(1.5)


@given(st.lists(st.text("abcd", min_size=1, max_size=8), min_size=1, max_size=12))
def test_steps_are_those_of_the_chain_that_was_counted(workflows: list[str]) -> None:
    found = counted(*workflows)
    seen = {agent for agents in workflows for agent in agents}
    for agent in seen:
        steps, near = found.ahead(agent)
        assert 1 <= steps < math.inf
        assert near.keys() <= seen
        assert all(0 < value <= 1 + 1e-6 for value in near.values())


def test_a_waiting_request_passes_a_new_one_of_higher_priority_in_time() -> None:
    keys = BaseAndAgeing()
    BOARD.update({"far": (0.1, 0.0), "near": (1.0, 0.0), "later": (1.0, 0.0)})
    keys.add("far", 0, 0.0, "t", None)
    keys.add("near", 0, 0.9 / AGEING - 1, "t", None)
    keys.add("later", 0, 0.9 / AGEING + 1, "t", None)
    assert sorted(("later", "far", "near"), key=keys.key) == ["near", "far", "later"]
