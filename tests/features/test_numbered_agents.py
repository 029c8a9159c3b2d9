"""Agents that applications make up for each task: numbered by the order in which a workflow calls them."""

from __future__ import annotations

import json

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from word_samples import trace_of

from presage.datasets.schema import workflow_codes
from presage.features.prefixes import prefixes_of
from presage.features.vocabulary import ENOUGH_TASKS, LEAST_TASKS, Vocabulary

MADE_UP = [f"p{chr(0x4E00 + 2 * w)}{chr(0x4E01 + 2 * w)}p" for w in range(ENOUGH_TASKS)]
"""Workflows of a planner and two agents with names of their own."""
BOTH = Vocabulary(("t", "u"), ("a", "b", "<new agent 1>", "<new agent 2>"), numbered=("t",))


def test_agents_of_few_tasks_are_numbered_as_many_as_a_workflow_calls() -> None:
    words = [word.replace("p", "pq") for word in MADE_UP]
    vocabulary = Vocabulary.from_table(trace_of(words), numbered=True)
    assert vocabulary.agents == ("p", "q", "<new agent 1>", "<new agent 2>")
    assert vocabulary.new_agents.tolist() == [2, 3]
    assert Vocabulary.from_dict(json.loads(json.dumps(vocabulary.to_dict()))) == vocabulary
    assert not len(Vocabulary.from_table(trace_of(words)).new_agents), "other predictors know agents by name alone"


def test_an_agent_of_enough_tasks_keeps_its_name() -> None:
    words = [word.replace("p", "pq") + "x" * (w < LEAST_TASKS) for w, word in enumerate(MADE_UP)]
    assert "x" in Vocabulary.from_table(trace_of(words), numbered=True).agents


def test_with_few_tasks_or_few_steps_of_them_all_agents_keep_their_names() -> None:
    few = [word.replace("p", "pq") for word in MADE_UP[:-1]]
    assert not len(Vocabulary.from_table(trace_of(few), numbered=True).new_agents)
    rare = ["pqpq"] * 2 * ENOUGH_TASKS + ["pxq"]
    assert "x" in Vocabulary.from_table(trace_of(rare), numbered=True).agents


def test_several_runs_of_one_task_are_one_task() -> None:
    words = [*(word.replace("p", "pq") for word in MADE_UP), "pqx", "pqx", "pqx"]
    tasks = [f"t{w}" for w in range(ENOUGH_TASKS)] + ["same"] * 3
    assert "x" not in Vocabulary.from_table(trace_of(words, tasks=tasks), numbered=True).agents


def test_a_workflow_numbers_its_own_new_agents() -> None:
    prefixes = prefixes_of(trace_of(["axbyx", "yax", "xyzx"]), BOTH, 1)
    assert prefixes.agent.tolist() == [0, 2, 1, 3, 2, 2, 0, 3, 2, 3, BOTH.unknown, 2]


def test_nobody_knows_the_name_of_a_new_agent_before_its_first_call() -> None:
    found = prefixes_of(trace_of(["axyx"]), BOTH, 2)
    assert found.outcomes.tolist() == [[2, 3], [3, 2], [2, BOTH.end], [BOTH.end, -1]]
    assert found.named_outcomes.tolist() == [
        [BOTH.unseen, BOTH.unseen],
        [BOTH.unseen, 2],
        [2, BOTH.end],
        [BOTH.end, -1],
    ]


def test_only_workflow_types_that_make_up_agents_number_them() -> None:
    words = [*(word.replace("p", "pq") for word in MADE_UP), *["pqz"] * 40, "pqx"]
    table = trace_of(words, types=["t"] * ENOUGH_TASKS + ["u"] * 41)
    vocabulary = Vocabulary.from_table(table, numbered=True)
    assert vocabulary.agents == ("p", "q", "x", "z", "<new agent 1>", "<new agent 2>")
    assert vocabulary.numbered == ("t",)
    assert [vocabulary.numbers(name) for name in ("t", "u", "unknown")] == [True, False, False]
    prefixes = prefixes_of(trace_of(["py", "py"], types=["t", "u"]), vocabulary, 1)
    assert prefixes.agent.tolist() == [0, 4, 0, vocabulary.unknown]


def test_after_a_release_renamed_agents_are_new_ones_and_outcomes_stay_those_of_the_old_names() -> None:
    prefixes = prefixes_of(trace_of(["abxa"] * 60), BOTH, 1)
    changed = prefixes.with_unknown_names(np.random.default_rng(0))
    assert not np.array_equal(changed.agent, prefixes.agent)
    rows = (of.reshape(60, 4) for of in (prefixes.agent, changed.agent, changed.outcomes))
    for before, after, outcomes in zip(*rows, strict=True):
        if BOTH.unknown in after:  # its workflow type is unknown now, or it calls three new agents
            continue
        named = {int(was): int(agent) for was, agent in zip(before, after, strict=True)}
        assert outcomes.tolist() == [1, named[2], 0, BOTH.end]


@given(st.lists(st.text("abxyz", min_size=1, max_size=8), min_size=1, max_size=5))
def test_step_by_step_agents_are_those_of_the_trace(words: list[str]) -> None:
    table = trace_of(words)
    found = []
    for word in words:
        new: tuple[str, ...] | None = ()
        for name in word:
            agent, new = BOTH.call(name, new)
            found.append(agent)
            assert agent == BOTH.unknown or BOTH.called_by(new)[agent] == name
        assert len(BOTH.called_by(new)) == len(BOTH.agents)
    types = np.zeros(len(found), np.int32)
    assert np.array_equal(BOTH.encode_calls(table["agent"], types, workflow_codes(table)), found)
