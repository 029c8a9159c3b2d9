"""Work that was handed over to another trace by a link, tried again in another, or copied into a fork."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from opentelemetry.trace import Link, Span, Status, StatusCode
from span_samples import BEGIN, SECOND, Recorder, agent, chat, envelope, steps, tool, write_lines

from presage.datasets.adapters.spans.conventions import CONTINUED, COPIED, LINKS_DOUBTED
from presage.datasets.read import Traces, read_traces


def job(recorder: Recorder, name: str, at: float, *links: Span, calls: int = 2, **more: Any) -> Span:
    """A trace of an agent with `calls` requests, a second apart, that links to others."""
    root = recorder.tracer.start_span(
        f"invoke_agent {name}",
        attributes=agent(name, **more),
        start_time=BEGIN + int(at * SECOND),
        links=[Link(one.get_span_context()) for one in links],
    )
    for number in range(calls):
        recorder.add("chat m", at + number + 0.1, at + number + 0.9, root, chat())
    root.end(BEGIN + int((at + calls) * SECOND))
    return root


def read(recorder: Recorder, folder: Path) -> Traces:
    return read_traces([write_lines(folder / "spans.json", envelope(recorder.spans))])


def told(found: Traces) -> list[tuple[Any, ...]]:
    """(workflow, agents, parents, complete) of each workflow."""
    rows: dict[str, list[Any]] = {}
    for name, *one in steps(found.table, "workflow_id", "agent", "parent_steps", "complete"):
        rows.setdefault(name[-2:], []).append(one)
    return [(name, *zip(*of, strict=True)) for name, of in rows.items()]


def test_a_link_continues_the_workflow(tmp_path: Path) -> None:
    recorder = Recorder()
    first = job(recorder, "planner", 0)
    second = job(recorder, "worker", 1.5, first)  # after the first of its requests: the other still runs
    job(recorder, "writer", 9, second)
    job(recorder, "checker", 9.5, second, calls=1)
    found = read(recorder, tmp_path)
    agents = ("planner", "planner", "worker", "worker", "writer", "checker", "writer")
    assert told(found) == [("01", agents, ([], [0], [0], [2], [3], [3], [4]), (True,) * 7)]
    assert set(found.table["workflow_type"].to_pylist()) == {"planner"}
    assert found.notices == {CONTINUED: 3}


def test_what_begins_while_its_predecessor_works_waits_for_what_began_last(tmp_path: Path) -> None:
    recorder = Recorder()
    job(recorder, "worker", 0.5, job(recorder, "planner", 0))
    assert told(read(recorder, tmp_path)) == [
        ("01", ("planner", "worker", "planner", "worker"), ([], [0], [0], [1]), (True,) * 4)
    ]


def test_a_batch_is_no_continuation(tmp_path: Path) -> None:
    recorder = Recorder()
    several = [job(recorder, "planner", float(at), calls=1) for at in range(2)]
    job(recorder, "batch", 5, *several, calls=1)
    job(recorder, "other", 6, calls=1)
    found = read(recorder, tmp_path)
    assert [(name, complete) for name, _, _, complete in told(found)] == [
        ("03", (False,)), ("04", (True,)), ("01", (False,)), ("02", (False,)),
    ]  # fmt: skip
    assert found.notices == {LINKS_DOUBTED: 1}


@pytest.mark.parametrize(("mine", "other"), [("a", "b"), ("", "b"), ("a", ""), ("a", "a")])
def test_sessions_and_links(mine: str, other: str, tmp_path: Path) -> None:
    recorder = Recorder()
    first = job(recorder, "planner", 0, calls=1, **{"session.id": mine})
    job(recorder, "planner", 0.5, first, calls=1, **{"session.id": other})
    found = read(recorder, tmp_path)
    one = other in ("", mine)
    assert len(told(found)) == 2 - one
    assert set(found.table["complete"].to_pylist()) == {one}
    assert found.notices == {CONTINUED if one else LINKS_DOUBTED: 1}


def test_a_link_to_what_is_not_here_or_has_no_step(tmp_path: Path) -> None:
    recorder = Recorder()
    job(recorder, "worker", 1, job(recorder, "scheduler", 0, calls=0), calls=1)
    job(recorder, "worker", 2, recorder.tracer.start_span("never exported"), calls=1)
    found = read(recorder, tmp_path)
    assert set(found.table["complete"].to_pylist()) == {True}


def test_a_circle_of_links(tmp_path: Path) -> None:
    recorder = Recorder()
    one = recorder.tracer.start_span("invoke_agent a", attributes=agent("a"), start_time=BEGIN)
    two = job(recorder, "b", 1, one, calls=1)
    one.add_link(two.get_span_context())
    recorder.add("chat m", 0.1, 0.5, one, chat())
    one.end(BEGIN + 5 * SECOND)
    assert len(told(read(recorder, tmp_path))) == 1


def test_a_failed_attempt_in_a_trace_of_its_own(tmp_path: Path) -> None:
    recorder = Recorder()
    for at, status in ((0, StatusCode.ERROR), (10, StatusCode.ERROR), (20, StatusCode.OK)):
        attributes = agent("a", **{"session.id": "s"})
        with (
            recorder.span("invoke_agent a", at, at + 3, attributes=attributes) as root,
            recorder.span("chat m", at + 1, at + 2, root, chat()) as request,
        ):
            root.set_status(Status(status))
            request.set_status(Status(status))
    found = read(recorder, tmp_path)
    assert steps(found.table, "workflow_id", "parent_steps", "complete", "success") == [("s", [], True, None)]
    assert found.notices["failed attempt, which is no step"] == 2


def turn(recorder: Recorder, session: str, at: float) -> None:
    with recorder.span("invoke_agent coder", at, at + 5, attributes=agent("coder", **{"session.id": session})) as root:
        recorder.add("chat m", at + 1, at + 2, root, chat(**{"gen_ai.response.id": f"r-{at}"}))
        recorder.add("execute_tool t", at + 2, at + 3, root, tool("t", **{"gen_ai.tool.call.id": f"t-{at}"}))


@pytest.mark.parametrize("fork", ["fork", "a-fork", "original"])
def test_steps_copied_into_a_fork_are_counted_once(fork: str, tmp_path: Path) -> None:
    """With the session of the original, as of a graph that is resumed from a checkpoint, the fork continues it."""
    recorder = Recorder()
    for session, times in ((fork, (0, 10, 200)), ("original", (0, 10, 100))):
        for at in times:
            turn(recorder, session, at)
    found = read(recorder, tmp_path)
    parents: list[list[int]] = [[], [0], [1], [2], [3], [4]]
    forked = [(fork, [], True), (fork, [0], True)]
    right = [("original", of, True) for of in parents]
    right = [*right, ("original", [5], True), ("original", [6], True)] if fork == "original" else [*forked, *right]
    assert steps(found.table, "workflow_id", "parent_steps", "complete") == right
    assert found.notices == {COPIED: 4}


def test_copies_beside_own_steps_in_one_trace(tmp_path: Path) -> None:
    recorder = Recorder()
    for session, more in (("original", ()), ("fork", (20, 30))):
        begin = more[0] if more else 0
        with recorder.span("invoke_agent a", begin, 50, attributes=agent("a", **{"session.id": session})) as root:
            for at in (1, 3, *more):
                recorder.add("chat m", at, at + 1, root, chat(**{"gen_ai.response.id": f"r-{at}"}))
    found = read(recorder, tmp_path)
    assert [(name, parents) for name, parents in steps(found.table, "workflow_id", "parent_steps")] == [
        ("fork", []), ("fork", [0]), ("original", []), ("original", [0]),
    ]  # fmt: skip
