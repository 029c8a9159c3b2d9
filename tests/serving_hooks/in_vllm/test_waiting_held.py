"""Held requests wait as all others do, and only the choice of the next passes them by; vLLM's own order is kept."""

from collections import deque
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from presage.serving_hooks.vllm.waiting import WaitingQueue


@dataclass(eq=False)
class Asked:
    request_id: str


DOING = st.lists(
    st.tuples(st.sampled_from(["add", "prepend", "several", "hold", "release", "pop", "remove"]), st.integers(0, 9))
)


@given(DOING)
def test_first_come_is_vllms_queue_without_those_that_are_held(doing: list[tuple[str, int]]) -> None:
    """The model is a deque, which is what vLLM's is."""
    held: set[str] = set()
    of = WaitingQueue(lambda _: (), lambda request: request.request_id in held, in_front=True)
    model, known = deque[Asked](), [Asked(f"r{number}") for number in range(10)]
    for what, number in doing:
        request = known[number]
        here = request in model
        if what == "add" and not here:
            of.add_request(request)
            model.append(request)
        elif what == "prepend" and not here:
            of.prepend_request(request)
            model.appendleft(request)
        elif what == "several":
            absent = [other for other in known[number:] if other not in model]
            of.prepend_requests(absent)
            model.extendleft(absent)
        elif what in ("hold", "release"):
            (held.add if what == "hold" else held.discard)(request.request_id)
            of.refile(request.request_id)
        elif what == "remove" and here:
            of.remove_request(request)
            model.remove(request)
        elif what == "pop":
            free = [other for other in model if other.request_id not in held]
            if free:
                assert of.peek_request() is of.pop_request() is free[0]
                model.remove(free[0])
            else:
                with pytest.raises(IndexError):
                    of.pop_request()
        assert len(of) == len(model)
        assert list(of) == list(model)
        assert bool(of) == any(other.request_id not in held for other in model)
        assert all((other in of) == (other in model) for other in known)


def test_a_key_that_changes_leaves_a_held_request_held() -> None:
    key = {"a": 2.0, "b": 1.0}
    of = WaitingQueue(lambda request: (key[request.request_id],), lambda request: request.request_id == "b")
    for name in "ab":
        of.add_request(Asked(name))
    key["b"] = 0.0
    of.moved("b")
    assert (of.pop_request().request_id, bool(of), len(of)) == ("a", False, 1)
    assert [request.request_id for request in of] == ["b"]


def test_holding_and_releasing_for_ever_does_not_fill_the_memory() -> None:
    held: set[str] = set()
    of = WaitingQueue(lambda _: (), lambda request: request.request_id in held)
    of.add_request(Asked("r"))
    for _ in range(10_000):
        held ^= {"r"}
        of.refile("r")
    assert of.pop_request().request_id == "r"
    with pytest.raises(IndexError, match="empty"):  # no entry stays behind
        of.peek_request()
