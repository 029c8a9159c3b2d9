"""Waiting requests come out by key, whatever was added, moved and removed before."""

from collections.abc import Iterable
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from presage.serving_hooks.vllm.waiting import Order, WaitingQueue


@dataclass(eq=False)
class Asked:
    request_id: str
    key: float = 0.0


def queue() -> WaitingQueue:
    def key(request: Asked) -> Order:
        return (request.key,)

    return WaitingQueue(key)


def out(of: WaitingQueue) -> Iterable[str]:
    while of:
        yield of.pop_request().request_id


@given(st.lists(st.tuples(st.sampled_from(["add", "prepend", "move", "remove", "several", "pop"]), st.integers(0, 9))))
def test_it_is_a_sorted_list(doing: list[tuple[str, int]]) -> None:
    of, model, known = queue(), dict[str, tuple[float, int]](), {}
    for turn, (what, number) in enumerate(doing):
        name = f"r{number}"
        request = known.setdefault(name, Asked(name))
        if what in ("add", "prepend") and name not in model:
            request.key = float(number * 7 % 4)
            of.add_request(request) if what == "add" else of.prepend_requests([request])
            model[name] = (request.key, turn)
        elif what == "move":
            request.key = float((turn + number) % 5)
            of.moved(name)
            if name in model:
                model[name] = (request.key, turn)
        elif what == "several":
            of.remove_requests({request, Asked("r1")})  # another r1 than the one that waits
            model.pop(name, None)
        elif what == "remove" and name in model:
            of.remove_request(request)
            del model[name]
        elif what == "pop" and model:
            first = min(model, key=lambda name: model[name])
            assert of.peek_request() is of.pop_request() is known[first]
            del model[first]
        assert (len(of), bool(of)) == (len(model), bool(model))
        assert [request.request_id for request in of] == sorted(model, key=lambda name: model[name])
        assert (request in of) == (name in model)
    assert list(out(of)) == sorted(model, key=lambda name: model[name])


def test_an_empty_queue_says_what_vllm_says() -> None:
    of = queue()
    for call in (of.peek_request, of.pop_request):
        with pytest.raises(IndexError, match="empty"):
            call()
    with pytest.raises(ValueError, match="does not wait"):
        of.remove_request(Asked("r"))


def test_keys_that_change_for_ever_do_not_fill_the_memory() -> None:
    of, request = queue(), Asked("r")
    of.add_request(request)
    for _ in range(10_000):
        of.moved("r")
    assert list(out(of)) == ["r"]
    with pytest.raises(IndexError, match="empty"):  # no entry stays behind
        of.peek_request()
