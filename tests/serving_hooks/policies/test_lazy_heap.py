"""The lowest entry that stands comes first, whatever was replaced; and what does not stand does not pile up."""

import random

from hypothesis import given
from hypothesis import strategies as st

from presage.serving_hooks.policies.eviction import LazyHeap


class Numbers:
    """Names with a number each, of which only the last one given stands."""

    def __init__(self) -> None:
        self.now: dict[int, bytes] = {}
        self.gone: list[bytes] = []
        self.heap = LazyHeap(lambda entry: self.now.get(entry[-1]) is entry, self.gone.append)

    def put(self, name: int, number: int) -> None:
        entry = self.now[name] = bytes((number, name))
        self.heap.push(entry)
        self.heap.sweep(1, len(self.now))

    def take(self) -> bytes | None:
        entry = self.heap.first()
        if entry is not None:
            assert self.heap.pop() is entry
            del self.now[entry[-1]]
        return entry


@given(st.lists(st.one_of(st.none(), st.tuples(st.integers(0, 30), st.integers(0, 255))), max_size=400))
def test_it_answers_as_a_sorted_list_of_what_stands(events: list[tuple[int, int] | None]) -> None:
    numbers = Numbers()
    for event in events:
        if event is None:
            wanted = min(numbers.now.values(), default=None)
            assert numbers.take() == wanted
        else:
            numbers.put(*event)
        assert sorted(numbers.heap) == sorted(numbers.now.values())
        assert len(numbers.heap) <= 1.5 * (64 + 2 * 31)
    assert all(numbers.now.get(entry[-1]) is not entry for entry in numbers.gone)


def test_what_does_not_stand_is_dropped_a_few_at_a_time() -> None:
    numbers, draw = Numbers(), random.Random(0)
    for name in range(100):
        numbers.put(name, draw.randrange(256))
    dropped, most = 0, 0
    for _ in range(20_000):
        before = len(numbers.gone)
        numbers.put(draw.randrange(100), draw.randrange(256))
        most = max(most, len(numbers.gone) - before)
        dropped += len(numbers.gone) - before
        assert len(numbers.heap) <= 1.5 * (64 + 2 * 100)
    assert dropped > 19_000
    assert most <= 8, "no call does much of it"
