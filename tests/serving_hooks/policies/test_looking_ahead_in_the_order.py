"""The next evictions can be read without evicting, and a workflow's blocks explained."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from presage.serving_hooks.policies.eviction import MOST_EXPLAINED, MOST_LOOKED_AT, FreeOrder, LazyHeap
from presage.serving_hooks.policies.next_use import ReturnCurve
from presage.serving_hooks.policies.score import UNKNOWN

WHAT = st.sampled_from(["fill", "end", "free", "take", "pop", "forecast", "wait"])
EVENTS = st.lists(st.tuples(WHAT, st.integers(0, 19), st.sampled_from("abc")), max_size=60)


@given(EVENTS, st.integers(0, 25))
def test_the_first_are_those_that_are_popped_and_asking_changes_nothing(
    events: list[tuple[str, int, str]], n: int
) -> None:
    now = 0.0
    order, free = FreeOrder(20, lambda: now), set(range(20))
    order.append(range(20))
    for what, block, workflow in events:
        if what == "fill" and block not in free:
            order.filled(workflow, "agent", [block])
        elif what == "forecast":
            order.forecast("t", workflow, UNKNOWN, ReturnCurve((0.1, 0.5), (block, 3.0 * block), block / 40), now)
        elif what == "wait":
            now += block
        elif what == "end":
            order.end(workflow)
        elif what == "free" and block not in free:
            order.append([block])
            free.add(block)
        elif what == "take" and block in free:
            order.remove([block])
            free.discard(block)
        elif what == "pop" and free:
            free -= set(order.pop(1))
    order.turn()
    whole = list(order)
    assert order.first(n) == whole[:n]
    assert list(order) == whole
    assert order.pop(min(n, len(whole))) == whole[:n]


def test_few_groups_are_explained_and_few_of_others_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = 4 * MOST_LOOKED_AT
    order = FreeOrder(groups, lambda: 0.0)
    for block in range(groups):
        order.filled(f"w{block // 100}", f"agent {block}", [block])
    order.append(range(groups))
    calls = Counter[str]()

    def counting(name: str) -> None:
        whole = getattr(LazyHeap, name)

        def counted(*given: Any) -> Any:
            calls[name] += 1
            return whole(*given)

        monkeypatch.setattr(LazyHeap, name, counted)

    for name in ("pop", "__iter__"):
        counting(name)
    first, last = order.explain("w0"), order.explain(f"w{(groups - 1) // 100}")
    assert (len(first), [group["before"] for group in first[:3]]) == (MOST_EXPLAINED, [0, 1, 2])
    assert {group["before"] for group in last} == {None}
    assert order.blocks_of("w0") == (100, 100)
    assert calls == {"pop": 2 * MOST_LOOKED_AT}


def test_a_workflows_groups_are_told_by_how_soon_they_go() -> None:
    order = FreeOrder(10, lambda: 0.0)
    order.filled("a", "coder", [0, 1, 2])
    order.filled("b", "coder", [3])
    order.append([0, 1, *range(3, 10)])
    (group,) = order.explain("a")
    assert (group["blocks"], group["free"], group["agents"], group["users"]) == (3, 2, ["coder"], 1)
    assert group["before"] == list(order).index(0)
    order.end("a")
    assert order.explain("a") == order.explain("nobody") == []
