"""The expected wait for a use is Belady's where the return is certain, and honest where it is not."""

import heapq
import math
import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from presage.serving_hooks.policies.eviction import FreeOrder
from presage.serving_hooks.policies.next_use import LEAST_S, LONGEST_S, ReturnCurve, StepPace, paced
from presage.serving_hooks.policies.score import UNKNOWN, ScoreConfig, lookahead

LEVELS = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)
AGENTS = ("main", "helper")
BLOCKS, HISTORY, WORKFLOWS = 300, 40, 12


def certain(seconds: float) -> ReturnCurve:
    return ReturnCurve(LEVELS, (seconds,) * len(LEVELS))


def test_a_certain_return_is_waited_for_until_it_comes() -> None:
    stage = certain(40.0).at(0.0)
    assert (stage.began_s, stage.until_s) == (0.0, 40.0)
    assert stage.wait_s == pytest.approx(40.0, rel=0.02)


def test_of_two_returns_the_wait_is_for_the_likelier_one_until_it_has_passed() -> None:
    """Half of the workflows come back after 10 s, the others after 1,000: hold for 10 s, which costs 20 s a return."""
    curve = ReturnCurve((0.49, 0.5, 0.51, 0.99), (10.0, 10.0, 1000.0, 1000.0))
    assert curve.at(0.0).wait_s == pytest.approx(20.0, rel=0.05)
    assert curve.at(11.0).began_s == 10.0
    assert curve.at(11.0).wait_s == pytest.approx(990.0, rel=0.05)


def test_who_has_probably_ended_is_waited_for_longer() -> None:
    waits = [ReturnCurve(LEVELS, (1, 2, 4, 8, 16, 32, 64, 128), end).at(0.0).wait_s for end in (0.0, 0.5, 0.99, 1.0)]
    assert waits == sorted(waits)
    assert waits[1] == pytest.approx(2 * waits[0], rel=0.6)
    assert waits[3] == LONGEST_S


def test_beyond_the_last_quantile_the_wait_grows_with_the_time_away() -> None:
    curve, waits, at = ReturnCurve(LEVELS, (1, 2, 4, 8, 16, 32, 64, 128), 0.1), [], 128.0
    for _ in range(6):
        stage = curve.at(at)
        assert stage.began_s <= at < stage.until_s
        waits.append(stage.wait_s)
        at = stage.until_s
    assert all(later > 1.9 * before for before, later in pairwise(waits))


def test_the_time_within_which_a_share_returns_is_the_quantile() -> None:
    curve = ReturnCurve(LEVELS, (1, 2, 4, 8, 16, 32, 64, 128))
    assert curve.within_s(0.5) == pytest.approx(8.0)
    assert curve.within_s(0.9) == pytest.approx(32.0)
    assert 64 < curve.within_s(0.97) < 128 < curve.within_s(0.995) < curve.within_s(1.0) == LONGEST_S


ANY_S = st.floats(allow_nan=True, allow_infinity=True)


@given(st.lists(ANY_S, min_size=1, max_size=8), ANY_S, st.floats(0, 1e12))
def test_whatever_a_model_answers_the_wait_is_a_time(seconds: list[float], end: float, away: float) -> None:
    stage = ReturnCurve(LEVELS[: len(seconds)], seconds, end).at(away)
    assert LEAST_S <= stage.wait_s <= LONGEST_S
    assert stage.began_s <= away * (1 + 1e-9) or away == 0
    assert stage.until_s > stage.began_s


@given(st.lists(st.floats(0.01, 1e6), min_size=8, max_size=8).map(sorted), st.floats(0, 0.99))
def test_the_expected_moment_of_return_never_comes_before_its_stage(seconds: list[float], end: float) -> None:
    curve, at = ReturnCurve(LEVELS, seconds, end), 0.0
    for _ in range(20):
        stage = curve.at(at)
        assert math.isfinite(stage.began_s + stage.wait_s)
        assert stage.until_s > at or at == math.inf
        at = stage.until_s


def test_the_pace_of_a_type_is_a_geometric_mean_and_ignores_what_is_no_time() -> None:
    pace = StepPace()
    assert pace.step_s("t") is None
    for seconds in (1.0, 100.0, -5.0, float("nan"), float("inf")):
        pace.observe("t", seconds)
    assert pace.step_s("t") == pytest.approx(10.0)
    assert pace.step_s("another") == pytest.approx(10.0)
    assert paced(10.0, 0.0).at(0.0).wait_s == pytest.approx(17, rel=0.3)


def free(order: FreeOrder, workflow: str, agent: str, n: int) -> list[int]:
    blocks = order.pop(n)
    order.filled(workflow, agent, blocks)
    order.append(blocks)
    return blocks


def test_the_longest_wait_goes_first_and_a_workflow_that_stays_away_falls_behind() -> None:
    now = 0.0
    order = FreeOrder(6, lambda: now)
    order.append(range(6))
    parts = {name: free(order, name, "main", 2) for name in ("soon", "later", "tail")}
    order.forecast("t", "soon", UNKNOWN, certain(5.0), 0.0)
    order.forecast("t", "later", UNKNOWN, certain(60.0), 0.0)
    order.forecast("t", "tail", UNKNOWN, ReturnCurve((0.5, 0.9), (2.0, 1000.0)), 0.0)
    assert list(order) == [*parts["later"], *parts["soon"], *parts["tail"]]
    for seconds in (*range(10**8, 10**8 + 1100), 5.0):  # all but the last are replaced long before they come
        order.forecast("t", "soon", UNKNOWN, certain(seconds), 0.0)
    assert order.debug_state()["stages to come"] < 1100
    now = 3.0  # it has not come back at once, so it will be long
    order.turn()
    assert list(order) == [*parts["tail"], *parts["later"], *parts["soon"]]


def test_ended_workflows_go_first_and_those_without_a_forecast_in_the_order_of_their_last_use() -> None:
    now = 0.0
    order = FreeOrder(10, lambda: now)
    order.append(range(10))
    parts = {}
    for name in ("first", "second", "ended", "soon", "late"):
        parts[name] = free(order, name, "main", 2)
        now += 10.0
    order.end("ended")
    order.forecast("t", "soon", UNKNOWN, certain(10.0), 40.0)
    order.forecast("t", "late", UNKNOWN, certain(500.0), 40.0)
    # At 50 s: first was freed 50 s ago, second 40 s; soon is due now, late in 490 s.
    assert list(order) == [*parts["ended"], *parts["late"], *parts["first"], *parts["second"], *parts["soon"]]


def test_blocks_of_the_agent_that_comes_next_outlive_those_of_one_that_may() -> None:
    order = FreeOrder(4, lambda: 0.0)
    order.append(range(4))
    main, helper = free(order, "w", "main", 2), free(order, "w", "helper", 2)
    looked = lookahead(np.array([[0.9, 0.1, 0.0], [0.9, 0.1, 0.0]]), AGENTS, ScoreConfig())
    order.forecast("t", "w", looked, certain(30.0), 0.0, 5.0)
    assert list(order) == [*helper, *main]
    groups = {group["agents"][0]: group["wait_s"] for group in order.explain("w")}
    assert groups["main"] == pytest.approx(30, rel=0.03)  # at the next step, nearly for certain
    assert groups["helper"] == pytest.approx((30 + 2.5) / 2 ** (-4 / 2), rel=0.05)  # .1 + .9 · .1 = .19, at step 1.5


@pytest.mark.parametrize("forecast", [True, False])
def test_blocks_that_the_latest_step_left_out_go_before_those_it_read(forecast: bool) -> None:
    """A conversation was compacted: the step reads its first two blocks. Another workflow comes back later."""
    order = FreeOrder(6, lambda: 0.0)
    order.append(range(6))
    own, other = free(order, "w", "main", 4), free(order, "other", "main", 2)
    for block in own[:2]:
        order.remove([block])
    order.found("t", "w", "main", own[:2])
    order.append(own[:2])
    looked = lookahead(np.array([[1.0, 0.0, 0.0]] * 3), AGENTS, ScoreConfig()) if forecast else UNKNOWN
    order.forecast("t", "w", looked, certain(30.0), 0.0)
    order.forecast("t", "other", looked, certain(40.0), 0.0)
    assert list(order) == [*own[2:], *other, *own[:2]]
    for block in own[2:]:
        order.remove([block])
    order.found("t", "w", "main", own[2:])  # it goes back to them, and leaves the others out
    order.append(own[2:])
    assert list(order)[:2] == own[:2]


def test_the_uses_of_a_shared_prefix_add_up() -> None:
    order = FreeOrder(6, lambda: 0.0)
    order.append(range(6))
    prefix, private = free(order, "a", "main", 2), free(order, "b", "main", 2)
    for name in ("a", "c", "d"):
        order.found("t", name, "main", prefix)
        order.forecast("t", name, UNKNOWN, certain(90.0), 0.0)
    order.forecast("t", "b", UNKNOWN, certain(60.0), 0.0)
    assert list(order)[2:] == [*private, *prefix]  # a use every 30 s
    for name in ("c", "d"):
        order.end(name)
    assert list(order)[2:] == [*prefix, *private]


def hit_share(*, seed: int, forecasts: bool, times: bool) -> float:
    """Twelve workflows take turns in a cache for seven and a half; every step reads the workflow's 40 blocks."""
    rng, now = random.Random(seed), 0.0
    order = FreeOrder(BLOCKS, lambda: now)
    order.append(range(BLOCKS))
    held: dict[int, list[int]] = {w: [] for w in range(WORKFLOWS)}  # its history: block ids, in prompt order
    owner: dict[int, int] = {}
    due = [(rng.uniform(0, 5), w) for w in range(WORKFLOWS)]
    heapq.heapify(due)
    hits = 0
    for turn in range(600):
        now, workflow = heapq.heappop(due)
        name, agent = f"w{workflow}", AGENTS[turn % 2]
        found = []
        for block in held[workflow]:
            if owner.get(block) != workflow:
                break
            found.append(block)
        for block in found:
            order.remove([block])
        order.found("t", name, agent, found)
        hits += len(found)
        written = order.pop(HISTORY - len(found))
        order.filled(name, agent, written)
        owner.update(dict.fromkeys(written, workflow))
        held[workflow] = found + written
        back = now + rng.choice([1.0, 2.0, 30.0])
        if forecasts:
            either = lookahead(np.array([[0.5, 0.5, 0.0]] * 3), AGENTS, ScoreConfig())
            order.forecast("t", name, either, certain(back - now) if times else None, now)
        order.append(reversed(held[workflow]))
        heapq.heappush(due, (back, workflow))
    return hits / (600 * HISTORY)


@pytest.mark.parametrize("seed", range(3))
def test_knowing_when_keeps_more_than_knowing_who(seed: int) -> None:
    last_use = hit_share(seed=seed, forecasts=False, times=False)
    agents_alone = hit_share(seed=seed, forecasts=True, times=False)
    with_times = hit_share(seed=seed, forecasts=True, times=True)
    assert with_times > max(last_use, agents_alone) + 0.05
