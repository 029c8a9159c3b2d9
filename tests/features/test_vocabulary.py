"""Names to numbers and back: what is known, and that all else is one value."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from word_samples import trace_of

from presage.errors import TraceError
from presage.features.vocabulary import Vocabulary, unknown_names


def test_names_are_numbered_in_sorted_order_and_shared_between_workflow_types() -> None:
    vocabulary = Vocabulary.from_table(trace_of(["cab", "ad"], types=["u", "t"]))
    assert vocabulary.agents == ("a", "b", "c", "d")
    assert vocabulary.workflow_types == ("t", "u")
    assert [vocabulary.agent(name) for name in "abcd"] == [0, 1, 2, 3]
    assert [vocabulary.workflow_type(name) for name in "tu"] == [0, 1]


def test_the_unknown_stands_behind_the_last_name_and_end_has_the_same_place_among_outcomes() -> None:
    vocabulary = Vocabulary(("t",), ("a", "b"))
    assert (vocabulary.unknown, vocabulary.end, vocabulary.unseen, vocabulary.outcomes) == (2, 2, 3, 3)
    assert (vocabulary.agent("stranger"), vocabulary.agent(""), vocabulary.workflow_type("other")) == (2, 2, 1)


def test_columns_are_encoded_as_single_names_are() -> None:
    vocabulary = Vocabulary(("t",), ("a", "b"))
    table = trace_of(["abxa", "y"], types=["t", "v"])
    agents, types = vocabulary.encode_agents(table["agent"]), vocabulary.encode_types(table["workflow_type"])
    assert agents.dtype == types.dtype == np.int32
    assert agents.tolist() == [vocabulary.agent(name) for name in "abxay"] == [0, 1, 2, 0, 2]
    assert types.tolist() == [0, 0, 0, 0, 1]


@pytest.mark.parametrize("words", [["aaa", "a"], ["b"]])
def test_a_trace_of_one_agent_is_refused_with_what_to_check(words: list[str]) -> None:
    with pytest.raises(TraceError, match=r"name 1 agent.* at least 2; check that the agent column.* train return-time"):
        Vocabulary.from_table(trace_of(words))


@given(st.lists(st.text(max_size=4), unique=True), st.lists(st.text(max_size=4), unique=True))
def test_an_artefact_keeps_it(workflow_types: list[str], agents: list[str]) -> None:
    vocabulary = Vocabulary(tuple(workflow_types), tuple(agents))
    assert Vocabulary.from_dict(json.loads(json.dumps(vocabulary.to_dict()))) == vocabulary


def test_new_agents_stand_behind_those_that_they_are_beside_and_others_at_the_end() -> None:
    later = trace_of(["abcde"], types=["u"])
    made = Vocabulary(("t",), ("b", "d")).extended(later, {"a": "b", "c": "b"})
    assert (made.agents, made.workflow_types) == (("b", "a", "c", "d", "e"), ("t", "u"))


def test_of_each_workflow_an_agent_becomes_unknown_and_three_tenths_of_the_other_names() -> None:
    agent, offsets = np.tile(np.arange(4, dtype=np.int32), 1000), np.arange(0, 4001, 4)
    vocabulary, types = Vocabulary(("t",), tuple("abcd")), np.zeros(1000, np.int32)
    agents, types = unknown_names(agent, types, offsets, vocabulary, np.random.default_rng(0))
    unknown = (agents == vocabulary.unknown).reshape(1000, 4)
    assert unknown.any(axis=1).all()
    assert (unknown.mean(), types.mean()) == pytest.approx((0.25 + 0.75 * 0.3, 0.3), abs=0.03)
    assert (agents[~unknown.ravel()] == agent[~unknown.ravel()]).all()
