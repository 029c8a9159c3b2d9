"""Blocks are given up in the order of the rule, however the forecasts, the touches and the ends came about."""

from collections.abc import Iterable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from presage.errors import InputError
from presage.serving_hooks.policies.access import Touched
from presage.serving_hooks.policies.eviction import MOST_AGENTS, EvictionConfig, FreeOrder, Sharing
from presage.serving_hooks.policies.score import UNIT, UNKNOWN, Lookahead, ScoreConfig, lookahead

AGENTS = ("coder", "tester", "writer")
PAPER = EvictionConfig("pbkv")


def cache(blocks: int, config: EvictionConfig = PAPER) -> FreeOrder:
    """A cache whose blocks are all free, block 0 first."""
    order = FreeOrder(blocks, lambda: 0.0, config)
    order.append(range(blocks))
    return order


def holds(order: FreeOrder, workflow: str, agent: str, n: int) -> list[int]:
    """n blocks written by an agent, in use."""
    blocks = order.pop(n)
    order.filled(workflow, agent, blocks)
    return blocks


def looked(rows: Sequence[Sequence[float]]) -> Lookahead:
    return lookahead(np.array(rows, np.float32), AGENTS, ScoreConfig())


def next_is(order: FreeOrder, workflow: str, *probabilities: float) -> None:
    """A one-step forecast: coder, tester, writer, END."""
    order.forecast("t", workflow, looked([probabilities]))


def test_blank_blocks_go_before_retired_and_retired_before_active() -> None:
    order = cache(7)
    active, ended = holds(order, "active", "coder", 2), holds(order, "ended", "coder", 2)
    order.append(active)
    order.append(ended)
    next_is(order, "active", 0, 0, 0, 1)  # worth nothing, says the forecast
    next_is(order, "ended", 1, 0, 0, 0)
    order.end("ended")
    order.end("never heard of")
    assert list(order) == order.pop(7) == [4, 5, 6, *ended, *active]
    assert len(order) == 0


@pytest.mark.parametrize("config", [PAPER, EvictionConfig()], ids=["pbkv", "next-use"])
def test_it_is_known_before_whether_an_eviction_may_take_what_running_workflows_use(config: EvictionConfig) -> None:
    order = cache(6, config)
    for workflow in ("ended", "leaving"):
        order.append(holds(order, workflow, "coder", 2))
    order.end("ended")
    next_is(order, "leaving", 0, 0, 0, 1)  # which a forecast that is still to come may change
    assert [order.takes_active(n) for n in range(7)] == [False] * 5 + [True] * 2
    order.pop(4)
    assert order.takes_active(1)


def test_retired_blocks_go_by_how_many_workflows_used_them_then_by_last_use() -> None:
    order = cache(6)
    shared, early, late = holds(order, "a", "coder", 2), holds(order, "a", "coder", 2), holds(order, "b", "coder", 2)
    order.found("t", "b", "coder", shared)
    for freed in (shared, early, late):
        order.append(freed)
    order.end("a")
    order.end("b")
    assert list(order) == [*early, *late, *shared]


def test_active_blocks_go_by_rising_score_and_a_new_forecast_reorders_them() -> None:
    order = cache(6)
    parts = {agent: holds(order, "w", agent, 2) for agent in AGENTS}
    for blocks in parts.values():
        order.append(blocks)
    next_is(order, "w", 0.2, 0.5, 0.3, 0)
    assert list(order) == [*parts["coder"], *parts["writer"], *parts["tester"]]
    next_is(order, "w", 0.6, 0.1, 0.3, 0)
    assert list(order) == order.pop(6) == [*parts["tester"], *parts["writer"], *parts["coder"]]


def test_a_popular_prefix_adds_up_over_workflows() -> None:
    order = cache(4)
    prefix, private = holds(order, "a", "coder", 2), holds(order, "a", "tester", 2)
    for workflow in ("b", "c"):
        order.found("t", workflow, "coder", prefix)
        next_is(order, workflow, 0.3, 0.7, 0, 0)
    next_is(order, "a", 0.1, 0.6, 0, 0.3)
    order.append(prefix)
    order.append(private)
    assert list(order) == [*private, *prefix]  # 0.6 against 0.1 + 0.3 + 0.3
    order.end("c")
    assert list(order) == [*prefix, *private]


def test_of_equal_scores_the_shared_prefix_outlives_the_private_block() -> None:
    order = cache(4)
    prefix, private = holds(order, "a", "coder", 2), holds(order, "a", "tester", 2)
    order.found("t", "b", "coder", prefix)
    next_is(order, "a", 0.25, 0.5, 0, 0.25)
    next_is(order, "b", 0.25, 0, 0, 0.75)
    order.append(prefix)
    order.append(private)
    assert list(order) == [*private, *prefix]


def test_a_workflow_without_a_forecast_is_not_given_up_before_one_that_will_hardly_return() -> None:
    order = cache(4)
    silent, leaving = holds(order, "silent", "coder", 2), holds(order, "leaving", "coder", 2)
    order.append([*silent, *leaving])
    order.forecast("t", "silent", UNKNOWN)
    next_is(order, "leaving", 0.1, 0, 0, 0.9)
    assert list(order) == [*leaving, *silent]


def test_blocks_whose_content_is_lost_are_the_first_to_go_and_given_up_blocks_belong_to_nobody() -> None:
    order = cache(4)
    blocks = holds(order, "w", "coder", 4)
    order.forget(blocks[:1])
    order.append(blocks)
    order.forget(blocks[2:3])
    assert list(order) == [blocks[0], blocks[2], blocks[1], blocks[3]]
    assert order.spare() == 2
    order.append(order.pop(4))
    assert order.spare() == 4


def test_what_the_engine_must_not_ask_is_refused() -> None:
    order = cache(2)
    with pytest.raises(InputError, match="3 blocks were asked for and 2 are free"):
        order.pop(3)
    order.remove([1])
    with pytest.raises(InputError, match="block 1 is not free"):
        order.remove([1])
    assert len(order) == 1


def test_a_large_group_is_given_up_in_order_however_few_at_a_time() -> None:
    order = cache(3000)
    blocks = holds(order, "w", "coder", 3000)
    order.append(reversed(blocks))
    order.remove([1500])
    given = [block for i in range(1400) for block in order.pop(1 + i % 3)]
    assert given + list(order) == [block for block in reversed(blocks) if block != 1500]


def test_thousands_of_forecasts_leave_the_order_right_and_the_heap_small() -> None:
    order = cache(40)
    parts = [holds(order, f"w{i}", "coder", 2) for i in range(20)]
    for blocks in parts:
        order.append(blocks)
    for turn in range(200):
        for i in range(20):
            next_is(order, f"w{i}", (i + turn) % 20 / 20, 0, 0, 0)
    assert order.pop(40) == [block for i in range(20) for block in parts[(i + 1) % 20]]
    assert order.debug_state()["eviction heap"] <= 1.5 * (64 + 2 * 20)


def test_names_without_end_do_not_fill_the_table_of_who_reads_what() -> None:
    sharing = Sharing()
    for i in range(MOST_AGENTS + 5):
        sharing.observe(f"type {i}", "agent", Touched(16, 32, 4, 32, 60, 64))
    assert sharing.rates("type 0") == {"agent": (48 / 64, 8 / 64, 60 / 96)}
    assert sharing.rates(f"type {MOST_AGENTS}") == {}
    sharing.observe("type 0", "agent", Touched(0, 0, 0, 0, 0, 0))
    sharing.observe("type 0", "agent", Touched(0, 0, 0, 0, 32, 32))
    assert sharing.rates("type 0") == {"agent": (48 / 64, 8 / 64, 92 / 128)}


private = st.sets(st.sampled_from(AGENTS), min_size=1)
table = st.lists(st.tuples(*[st.integers(0, 9)] * 4), min_size=3, max_size=3)


@given(st.lists(st.tuples(private, table, st.integers(0, 2), st.integers(0, 3)), min_size=2, max_size=5))
def test_a_small_error_of_the_forecasts_leaves_the_order_as_the_paper_proves(
    workflows: list[tuple[set[str], list[tuple[int, ...]], int, int]],
) -> None:
    """PBKV, corollary G.3: scores further apart than (1 − γ^K) / (2 (1 − γ)) times both errors keep their order."""
    places, scores, errors = [], [], []
    orders = [cache(len(workflows)), cache(len(workflows))]
    for i, (agents, rows, row, column) in enumerate(workflows):
        true = np.array([[n + 0.01 for n in one] for one in rows])
        guess = true.copy()
        guess[row, column] += 0.5
        tables = [one / one.sum(axis=1, keepdims=True) for one in (true, guess)]
        errors.append(sum(0.7**k * np.abs(t - g).sum() for k, (t, g) in enumerate(zip(*tables, strict=True))))
        scores.append(lookahead(tables[0], AGENTS, ScoreConfig()).score(agents) / UNIT)
        for order, one in zip(orders, tables, strict=True):
            (block,) = order.pop(1)
            for agent in agents:
                order.filled(f"w{i}", agent, [block])
            order.forecast("t", f"w{i}", lookahead(one, AGENTS, ScoreConfig()))
    for order in orders:
        order.append(range(len(workflows)))
        places.append(list(order))
    factor = (1 - 0.7**3) / (2 * (1 - 0.7))
    for a in range(len(workflows)):
        for b in range(len(workflows)):
            if scores[a] + factor * (errors[a] + errors[b]) + 1e-4 < scores[b]:
                assert all(place.index(a) < place.index(b) for place in places)


class AgainstASort(RuleBasedStateMachine):
    """A cache of 10 blocks, and a model that knows of each block who touched it and sorts from scratch."""

    workflows = st.sampled_from(["a", "b", "c", ""])
    agents = st.sampled_from(AGENTS)

    def __init__(self) -> None:
        super().__init__()
        self.order = cache(10)
        self.freed: dict[int, int] = {block: block - 10 for block in range(10)}
        self.map: dict[int, dict[tuple[str, int], set[str]]] = {block: {} for block in range(10)}
        self.group: dict[int, object] = dict.fromkeys(range(10))  # blocks freed and given up together
        self.group_used: dict[object, int] = {}
        self.life: dict[str, int] = {}
        self.forecasts: dict[str, Lookahead] = {}
        self.clock = 0

    @rule(workflow=workflows, agent=agents, n=st.integers(1, 6))
    def fill(self, workflow: str, agent: str, n: int) -> None:
        n = min(n, len(self.freed))
        expected = self.sorted()[:n]
        assert self.order.pop(n) == expected
        for block in expected:
            del self.freed[block]
            self.map[block], self.group[block] = {}, None
        self.order.filled(workflow, agent, expected)
        self.touch(workflow, agent, expected)

    @rule(workflow=workflows, agent=agents, blocks=st.lists(st.integers(0, 9), unique=True, max_size=6))
    def find(self, workflow: str, agent: str, blocks: list[int]) -> None:
        blocks = [block for block in blocks if self.map[block]]
        for block in blocks:
            if block in self.freed:
                self.order.remove([block])
                del self.freed[block]
        self.order.found("t", workflow, agent, blocks)
        self.touch(workflow, agent, blocks)

    @rule(workflow=workflows, agent=agents, block=st.integers(0, 9))
    def find_all_that_go_with(self, workflow: str, agent: str, block: int) -> None:
        self.find(workflow, agent, [other for other in range(10) if self.group[other] == self.group[block]])

    def touch(self, workflow: str, agent: str, blocks: Iterable[int]) -> None:
        self.clock += 1
        me = (workflow, self.life.setdefault(workflow, self.clock))
        if blocks:
            self.forecasts.setdefault(workflow, UNKNOWN)
        for block in blocks:
            users, before = self.map[block], self.group[block]
            if agent in users.get(me, ()):
                continue
            alone = set(users) <= {me}
            users.setdefault(me, set()).add(agent)
            after = (me, frozenset(users[me])) if alone else (before, self.clock)
            self.group[block] = after
            self.group_used.setdefault(after, self.group_used.get(before, 0))

    @rule(blocks=st.lists(st.integers(0, 9), unique=True, max_size=10))
    def free(self, blocks: list[int]) -> None:
        blocks = [block for block in blocks if block not in self.freed]
        self.order.append(blocks)
        last: object = None
        for block in blocks:
            self.clock += 1
            self.freed[block] = self.clock
            if self.group[block] is not None and self.group[block] != last:
                last = self.group[block]
                self.group_used[last] = self.clock

    @rule(
        workflow=workflows,
        rows=st.lists(st.tuples(*[st.integers(0, 3)] * 4), min_size=0, max_size=3),
    )
    def forecast(self, workflow: str, rows: list[tuple[int, ...]]) -> None:
        table = np.array([[n / max(1, sum(row)) for n in row] for row in rows], np.float32).reshape(len(rows), 4)
        forecast = lookahead(table, AGENTS, ScoreConfig())
        self.order.forecast("t", workflow, forecast)
        self.clock += 1
        self.life.setdefault(workflow, self.clock)
        self.forecasts[workflow] = forecast

    @rule(workflow=workflows)
    def end(self, workflow: str) -> None:
        self.order.end(workflow)
        self.life.pop(workflow, None)
        self.forecasts.pop(workflow, None)

    @precondition(lambda self: any(self.map.values()))
    @rule(block=st.integers(0, 9))
    def lose(self, block: int) -> None:
        self.order.forget([block])
        if self.map[block] and block in self.freed:
            self.clock += 1
            self.freed[block] = self.clock
        self.map[block], self.group[block] = {}, None

    def sorted(self) -> list[int]:
        return sorted(self.freed, key=self.key)

    def key(self, block: int) -> tuple[float, ...]:
        users = self.map[block]
        if not users:
            return (-1, 0, 0, 0, self.freed[block])
        active = [(w, agents) for (w, life), agents in users.items() if self.life.get(w) == life]
        used = self.group_used[self.group[block]]
        if not active:
            return (0, 0, len(users), used, self.freed[block])
        score = sum(self.forecasts[w].score(agents) for w, agents in active)
        return (1, score, len(users), used, self.freed[block])

    @invariant()
    def the_order_is_that_of_the_sort(self) -> None:
        assert list(self.order) == self.sorted()
        assert len(self.order) == len(self.freed)
        assert self.order.debug_state()["groups of blocks"] == len(
            {group for group in self.group.values() if group is not None}
        )
        spare = [block for block in self.freed if self.key(block)[0] < 1]
        assert self.order.spare() == len(spare)
        assert self.order.spared(range(10)) == len(spare)


TestAgainstASort = AgainstASort.TestCase
TestAgainstASort.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
