"""Places are shared by service received, and nobody starves."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from crowds import Workflow, decide
from hypothesis import given, settings
from hypothesis import strategies as st

from presage.serving_hooks.policies.admission import Admission, AdmissionConfig, Phase
from presage.serving_hooks.policies.fair_shares import FairShares, Weights
from presage.serving_hooks.workflows.identity import scoped

CACHE = 200_000.0


def with_places(places: int, weights: Weights | None = None, cache_tokens: float = CACHE) -> Admission:
    return Admission(cache_tokens, AdmissionConfig(weights=weights or Weights(), every_s=1e9), limit=float(places))


def crowd_of(group: str, count: int, tokens: float = 10_000.0, name: str = "") -> list[Workflow]:
    """Workflows of a group that wait to begin."""
    return [Workflow(f"{name or group}-{n:03}", Phase.READY, context_tokens=tokens, group=group) for n in range(count)]


def served(admission: Admission, waiting: Sequence[Workflow], turns: int, places: int) -> list[Workflow]:
    """The workflows in the order in which they get their place; in each turn the first of the open ones ends."""
    here, order = list(waiting), list[Workflow]()
    open_: list[Workflow] = []
    for turn in range(turns):
        run = decide(admission, here, None, float(turn)).run if turn else first_decision(admission, here, places)
        entered = [one for one in here if one.id in run and one not in open_]
        open_ += entered
        order += entered
        here.remove(open_.pop(0))
    return order


def first_decision(admission: Admission, here: Sequence[Workflow], places: int) -> frozenset[str]:
    """As many places as given, chosen for ever."""
    admission.choose(None, 0.0, 0.0, 0.0)
    admission.limit = float(places)
    return decide(admission, here, None, 0.0).run


def test_a_tenant_with_one_workflow_does_not_wait_for_another_tenants_hundred() -> None:
    many, one = crowd_of(scoped("key-0", "coding"), 100), crowd_of(scoped("key-1", "coding"), 1)
    order = served(with_places(4), [*many, *one], 1, 4)
    assert one[0] in order


def test_tenants_get_tokens_by_weight() -> None:
    heavy, light = scoped("key-0", "coding"), scoped("key-1", "coding")
    weights = Weights(tenants={"key-0": 3.0})
    order = served(with_places(4, weights), [*crowd_of(light, 100), *crowd_of(heavy, 100)], 60, 4)
    share = sum(one.group == heavy for one in order) / len(order)
    assert share == pytest.approx(0.75, abs=0.04)


def test_tokens_count_and_not_workflows() -> None:
    small, large = scoped("key-0", "chat"), scoped("key-1", "coding")
    order = served(with_places(4), [*crowd_of(large, 60, 40_000), *crowd_of(small, 200, 10_000)], 100, 4)
    share = sum(one.group == large for one in order) / len(order)
    assert share == pytest.approx(0.2, abs=0.05), "a fourth of the workflows of the other tenant"


def test_what_a_workflow_grows_by_is_service_too() -> None:
    """The first tenant's contexts grow tenfold once they are open, so the other gets the following places."""
    growing, small = scoped("key-0", "coding"), scoped("key-1", "chat")
    admission = with_places(2)
    here = [*crowd_of(growing, 10, 5_000), *crowd_of(small, 10, 5_000)]
    first = first_decision(admission, here, 2)
    assert sorted(one[:5] for one in first) == ["key-0", "key-1"]
    grown = [replace(one, own_tokens=50_000.0) if one.id in first and one.group == growing else one for one in here]
    left = [one for one in grown if not (one.id in first and one.group == small)]
    for turn in range(5):
        run = decide(admission, left, None, turn + 1.0).run
        new = [one for one in left if one.id in run and one.group == small]
        assert len(new) == 1
        left.remove(new[0])


def test_in_a_tenant_the_usual_order_stays_until_a_type_lags_by_a_cache() -> None:
    """Of new workflows the smallest goes first: `chat` until it is ahead by the tokens of the cache."""
    chat, coding = crowd_of("chat", 100, 10_000), crowd_of("coding", 10, 40_000)
    order = served(with_places(2, cache_tokens=100_000.0), [*coding, *chat], 40, 2)
    first = next(place for place, one in enumerate(order) if one.group == "coding")
    assert first == 11, "after 110,000 tokens"
    assert sum(one.group == "coding" for one in order) >= 5


def test_with_one_type_the_order_is_that_of_sizes_and_arrival() -> None:
    crowd = [replace(one, context_tokens=30_000.0 if n % 2 else 2_000.0) for n, one in enumerate(crowd_of("t", 20))]
    order = served(with_places(3), crowd, 17, 3)
    assert order == sorted(crowd, key=lambda one: one.context_tokens)[: len(order)]


def test_who_comes_later_has_saved_nothing_up() -> None:
    a, b = scoped("key-0", "t"), scoped("key-1", "t")
    admission = with_places(2)
    order = served(admission, crowd_of(a, 60) + crowd_of(scoped("key-2", "t"), 60), 30, 2)
    here = [one for one in crowd_of(a, 60) if one not in order] + crowd_of(b, 60, name="late")
    then = served(admission, here, 20, 2)[2:]
    assert sum(one.group == b for one in then) == pytest.approx(len(then) / 2, abs=2)


def test_nor_has_a_type_of_a_tenant() -> None:
    shares, heads = FairShares(), {"a": (True, 0), "late": (True, 1)}
    for waiting, group, tokens in (("a",), "a", 100.0), (("a",), "a", 10.0), (("a", "late"), "late", 20.0):
        shares.wait(waiting)
        shares.charge(group, tokens)
    assert shares.next(heads) == "a", "late counts from the 110 tokens of a"
    shares.charge("a", 30.0)
    assert shares.next(heads) == "late"


def test_a_workflow_that_would_miss_its_deadline_goes_first_the_earliest_of_them_before() -> None:
    admission = with_places(1)
    crowd = crowd_of("t", 5)
    late = [replace(crowd[3], deadline_at=50.0, needs_s=30.0), replace(crowd[4], deadline_at=45.0, needs_s=30.0)]
    in_time = replace(crowd[2], deadline_at=900.0, needs_s=30.0)
    missed = replace(crowd[1], deadline_at=-1.0, needs_s=30.0)
    order = served(admission, [crowd[0], missed, in_time, *late], 5, 1)
    assert [one.id for one in order] == [late[1].id, late[0].id, crowd[0].id, missed.id, in_time.id]


def test_all_that_are_pressed_go_before_a_type_that_has_received_less() -> None:
    pressed = [replace(one, deadline_at=50.0, needs_s=30.0) for one in crowd_of("large", 2, 40_000.0)]
    admission, others = with_places(2, cache_tokens=10_000.0), crowd_of("small", 5, 1_000.0)
    assert first_decision(admission, [*others, *pressed], 2) == {one.id for one in pressed}


def test_who_is_pressed_by_a_deadline_is_counted_while_it_waits() -> None:
    admission, crowd = with_places(1), crowd_of("t", 3)
    pressed = [replace(one, deadline_at=10.0, needs_s=9.0) for one in crowd]
    first_decision(admission, pressed, 1)
    assert decide(admission, pressed, None, 1.0).pressed == 2
    assert decide(admission, pressed, None, 11.0).pressed == 0, "it is too late for them"


@dataclass
class Client:
    """A tenant whose workflows always wait: their tokens when they are let in, and what they grow by in a turn."""

    weight: float
    begins: int
    grows: int
    lasts: int


clients = st.lists(
    st.builds(Client, st.sampled_from([0.5, 1.0, 2.0, 4.0]), st.integers(1, 50), st.integers(0, 20), st.integers(1, 9)),
    min_size=2,
    max_size=4,
)


@given(clients, st.integers(1, 5), st.booleans())
@settings(max_examples=60, deadline=None)
def test_law_no_tenant_is_ahead_of_one_that_waits_by_more_than_its_open_contexts(
    of: list[Client], places: int, by_type: bool
) -> None:
    """The bound of policies/fair_shares.py, for tenants, and for types, which may lag by a cache more."""
    names = [f"type-{n}" if by_type else scoped(f"key-{n}", "t") for n in range(len(of))]
    shares = {f"type-{n}" if by_type else f"key-{n}": client.weight for n, client in enumerate(of)}
    weights = Weights(workflow_types=shares) if by_type else Weights(tenants=shares)
    cache = 100.0
    admission = with_places(places, weights, cache)
    received, most_open = [0.0] * len(of), [0.0] * len(of)
    open_: dict[str, tuple[int, int, float]] = {}
    fresh, waiting = [0] * len(of), [list[str]() for _ in of]
    turns, entered = 40, [0] * len(of)
    for turn in range(turns):
        for n in range(len(of)):
            while len(waiting[n]) < places + 1:
                waiting[n].append(f"{n}-{fresh[n]:05}")
                fresh[n] += 1
        here = [
            Workflow(name, Phase.STEP, 0.0, True, held, held, group=names[n]) for name, (n, _, held) in open_.items()
        ]
        here += [
            Workflow(name, Phase.READY, 0.0, False, float(of[n].begins), group=names[n])
            for n, line in enumerate(waiting)
            for name in line
        ]
        run = decide(admission, here, None, float(turn)).run if turn else first_decision(admission, here, places)
        for n, line in enumerate(waiting):
            for name in [one for one in line if one in run]:
                line.remove(name)
                open_[name] = n, turn, float(of[n].begins)
                received[n] += of[n].begins
                entered[n] += 1
            most_open[n] = max(
                most_open[n], sum(of[n].begins + of[n].grows * of[n].lasts for m, _, _ in open_.values() if m == n)
            )
        counters = [got / client.weight for got, client in zip(received, of, strict=True)]
        for n, client in enumerate(of):
            for m in range(len(of)):
                assert counters[n] - counters[m] <= most_open[n] / client.weight + by_type * cache + 1e-6
        for name, (n, since, held) in list(open_.items()):
            if turn - since + 1 >= of[n].lasts:
                del open_[name]
            else:
                open_[name] = n, since, held + of[n].grows
                received[n] += of[n].grows
    assert sum(entered) >= turns // max(client.lasts for client in of), "places are used"


def test_a_client_that_makes_up_types_costs_no_more_than_the_most_that_are_compared() -> None:
    shares = FairShares(lag_tokens=10.0)
    names = [f"type-{n}" for n in range(5000)]
    shares.wait(names)
    assert shares.next({name: (True, place) for place, name in enumerate(names)}) == "type-0"
    shares.charge("type-0", 100.0)
    assert shares.next({name: (True, place) for place, name in enumerate(names)}) == "type-1"
    shares.wait([])
    assert not shares.counting
