"""Workflows of one application have one type, whichever of its agents seems to begin them."""

from hypothesis import given
from hypothesis import strategies as st

from presage.applications import MOST_AGENTS, Applications


def run(applications: Applications, *agents: str) -> str:
    """A workflow of these agents; returns its type."""
    workflow_type = applications.type_of(agents[0])
    for place, agent in enumerate(agents):
        applications.step(agent, workflow_type, begins=place == 0)
    return workflow_type


def test_agents_that_seem_to_begin_workflows_get_the_type_of_the_application_that_calls_them() -> None:
    applications = Applications()
    for _ in range(3):
        run(applications, "planner", "researcher", "writer")
        run(applications, "writer", "critic")  # resumed after a pause that nobody remembers
    assert {applications.type_of(agent) for agent in ("planner", "researcher", "writer", "critic")} == {"planner"}


def test_parallel_agents_of_which_any_may_come_first_are_one_application() -> None:
    applications, topics = Applications(), ["logs", "metrics", "tickets", "network"]
    for first in range(12):
        run(applications, *(topics[(first + place) % 4] for place in range(4)))
    assert len({applications.type_of(agent) for agent in topics}) == 1


def test_a_chat_and_an_agent_of_two_applications_keep_their_types() -> None:
    applications = Applications()
    for _ in range(5):
        run(applications, "planner", "assistant", "searcher")
        run(applications, "buyer", "searcher")
    for _ in range(20):
        run(applications, "assistant")  # chats under the same system prompt
    assert [applications.type_of(agent) for agent in ("assistant", "searcher", "planner", "buyer")] == [
        *("assistant", "searcher", "planner", "buyer")
    ]


@given(st.lists(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=5), max_size=40))
def test_the_type_of_a_type_is_itself(runs: list[list[str]]) -> None:
    applications = Applications()
    for agents in runs:
        run(applications, *dict.fromkeys(agents))
    for agent in "abcdef":
        assert applications.type_of(applications.type_of(agent)) == applications.type_of(agent)


def test_memory_is_bounded() -> None:
    applications = Applications()
    for number in range(2 * MOST_AGENTS):
        run(applications, f"agent-{number}", "tool")
    assert len(applications) <= 2 * MOST_AGENTS, "callers of the tool are forgotten with their types"
