"""The automaton: memory, probabilities and intervals, pruning, what is left, and running workflows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profile_samples import coding, profile, table_of

from presage.predictors.profile.automaton import END, Automaton, ProfilePlace, wilson
from presage.predictors.profile.profile import TypeProfile


def place(of: TypeProfile, agents: str | list[str], parents: list[tuple[int, ...]] | None = None) -> ProfilePlace:
    found = ProfilePlace()
    for index, agent in enumerate(agents):
        found = of.automaton.step(found, agent, index, parents[index] if parents else None, of.alphabet)
    return found


def test_wilson() -> None:
    assert wilson(8, 10) == pytest.approx((0.490, 0.943), abs=1e-3)  # Newcombe (1998)
    assert wilson(0, 0) == (0.0, 1.0)
    assert wilson(5, 5)[1] == pytest.approx(1.0)


def test_what_follows_may_depend_on_what_came_before() -> None:
    made = profile(table_of(["psw", "csj"] * 60))
    assert made.automaton.outcomes(place(made, "ps")) == {"w": 1.0}
    assert made.automaton.outcomes(place(made, "cs")) == {"j": 1.0}
    assert made.text == "c s j | p s w"


def test_equal_states_are_merged_and_counted_together() -> None:
    made = profile(table_of(["aw"] * 60 + ["aaw"] * 60 + ["aaaw"] * 30 + ["aaaaw"] * 15))
    assert len(made.automaton.states) <= 4
    state = made.automaton.states[place(made, "a").state or 0]
    assert state.known == state.visits
    assert sum(state.counts.values()) == state.visits


@given(st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=20))
def test_visits_are_conserved(words: list[str]) -> None:
    states = profile(table_of(words)).automaton.states
    into = [0] * len(states)
    for state in states:
        for to, times in state.counts.items():
            if to != END:
                into[to] += times
    assert into[1:] == [state.visits for state in states[1:]]
    assert sum(state.counts.get(END, 0) for state in states) == len(words)


def test_a_cut_is_not_an_end() -> None:
    made = profile(table_of([*["ab"] * 40], complete=False))
    assert all(END not in state.counts for state in made.automaton.states)
    assert made.text == ""
    assert any("were cut" in one for one in made.warnings)
    assert not made.confident


def test_rare_calls_are_pruned_as_far_as_the_coverage_allows() -> None:
    words = ["abc"] * 96 + ["axc"] * 4
    assert profile(table_of(words), min_coverage=0.95).text == "a b c"
    assert profile(table_of(words), min_coverage=0.97).text == "a (b | x) c"
    pruned = profile(table_of(words), min_coverage=0.0).automaton
    assert pruned.pruned == pytest.approx(4 / (4 * 100))
    state = pruned.states[1]
    assert sum(state.counts.values()) == 100  # what was pruned is still on record
    assert state.pruned == pytest.approx(0.04)


def test_steps_left_and_distance() -> None:
    made = profile(table_of(["abc"] * 30 + ["abbbc"] * 10))
    start = made.automaton.states[0]
    assert start.left is not None
    assert (start.left.observations, start.left.mean, start.distance) == (40, 3.5, 3)
    assert start.left.quantiles == (3.0, 5.0, 5.0)
    last = made.automaton.states[place(made, "abc").state or 0]
    assert (last.left.mean if last.left else None, last.distance) == (0.0, 0)


def test_the_likeliest_path() -> None:
    made = profile(table_of(["abd"] * 70 + ["acd"] * 30))
    path, likelihood = made.path
    assert (path, likelihood) == (("a", "b", "d"), pytest.approx(0.7))


def test_a_workflow_that_leaves_the_graph_finds_its_agent_again() -> None:
    made = profile(table_of(coding(100)))
    off = place(made, ["planner", "coder"])
    assert not off.on_graph
    assert made.automaton.outcomes(off) == pytest.approx({"tester": 1.0})
    nowhere = place(made, ["planner", "nobody"])
    assert nowhere.state is None
    assert made.automaton.outcomes(nowhere) == {}
    assert place(made, ["planner", "nobody", "tester"]).state is not None


def test_a_block_that_has_begun_goes_on_or_is_joined() -> None:
    wide = [(), (0,), (0,), (0,), (1, 2, 3)]
    made = profile(table_of(["pssrw", "psrrw"] * 40, parents=wide))
    assert made.text == "p [r ‖ s]{3} w"
    one = made.automaton.outcomes(place(made, "ps", wide))
    assert one == pytest.approx({"s": 0.5, "r": 0.5})
    assert made.automaton.outcomes(place(made, "pssr", wide)) == {"w": 1.0}
    assert made.automaton.outcomes(place(made, "pssrw", wide)) == {None: 1.0}


def test_json_values_give_the_same_automaton() -> None:
    made = profile(table_of(coding(50))).automaton
    assert Automaton.from_dict(made.to_dict()) == made
    broken = made.to_dict()
    broken[0]["edges"] = [[999, 1, True]]
    with pytest.raises(ValueError, match="no state"):
        Automaton.from_dict(broken)
