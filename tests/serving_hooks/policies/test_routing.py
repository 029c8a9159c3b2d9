"""Routing policies: where requests go, which wait, and that none waits for ever."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from presage.serving_hooks.policies.admission import Phase
from presage.serving_hooks.policies.fair_shares import Weights
from presage.serving_hooks.policies.routing.chimera import (
    CONFIDENT,
    FASTEST,
    WORTH,
    last_token_s,
    net_of_waiting,
    within_slack,
)
from presage.serving_hooks.policies.routing.fleet import Fleet, FleetEngine, Program, RoutingRequest
from presage.serving_hooks.policies.routing.placement import (
    LeastLoaded,
    LongestPrefix,
    RoundRobin,
    RoutingPolicy,
    SessionAffinity,
)
from presage.serving_hooks.policies.routing.programs import ForecastPrograms, ProgramScheduling, ThunderAgent
from presage.serving_hooks.workflows.identity import scoped

EVERY = (SessionAffinity, RoundRobin, LeastLoaded, LongestPrefix, ProgramScheduling, ThunderAgent, ForecastPrograms)


def fleet(count: int, cache_tokens: int = 1000) -> Fleet:
    return Fleet([FleetEngine(f"e{n}", cache_tokens, 8, 0.01, 1e-4) for n in range(count)])


def request(program: str, step: int = 0, tokens: int = 100, **more: object) -> RoutingRequest:
    return RoutingRequest((int(program.strip("w")), step), program, more.pop("at", 0.0), tokens, **more)  # type: ignore[arg-type]


class Told:
    """Reports to a policy what a gateway would; `where` holds the engine of each placed request."""

    def __init__(self, policy: RoutingPolicy, engines: Fleet) -> None:
        self.policy, self.fleet = policy, engines
        self.where: dict[tuple[int, int], int] = {}
        self.reasons: dict[tuple[int, int], str] = {}

    def arrives(self, one: RoutingRequest) -> int | None:
        self.fleet.arrived(one)
        placement = self.policy.decide(one, self.fleet, one.arrives_s)
        if placement.engine is not None:
            self._put(one, placement.engine, placement.reason)
        self.release(one.arrives_s)
        return self.where.get(one.id)

    def answers(self, id: tuple[int, int], output: int = 10, now: float = 0.0, ended: bool = False) -> None:
        name = f"w{id[0]}"
        program = self.fleet.answered(id, name, output, now)
        self.policy.answered(id, program, self.fleet, now)
        if ended:
            self.fleet.ended(name)
        self.release(now)

    def ticks(self, now: float) -> None:
        self.policy.tick(self.fleet, now)
        self.release(now)

    def release(self, now: float) -> None:
        for one, placement in self.policy.release(self.fleet, now):
            assert placement.engine is not None
            self._put(one, placement.engine, placement.reason)

    def _put(self, one: RoutingRequest, engine: int, reason: str) -> None:
        assert one.id not in self.where
        self.fleet.place(one, engine)
        self.where[one.id], self.reasons[one.id] = engine, reason


def test_round_robin_takes_turns() -> None:
    told = Told(RoundRobin(), fleet(3))
    assert [told.arrives(request(f"w{n}")) for n in range(5)] == [0, 1, 2, 0, 1]


def test_least_loaded_counts_requests_in_flight() -> None:
    told = Told(LeastLoaded(), fleet(2))
    assert [told.arrives(request(f"w{n}")) for n in range(3)] == [0, 1, 0]
    told.answers((0, 0))
    told.answers((2, 0))
    assert told.arrives(request("w3")) == 0


def test_sessions_stay_until_their_engine_drains() -> None:
    told = Told(SessionAffinity(), fleet(2))
    assert told.arrives(request("w0")) == 0
    assert told.arrives(request("w1")) == 1
    assert told.arrives(request("w0", 1)) == 0
    told.fleet.engines[0].open = False
    assert told.arrives(request("w0", 2)) == 1
    assert told.fleet.moves == 1


def test_the_longest_prefix_wins_unless_it_is_short_or_loads_differ() -> None:
    told = Told(LongestPrefix(), fleet(2))
    assert told.arrives(request("w0", cached_tokens=lambda engine: 60 * engine)) == 1
    assert told.arrives(request("w1", cached_tokens=lambda engine: 40 * engine)) == 0
    told.fleet.engines[1].requests = 40
    assert told.arrives(request("w2", cached_tokens=lambda engine: 90 * engine)) == 0


def test_a_closed_fleet_holds_requests_until_an_engine_opens() -> None:
    for kind in EVERY:
        told = Told(kind(), fleet(1))
        told.fleet.engines[0].open = False
        assert told.arrives(request("w0")) is None
        told.fleet.engines[0].open = True
        told.ticks(1.0)
        assert told.where[0, 0] == 0, kind


@pytest.mark.parametrize("kind", [ProgramScheduling, ThunderAgent, ForecastPrograms])
def test_programs_wait_while_contexts_fill_the_cache_and_go_where_room_is(kind: type) -> None:
    told = Told(kind(), fleet(2))
    assert told.arrives(request("w0", tokens=700)) == 0
    assert told.arrives(request("w1", tokens=600)) == 1
    assert told.arrives(request("w2", tokens=500)) is None
    told.answers((1, 0), ended=True)
    assert told.where[2, 0] == 1
    assert told.arrives(request("w0", 1, tokens=720)) == 0  # it is admitted, so it never waits


def test_thunderagent_halves_each_second_and_adds_100_tokens_net_of_shared_ones() -> None:
    policy, of = ThunderAgent(), fleet(1)
    told = Told(policy, of)
    told.arrives(request("w0", tokens=500, shared_tokens=200))
    assert of.engines[0].load_tokens == 500 - 200 + 100
    told.answers((0, 0), output=100, now=10.0)
    told.ticks(12.0)
    assert of.engines[0].load_tokens == (500 + 100 - 200 + 100) / 4


def test_thunderagent_pauses_the_shortest_program_in_a_tool_call_and_restores_experienced_ones_first() -> None:
    told = Told(ThunderAgent(), fleet(1))
    for n, tokens in enumerate((200, 250, 150)):
        assert told.arrives(request(f"w{n}", tokens=tokens)) == 0
    told.answers((0, 0), output=100, now=0.0)
    told.answers((1, 0), output=100, now=0.0)
    told.ticks(0.0)  # (300 + 100) + (350 + 100) + (150 + 100) > 1000: the shortest in a tool call leaves
    assert [told.fleet.programs[f"w{n}"].admitted for n in range(3)] == [False, True, True]
    assert told.arrives(request("w3", tokens=210, at=0.1)) is None
    assert told.arrives(request("w0", 1, tokens=310, at=0.2)) is None
    told.answers((2, 0), now=0.3, ended=True)
    assert told.where[0, 1] == 0
    assert (3, 0) not in told.where


def test_ours_weighs_a_program_by_the_time_it_will_still_be_away() -> None:
    policy = ForecastPrograms()
    program = Program("w", 0.0, phase=Phase.TOOL, since_s=0.0, return_s=20.0)
    assert policy.weight(program, 0.0) == 0.25  # 20 s, halved each 10 s
    assert policy.weight(program, 20.0) == 1.0
    assert policy.weight(program, 30.0) == 0.5  # overdue by 10 s
    program.return_s = math.nan
    assert policy.weight(program, 1.0) == 1.0


def test_ours_weighs_a_program_by_whether_it_returns_at_all() -> None:
    """Few clients say that a workflow has ended: what has probably ended keeps no room."""
    policy = ForecastPrograms()
    program = Program("w", 0.0, phase=Phase.TOOL, since_s=0.0, return_s=10.0, end=0.5)
    assert policy.weight(program, 10.0) == pytest.approx((0.5 * 0.5) / (0.5 * 0.5 + 0.5))  # back now, if it returns
    assert policy.weight(program, 0.0) == pytest.approx(0.5 * 0.5)
    weights = [policy.weight(program, at) for at in (10.0, 20.0, 40.0, 80.0)]
    assert weights == sorted(weights, reverse=True)
    program.end = 0.97
    assert policy.gone(program, 0.0)


def test_ours_restores_the_least_remaining_work_first_until_one_has_waited() -> None:
    told = Told(ForecastPrograms(), fleet(1))
    told.arrives(request("w0", tokens=800))
    told.arrives(request("w1", tokens=600, remaining_tokens=500.0))
    told.arrives(request("w2", tokens=600, remaining_tokens=50.0, at=50.0))
    told.answers((0, 0), now=51.0, ended=True)
    assert told.where.keys() == {(0, 0), (2, 0)}
    told.arrives(request("w3", tokens=600, remaining_tokens=10.0, at=55.0))
    told.ticks(61.0)
    told.answers((2, 0), now=62.0, ended=True)
    assert (1, 0) in told.where  # it has waited a minute
    assert (3, 0) not in told.where


def test_ours_returns_to_its_engine_and_moves_only_after_a_long_absence() -> None:
    told = Told(ForecastPrograms(), fleet(2))
    assert told.arrives(request("w0", tokens=400)) == 0
    assert told.arrives(request("w1", tokens=400)) == 1
    told.answers((0, 0), now=1.0)
    told.ticks(5.0)
    assert told.arrives(request("w0", 1, tokens=420, at=6.0)) == 0
    assert told.reasons[0, 1] == "engine of the workflow"
    told.answers((0, 1), now=7.0)
    told.ticks(100.0)
    assert told.arrives(request("w2", tokens=800, at=100.0)) == 0
    told.answers((1, 0), now=101.0, ended=True)
    assert told.arrives(request("w0", 2, tokens=440, at=102.0)) == 1
    assert told.fleet.moves == 1


@pytest.mark.parametrize("kind", EVERY)
def test_requests_go_to_engines_of_their_model_and_wait_for_no_other(kind: type) -> None:
    of = fleet(4)
    for number, engine in enumerate(of.engines):
        engine.model = "ab"[number // 2]
    told = Told(kind(), of)
    for step, model in enumerate("abba"):
        number = "ab".index(model)  # a workflow is a program on each model
        assert told.arrives(request(f"w{number}", step, model=model)) in ((0, 1) if model == "a" else (2, 3))
    of.engines[2].open = of.engines[3].open = False
    assert told.arrives(request("w2", model="b")) is None
    assert told.arrives(request("w3", model="a")) in (0, 1)
    of.engines[3].open = True
    told.ticks(1.0)
    assert told.where[2, 0] == 3


def test_round_robin_takes_turns_within_a_model() -> None:
    of = fleet(4)
    for number, engine in enumerate(of.engines):
        engine.model = "ab"[number // 2]
    told = Told(RoundRobin(), of)
    assert [told.arrives(request(f"w{n}", model="ab"[n % 2])) for n in range(4)] == [0, 2, 1, 3]


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(EVERY),
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(0, 7), st.integers(1, 1500), st.booleans()), min_size=1, max_size=60),
)
def test_every_request_is_placed_once_and_the_table_is_empty_in_the_end(
    kind: type, engines: int, events: list[tuple[int, int, bool]]
) -> None:
    told = Told(kind(), fleet(engines))
    now = 0.0
    steps: dict[int, int] = {}
    open_: dict[int, tuple[int, int]] = {}
    for number, tokens, answer in events:
        now += 1.0
        if answer and number in open_ and open_[number] in told.where:
            told.answers(open_.pop(number), now=now)
        elif number not in open_:
            open_[number] = number, steps.get(number, 0)
            steps[number] = steps.get(number, 0) + 1
            told.arrives(request(f"w{number}", open_[number][1], tokens, at=now))
        told.ticks(now)
    for _ in range(len(open_) + 1):
        now += 100.0
        told.ticks(now)
        for number in [one for one, id in open_.items() if id in told.where]:
            told.answers(open_.pop(number), now=now, ended=True)
            steps.pop(number)
    assert not open_  # none waits for ever
    for number in steps:
        told.fleet.ended(f"w{number}")
    for engine in told.fleet.engines:
        assert engine.requests == 0
        assert engine.load_tokens == pytest.approx(0.0, abs=1e-6)
        assert not engine.programs


SECONDS, SCORES = {"small": 1.1, "large": 4.4}, {"small": 0.5, "large": 0.9}


def test_the_last_token_comes_after_queue_prefill_and_decoding() -> None:
    engine = FleetEngine("e", 10_000, 10, 0.04, 4e-4, predicted_tokens=500.0)
    assert last_token_s(engine, 1000, 100) == pytest.approx(500 * 0.04 / 10 + 0.4 + 4.0)


def test_the_most_confident_model_needs_the_slack_and_the_margin() -> None:
    assert within_slack(SECONDS, SCORES, slack=2.9, margin=0.05) == ("small", FASTEST)
    assert within_slack(SECONDS, SCORES, slack=3.1, margin=0.05) == ("large", CONFIDENT)
    assert within_slack(SECONDS, SCORES, slack=3.1, margin=0.5) == ("small", FASTEST)
    assert within_slack(SECONDS, SCORES, slack=math.inf, margin=0.05) == ("large", CONFIDENT)
    assert within_slack(SECONDS, SCORES | {"large": 0.4}, slack=math.inf, margin=0.05) == ("small", FASTEST)


def test_a_price_gives_the_accurate_model_the_requests_that_gain_most() -> None:
    # 3.3 s more are worth 0.4 of confidence up to a price of 0.121 a second
    assert net_of_waiting(SECONDS, SCORES, price=0.12) == ("large", WORTH)
    assert net_of_waiting(SECONDS, SCORES, price=0.13) == ("small", WORTH)
    assert net_of_waiting(SECONDS, SCORES | {"large": 0.4}, price=0.0) == ("small", WORTH)


GROUPS = (scoped("key-0", "coding"), scoped("key-1", "coding"))


def restored(kind: type, weights: Weights | None, tokens: tuple[int, int], ends: int) -> list[int]:
    """The tenants whose workflows are restored, in their order, as one after the other ends; both always wait."""
    of = Fleet([FleetEngine("e0", 1000, 8, 0.01, 1e-4)], weights)
    told = Told(kind(), of)
    for n in range(200):
        tenant = 0 if n < 100 else 1
        told.arrives(request(f"w{n}", tokens=tokens[tenant], at=n / 1000, group=GROUPS[tenant]))
    order = list(told.where)
    for turn in range(ends):
        told.answers(order[turn], now=1.0 + turn, ended=True)
        told.ticks(1.0 + turn)
        order += [one for one in told.where if one not in order]
    return [int(one[0] >= 100) for one in order]


@pytest.mark.parametrize("kind", [ProgramScheduling, ForecastPrograms])
def test_a_tenant_that_came_later_does_not_wait_for_all_of_another(kind: type) -> None:
    assert sum(restored(kind, None, (100, 100), 20)[10:]) == pytest.approx(15, abs=5), "it holds nothing at first"
    by_weight = [restored(ThunderAgent, weights, (100, 100), 20) for weights in (None, Weights(tenants={"key-1": 9.0}))]
    assert by_weight[0] == by_weight[1], "the published rule knows no tenants"


@pytest.mark.parametrize("kind", [ProgramScheduling, ForecastPrograms])
def test_who_would_miss_its_deadline_goes_first_of_its_tenant_the_earliest_before(kind: type) -> None:
    told = Told(kind(), fleet(1))
    for earlier in range(100, 120):  # a workflow takes two steps of 10 s
        for step, at in enumerate((0.0, 10.0)):
            told.arrives(request(f"w{earlier}", step, at=at, tokens=40, group=GROUPS[0]))
            told.answers((earlier, step), now=at + 5.0, ended=step == 1)
    told.arrives(request("w1", tokens=900, at=20.0, group=GROUPS[0]))
    due = {"w2": math.inf, "w3": 55.0, "w4": 50.0, "w5": 19.0, "w6": 61.0}  # from 20 s on, 40 s press
    for name, deadline_at in due.items():
        told.arrives(request(name, tokens=900, at=20.0, group=GROUPS[0], deadline_at=deadline_at))
    told.arrives(request("w7", tokens=900, at=20.0, group=GROUPS[1]))
    order, now = [1], 20.0
    while len(order) < 7:
        told.answers((order[-1], 0), now=now, ended=True)
        told.ticks(now)
        order += [one[0] for one in told.where if one[0] < 100 and one[0] not in order]
    assert order == [1, 7, 4, 3, 2, 5, 6], "the other tenant has had nothing; w5 has missed its deadline"


def test_tenants_of_a_fleet_get_tokens_by_weight() -> None:
    turns = restored(ProgramScheduling, Weights(tenants={"key-1": 3.0}), (100, 100), 60)
    assert sum(turns) / len(turns) == pytest.approx(0.75, abs=0.08)
    halves = restored(ProgramScheduling, None, (200, 100), 60)
    assert sum(halves) / len(halves) == pytest.approx(2 / 3, abs=0.08)


@given(st.integers(30, 400), st.integers(10, 400), st.sampled_from([0.5, 1.0, 3.0]))  # 30: so that the first waits too
@settings(max_examples=40, deadline=None)
def test_law_a_tenant_of_a_fleet_is_never_ahead_of_one_that_waits_by_more_than_it_has_open(
    first: int, second: int, weight: float
) -> None:
    ends, answer = 40, 10
    turns = restored(ProgramScheduling, Weights(tenants={"key-1": weight}), (first, second), ends)
    received = [0.0, 0.0]
    for place, tenant in enumerate(turns):
        tokens = (first, second)[tenant] + answer * (place < ends)
        received[tenant] += tokens / (1.0, weight)[tenant]
    assert abs(received[0] - received[1]) <= max(1000 + first + answer, (1000 + second + answer) / weight)
