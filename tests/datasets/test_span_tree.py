"""Laws of the tree: whatever the spans, steps come out once, in start order, and wait for earlier steps only."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from presage.datasets.adapters.spans.conventions import Naming, Role
from presage.datasets.adapters.spans.tree import MOST_PARENTS, NEVER_ENDED, TraceSpans, steps_of
from presage.datasets.schema.source import RowError


def spans(*rows: dict[str, Any]) -> TraceSpans:
    """Rows with the defaults of an LLM span at the top."""
    default = {
        "parent": -1, "remote": False, "role": Role.LLM, "naming": Naming.NOT, "service": 0, "node": -1,
        "node_parent": -1, "call": -1, "flags": 0, "start": 0, "end": NEVER_ENDED,
    }  # fmt: skip
    full = [{"span": number} | default | row for number, row in enumerate(rows)]
    columns = {name: [row[name] for row in full] for name in ("span", *default)}
    return TraceSpans(**columns, contents=lambda rows: [tuple(full[row].values()) for row in rows])


@st.composite
def forests(draw: st.DrawFn) -> TraceSpans:
    """Any trace without a cycle: several roots, lost parents, skewed clocks, unended spans, a graph of agents."""
    rows = []
    for number in range(draw(st.integers(1, 25))):
        start = draw(st.integers(0, 40))
        rows.append(
            {
                "parent": draw(st.integers(-1, number - 1) | st.just(99)),
                "remote": draw(st.booleans()),
                "role": draw(st.sampled_from(list(Role))),
                "naming": draw(st.sampled_from(list(Naming))),
                "service": draw(st.integers(-1, 1)),
                "node": draw(st.integers(-1, 3)),
                "node_parent": draw(st.integers(-1, 3)),
                "start": start,
                "end": draw(st.integers(start, 60) | st.just(NEVER_ENDED)),
            }
        )
    order = draw(st.permutations(range(len(rows))))
    return spans(*({"span": number} | rows[number] for number in order))


def above(tree: TraceSpans, root: int | None) -> list[int | None]:
    """The row over each; a span whose parent was lost hangs from a root that has none."""
    rows = {span: row for row, span in enumerate(tree.span)}
    under = root if root is not None and tree.parent[root] < 0 else None
    return [rows.get(parent, under) if parent >= 0 else None for parent in tree.parent]


def inside(parents: list[int | None], row: int, through: tuple[Role, ...], role: list[int]) -> set[int]:
    """The rows under a row with nothing but spans of these roles in between."""
    found: set[int] = set()
    for other in range(len(parents)):
        at = parents[other]
        while at is not None and at != row and role[at] in through:
            at = parents[at]
        if at == row:
            found.add(other)
    return found


@settings(max_examples=200)
@given(tree=forests())
def test_laws(tree: TraceSpans) -> None:
    found = steps_of(tree)
    assert len(set(found.row)) == len(found.row)
    assert found.started == sorted(found.started)
    assert all(start <= end for start, end in zip(found.started, found.ended, strict=True))
    parents_of, roles = above(tree, found.root), list(tree.role)
    for row, role in enumerate(roles):
        maybe = {other for other in found.row if roles[other] == Role.MAYBE}
        requests = {other for other in range(len(roles)) if roles[other] == Role.LLM} | maybe
        if role == Role.LLM:
            wrapped = inside(parents_of, row, (Role.OTHER, Role.CHAIN, Role.LLM, Role.MAYBE), roles) & requests
            assert (row in found.row) == (not wrapped)
        elif role in (Role.TOOL, Role.AGENT, Role.MAYBE):
            assert (row in found.row) == (not inside(parents_of, row, tuple(Role), roles) & set(found.row))
        else:
            assert row not in found.row
    for step, parents in enumerate(found.parents):
        assert list(parents) == sorted(set(parents))
        assert all(parent < step for parent in parents)
        for parent in parents:
            ended = found.ended[parent] <= found.started[step]
            assert ended or found.row[step] in inside(parents_of, found.row[parent], tuple(Role), roles)


@settings(max_examples=50)
@given(tree=forests(), data=st.data())
def test_the_order_of_spans_in_a_file_does_not_matter(tree: TraceSpans, data: st.DataObject) -> None:
    names = [name for name in TraceSpans.__dataclass_fields__ if name != "contents"]
    order = data.draw(st.permutations(range(len(tree.span))))
    other = TraceSpans(**{name: [getattr(tree, name)[row] for row in order] for name in names}, contents=tree.contents)
    starts = sorted(tree.start)
    if len(set(starts)) < len(starts):
        return  # ties fall in the order of span ids, which the reader sorts by
    one, two = steps_of(tree), steps_of(other)
    assert [tree.span[row] for row in one.row] == [other.span[row] for row in two.row]
    assert (one.parents, one.started) == (two.parents, two.started)
    assert (one.whole, one.stopped) == (two.whole, two.stopped)


def test_children_that_overlap_are_a_fan_out_and_what_follows_joins_them() -> None:
    root = {"role": Role.WORKFLOW, "end": 100}
    times = [(0, 10), (11, 30), (12, 20), (21, 25), (31, 40)]
    tree = spans(root, *({"parent": 0, "start": start, "end": end} for start, end in times))
    assert steps_of(tree).parents == [(), (0,), (0,), (2,), (1, 3)]


def test_a_child_before_its_parent_is_moved_with_what_is_under_it_and_beside_it() -> None:
    tree = spans(
        {"role": Role.AGENT, "start": 10, "end": 50},
        {"role": Role.CHAIN, "parent": 0, "start": 4, "end": 20},
        {"parent": 1, "start": 5, "end": 8},
        {"parent": 0, "start": 30, "end": 40},
    )
    found = steps_of(tree)
    assert (found.started, found.ended, found.parents) == ([11, 36], [14, 46], [(), (0,)])


def test_children_with_a_clock_that_lags_stay_one_after_the_other() -> None:
    root = {"role": Role.AGENT, "start": 10, "end": 20}
    for service in (0, 1):
        children = ({"parent": 0, "service": service, "start": start, "end": start + 1} for start in (1, 3, 5))
        assert steps_of(spans(root, *children)).parents == [(), (0,), (1,)]


def test_a_service_with_another_clock_is_put_into_the_middle_of_its_caller() -> None:
    tree = spans(
        {"role": Role.WORKFLOW, "start": 0, "end": 100},
        {"role": Role.AGENT, "parent": 0, "start": 10, "end": 30},
        {"role": Role.CHAIN, "parent": 1, "service": 1, "start": 5000, "end": 5010},
        {"parent": 2, "service": 1, "start": 5002, "end": 5004},
        {"parent": 0, "start": 40, "end": 50},
    )
    found = steps_of(tree)
    assert (found.row, found.started, found.parents) == ([3, 4], [17, 40], [(), (0,)])


def test_spans_that_are_each_others_parents() -> None:
    with pytest.raises(RowError, match="its own ancestor") as error:
        steps_of(spans({}, {"parent": 2}, {"parent": 1}, {"parent": 1}))
    assert error.value.row in (1, 2)
    with pytest.raises(RowError, match="its own ancestor"):
        steps_of(spans({"parent": 0}))


def test_one_span_reported_twice() -> None:
    again = {"span": 7, "start": 1, "end": 2}
    assert len(steps_of(spans(again, again)).row) == 1
    assert steps_of(spans(again, again | {"end": 3})).ended == [3]


def test_a_chain_of_spans_deeper_than_the_stack() -> None:
    deep = 20_000
    tree = spans(
        *({"role": Role.CHAIN, "parent": number - 1, "end": 10} for number in range(deep)), {"parent": deep - 1}
    )
    assert steps_of(tree).row == [deep]


@pytest.mark.slow
def test_a_wide_join_after_a_wide_fan_out_stays_small() -> None:
    """Half of the spans before the other half: n²/4 pairs, of which the bound keeps a row's share."""
    half = 20_000
    root = {"role": Role.WORKFLOW, "end": 100}
    first = ({"parent": 0, "start": 1, "end": 10} for _ in range(half))
    second = ({"parent": 0, "start": 20, "end": 30} for _ in range(half))
    found = steps_of(spans(root, *first, *second))
    assert {len(parents) for parents in found.parents} == {0, MOST_PARENTS}
    assert len(found.row) == 2 * half
