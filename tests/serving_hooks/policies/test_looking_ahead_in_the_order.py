"""The next evictions can be read without evicting, and a workflow's blocks explained."""

from hypothesis import given
from hypothesis import strategies as st

from presage.serving_hooks.policies.eviction import FreeOrder
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
