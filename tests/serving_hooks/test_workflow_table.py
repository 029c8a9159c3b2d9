"""A workflow begins with its first request and ends once: finished, expired or aborted."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from serving_samples import Clock

from presage.serving_hooks.workflows import PAUSED_S, EndReason, RunningStep, Workflow, WorkflowTable
from presage.serving_hooks.workflows.identity import Step, scoped, workflow_key


class Watched:
    """A table, and the ends it has announced."""

    def __init__(self, time_to_live_s: float = 10, most: int = 100) -> None:
        self.clock, self.ends = Clock(), list[tuple[str, EndReason]]()
        self.table = WorkflowTable(time_to_live_s, self.clock, most=most)
        self.table.subscribe(self.ended)

    def ended(self, workflow: Workflow, reason: EndReason) -> None:
        self.ends.append((workflow.step.workflow_id, reason))

    def arrived(self, request_id: str, workflow: str, at: float = 0.0) -> bool:
        self.clock.now = at
        return self.table.arrived(request_id, Step("t", workflow, "planner")) is not None

    def finished(self, request_id: str, at: float = 0.0) -> RunningStep | None:
        self.clock.now = at
        return self.table.finished(request_id)

    def expired(self, at: float) -> list[str]:
        self.clock.now, before = at, len(self.ends)
        self.table.expire()
        assert all(reason is EndReason.EXPIRED for _, reason in self.ends[before:])
        return [name for name, _ in self.ends[before:]]


def test_workflows_without_requests_expire_in_order_and_once() -> None:
    of = Watched()
    for workflow in ("c", "b", "a"):
        of.arrived(workflow, workflow)
    for at, workflow in enumerate(("a", "b", "c")):  # the last request to leave counts, and not the first to come
        of.finished(workflow, at)
    assert of.expired(10.5) == ["a"]
    assert of.expired(12.0) == ["b", "c"]
    assert (of.expired(99), of.table.ends[EndReason.EXPIRED], len(of.table)) == ([], 3, 0)


def test_a_request_in_the_engine_keeps_its_workflow_however_long_it_takes() -> None:
    of = Watched()
    of.arrived("1", "long", 0)
    of.arrived("2", "long", 1)
    of.finished("1", 2)
    assert of.expired(50) == []
    of.finished("2", 55)
    assert (of.expired(64), of.expired(65)) == ([], ["long"])


def test_an_end_is_announced_once_and_the_name_may_come_back_as_a_new_workflow() -> None:
    of, key = Watched(), workflow_key("t", "a")
    of.arrived("1", "a", 0)
    assert (of.table.end(key, EndReason.FINISHED), of.table.end(key, EndReason.FINISHED)) == (True, False)
    assert (key in of.table, of.ends) == (False, [("a", EndReason.FINISHED)])
    assert of.finished("1", 1) is None
    assert len(of.table) == 0
    of.arrived("2", "a", 2)
    assert key in of.table


def test_a_paused_workflow_outlives_its_time_to_live_until_its_next_request() -> None:
    of = Watched()
    for name in ("a", "b"):
        of.arrived(name, name, 0)
        of.finished(name, 0)
    assert (of.table.pause(workflow_key("t", "a")), of.table.pause(workflow_key("t", "never came"))) == (True, False)
    assert of.expired(PAUSED_S - 1) == ["b"]
    of.arrived("a again", "a", PAUSED_S - 1)
    of.finished("a again", PAUSED_S)
    assert (of.expired(PAUSED_S + 9), of.expired(PAUSED_S + 10)) == ([], ["a"])
    of.arrived("c", "c", PAUSED_S)
    of.finished("c", PAUSED_S)
    of.table.pause(workflow_key("t", "c"))
    assert (of.expired(2 * PAUSED_S - 1), of.expired(2 * PAUSED_S + 10)) == ([], ["c"]), "nobody answered"


def test_requests_of_an_ended_workflow_are_no_steps_of_the_one_that_comes_back() -> None:
    of = Watched()
    of.arrived("1", "a", 0)
    of.arrived("2", "a", 0)
    of.table.end(workflow_key("t", "a"), EndReason.ABORTED)
    assert of.table.step("1") is of.table.step("2") is None
    of.arrived("3", "a", 1)
    of.finished("3", 2)
    of.finished("1", 9)
    assert (of.expired(11), of.expired(12)) == ([], ["a"])


def test_a_subscriber_sees_the_requests_that_are_still_there() -> None:
    of, seen = Watched(), list[list[str]]()
    of.table.subscribe(lambda workflow, reason: seen.append(list(workflow.requests)))
    of.arrived("1", "a")
    of.arrived("2", "a")
    of.finished("1")
    of.table.end(workflow_key("t", "a"), EndReason.FINISHED)
    assert seen == [["2"]]


def test_a_full_table_takes_no_new_workflow_and_goes_on_with_those_it_has() -> None:
    of = Watched(most=2)
    assert [of.arrived(name, name) for name in "abc"] == [True, True, False]
    assert of.arrived("a again", "a")
    assert of.table.step("c") is None


events = st.one_of(
    st.tuples(st.just("arrived"), st.sampled_from("abc"), st.sampled_from(["", "key-1"])),
    st.tuples(st.just("finished"), st.integers(0, 30)),
    st.tuples(st.just("end"), st.sampled_from("abc"), st.sampled_from(EndReason)),
    st.tuples(st.just("pause"), st.sampled_from("abc")),
    st.tuples(st.just("wait"), st.floats(0, 8)),
)


@given(st.lists(events, max_size=40))
def test_whatever_happens_an_end_follows_each_beginning_and_nothing_is_left(happens: list[tuple[Any, ...]]) -> None:
    of, begun, requests = Watched(), 0, list[str]()
    for name, *more in happens:
        if name == "arrived":
            step = Step("t", scoped(more[1], more[0]), "planner")
            begun += step.workflow not in of.table
            requests.append(f"r{len(requests)}")
            of.table.arrived(requests[-1], step)
        elif name == "finished" and requests:
            of.table.finished(requests[more[0] % len(requests)])
        elif name == "end":
            of.table.end(workflow_key("t", more[0]), more[1])
        elif name == "pause":
            of.table.pause(workflow_key("t", more[0]))
        elif name == "wait":
            of.clock.now += more[0]
            of.table.expire()
        assert begun == len(of.ends) + len(of.table)
    for request in requests:
        of.table.finished(request)
    of.expired(of.clock.now + PAUSED_S + 11)
    assert begun == len(of.ends) == sum(of.table.ends.values())
    assert not any(of.table.debug_state().values())
