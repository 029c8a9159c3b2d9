"""Workflows wait only where the load would settle badly, new ones first, with a reason, and none for ever."""

from dataclasses import replace

import numpy as np
import pytest
from crowds import Workflow, decide, waited_s
from hypothesis import given, settings
from hypothesis import strategies as st

from presage.serving_hooks.policies.admission import AWAY, FULL, PAUSED, Admission, AdmissionConfig, Phase
from presage.serving_hooks.policies.steady_state import Rates

PAUSES = np.sort(np.random.default_rng(0).exponential(2.0, 600))
CALM = Rates(0.01, 1e-4, 1e-4, 100.0, 400.0, 64, PAUSES, end=1 / 30)
THRASHING = replace(CALM, miss_share=0.9)
DECODING = replace(THRASHING, decode_token_s=2e-2, prefill_token_s=2e-5)
"""Waiting pays, but even if all ran lost contexts would not take most of the engine's time."""


def ready(name: str, tokens: float = 20_000.0, since: float = 0.0, begun: bool = False) -> Workflow:
    return Workflow(name, Phase.READY, since, begun, tokens)


def room_for_ten(**config: float) -> Admission:
    return Admission(200_000, AdmissionConfig(**config))


CROWD = [ready(f"w{i:02}") for i in range(40)]


def test_where_the_cache_holds_all_nobody_waits() -> None:
    decision = decide(Admission(10_000_000), CROWD, CALM, 0.0)
    assert (len(decision.run), decision.held) == (40, {})
    assert decision.everybody.load == pytest.approx(0.08)
    assert decision.everybody.miss_share < 0.01
    assert decision.chosen == decision.everybody


def test_while_the_engine_is_not_measured_nobody_waits() -> None:
    admission = room_for_ten()
    decision = decide(admission, CROWD, None, 0.0)
    assert (decision.held, decision.everybody.workflows, decision.everybody.steps_per_s) == ({}, 40, 0.0)
    assert not admission.is_full


def test_where_it_is_known_what_contexts_grow_to_as_many_begin_as_fit_the_cache() -> None:
    admission = room_for_ten()
    decision = decide(admission, CROWD, None, 0.0, 60_000.0, known=True)
    assert decision.run == {f"w{i:02}" for i in range(7)}, "140,000 tokens are left for contexts of 20,000"
    assert set(decision.held.values()) == {FULL}
    away = [replace(one, phase=Phase.TOOL, since=1.0, begun=True) for one in CROWD[:7]]
    assert decide(admission, [*away, *CROWD[7:]], None, 30.0, 60_000.0, known=True).run == decision.run
    then = decide(admission, [*away, *CROWD[7:]], None, 32.0, 60_000.0, known=True)
    assert then.run == {f"w{i:02}" for i in range(7, 14)}, "many never say that they have ended"
    assert len(decide(admission, CROWD, None, 34.0).run) == 40, "it is no longer known, nor measured"


def test_a_context_that_fits_no_cache_is_served_too() -> None:
    assert len(decide(Admission(1000.0), CROWD, None, 0.0, known=True).run) == 1


def test_where_it_would_thrash_the_first_that_came_run_and_the_others_are_told_why() -> None:
    admission = room_for_ten()
    decision = decide(admission, CROWD, THRASHING, 0.0)
    assert 5 <= len(decision.run) <= 10
    assert decision.run == {f"w{i:02}" for i in range(len(decision.run))}
    assert set(decision.held.values()) == {FULL}
    assert decision.chosen.workflows == len(decision.run)
    assert decision.chosen.steps_per_s > 1.15 * decision.everybody.steps_per_s
    assert decision.chosen.miss_share < decision.everybody.miss_share
    assert decision.everybody.load == pytest.approx(4.0)
    assert admission.counts.by_key()["held"] == len(decision.held)
    assert admission.is_full


def test_a_gain_that_measurements_rule_out_is_not_believed() -> None:
    """The engine spends 5 % of its time on lost contexts while all run, so it cannot gain more than that."""
    assert decide(room_for_ten(), CROWD, THRASHING, 0.0, recomputing_share=0.05).held == {}
    admission = room_for_ten()
    assert decide(admission, CROWD, THRASHING, 0.0).held
    assert decide(admission, CROWD, THRASHING, 2.0, recomputing_share=0.0).held, "less is lost because some wait"


def test_what_was_held_before_any_loss_showed_stays_so_only_where_all_would_thrash() -> None:
    for rates, held in ((THRASHING, True), (DECODING, False)):
        admission = room_for_ten(least_gain=0.05)
        assert decide(admission, CROWD, None, 0.0, known=True).held
        assert bool(decide(admission, CROWD, rates, 2.0, recomputing_share=0.0).held) is held


def test_a_gain_below_the_least_holds_nobody() -> None:
    assert decide(room_for_ten(least_gain=9.0), CROWD, THRASHING, 0.0).held == {}


def test_where_lost_tokens_cost_little_nobody_waits() -> None:
    assert decide(room_for_ten(), CROWD, replace(THRASHING, prefill_token_s=1e-7), 0.0).held == {}


def test_what_workflows_share_is_not_theirs_and_not_the_caches() -> None:
    alone = decide(room_for_ten(), CROWD, THRASHING, 0.0)
    beside = decide(room_for_ten(), CROWD, THRASHING, 0.0, shared_tokens=100_000)
    assert beside.everybody.load == pytest.approx(2 * alone.everybody.load)
    assert len(beside.run) < len(alone.run)


def test_a_number_is_chosen_every_two_seconds_and_places_are_filled_at_once() -> None:
    admission = room_for_ten()
    first = decide(admission, CROWD, THRASHING, 0.0)
    left = [one for one in CROWD if one.id != "w00"]
    then = decide(admission, left, CALM, 1.9)
    assert then.run == first.run - {"w00"} | {f"w{len(first.run):02}"}
    assert then.chosen == first.chosen


def test_one_that_has_begun_comes_before_all_that_are_new() -> None:
    admission = room_for_ten()
    first = decide(admission, CROWD, THRASHING, 0.0)
    back = replace(CROWD[-1], begun=True)
    then = decide(admission, [*CROWD[1:-1], back], THRASHING, 1.0)
    assert back.id in then.run
    assert len(then.run) == len(first.run)


def test_begun_ones_are_paused_between_two_steps_only_where_the_engine_is_far_from_its_best() -> None:
    crowd = [Workflow(f"w{i:02}", Phase.TOOL if i % 2 else Phase.STEP, begun=True) for i in range(40)]
    admission = room_for_ten()
    decide(admission, crowd, None, 0.0)  # all are inside
    decision = decide(admission, crowd, THRASHING, 2.0)
    paused = sorted(decision.held)
    assert paused
    assert set(decision.held.values()) == {PAUSED}
    assert all(int(name[1:]) % 2 for name in paused), "none while its request is computed"
    tools = [f"w{i:02}" for i in range(40) if i % 2]
    assert paused == tools[-len(paused) :], "the last that came"
    assert admission.counts.by_key()["paused"] == len(paused)
    near = room_for_ten()
    few = crowd[: decision.chosen.workflows + 1]
    decide(near, few, None, 0.0)
    assert decide(near, few, THRASHING, 2.0).held == {}


def test_a_paused_one_waits_for_its_tool_and_then_comes_first() -> None:
    crowd = [Workflow(f"w{i:02}", Phase.TOOL, begun=True) for i in range(40)]
    admission = room_for_ten()
    decide(admission, crowd, None, 0.0)
    held = decide(admission, crowd, THRASHING, 2.0).held
    inside = [one for one in crowd if one.id not in held]
    returned = Workflow(max(held), Phase.READY, 2.5, begun=True)
    away = [one for one in crowd if one.id in held and one.id != returned.id]
    new = [ready(f"n{i}", since=2.5) for i in range(9)]
    decision = decide(admission, [*inside[1:], *away, *new, returned], THRASHING, 3.0)
    assert returned.id in decision.run
    assert waited_s(admission, returned, 3.0) == pytest.approx(0.5), "what its tool took is no wait for admission"
    assert not decision.run & {one.id for one in new}
    assert admission.counts.by_key()["restored"] == 1


def test_an_objective_bounds_what_a_workflow_waits_over_its_life() -> None:
    admission = room_for_ten(least_gain=0.05)
    late = replace(CROWD[-1], bound_s=5.0)
    crowd = [*CROWD[:-1], late]
    for now, runs in ((0.0, False), (3.0, False), (4.9, False), (5.0, True)):
        assert (late.id in decide(admission, crowd, DECODING, now).run) is runs
    assert waited_s(admission, late, 5.0) == pytest.approx(5.0)
    away = replace(late, phase=Phase.TOOL, begun=True, since=6.0)
    decide(admission, [*CROWD[:-1], away], DECODING, 6.0)
    again = replace(late, begun=True, since=7.0)
    assert late.id in decide(admission, [*CROWD[:-1], again], DECODING, 7.0).run


def test_where_more_is_lost_than_expected_contexts_count_as_longer_for_a_while() -> None:
    admission = room_for_ten()
    first = decide(admission, CROWD, CALM, 0.0)
    assert first.held
    for now in (2.0, 4.0, 6.0, 8.0):  # with so few open hardly anything should be lost
        thrashing = decide(admission, CROWD, THRASHING, now)
    assert 1.2 < admission.longer <= 3.0
    assert thrashing.chosen.workflows < first.chosen.workflows
    for now in range(10, 1200, 10):
        calm = decide(admission, CROWD, CALM, float(now))
    assert admission.longer == pytest.approx(1.0, abs=0.05)
    assert calm.chosen.workflows == first.chosen.workflows


def test_while_everybody_is_let_run_a_loss_that_is_expected_teaches_nothing() -> None:
    admission = room_for_ten(least_gain=9.0)
    for now in range(0, 60, 2):
        decide(admission, CROWD, THRASHING, float(now))
    assert admission.longer == 1.0


def test_whoever_may_have_ended_without_a_word_counts_by_the_probability_that_it_goes_on() -> None:
    """A third of the steps are the last. Of the workflows that go on half are back by now: a half is left of two
    thirds, beside the third that has ended. By hand: (1/2 · 2/3) / (1/2 · 2/3 + 1/3) = 1/2 of 30, and 10 that wait."""
    rates, now = replace(THRASHING, pauses_s=np.array([1.0, 2.0, 4.0, 8.0]), end=1 / 3), 10.0
    away = [replace(one, phase=Phase.TOOL, since=now - 3.0, begun=True) for one in CROWD[:30]]
    silent = [*(replace(one, silent=1.0) for one in away), *CROWD[30:]]
    assert decide(room_for_ten(), silent, rates, now).everybody.workflows == 25
    assert decide(room_for_ten(), [*away, *CROWD[30:]], rates, now).everybody.workflows == 40, "their ends are told"
    half = [*(replace(one, silent=0.5) for one in away), *CROWD[30:]]
    assert decide(room_for_ten(), half, rates, now).everybody.workflows == 30, "1/3 beside 1/6: two thirds go on"


def test_who_has_probably_ended_without_a_word_leaves_most_of_its_place_to_others() -> None:
    often, later = replace(THRASHING, end=0.2), 1.0 + float(np.quantile(PAUSES, 0.9))
    others: dict[float, int] = {}
    for silent in (0.0, 1.0):
        admission = room_for_ten()
        first = decide(admission, CROWD, often, 0.0).run
        away = [
            replace(one, phase=Phase.TOOL, since=1.0, begun=True, silent=silent) if one.id in first else one
            for one in CROWD
        ]
        others[silent] = len(decide(admission, away, often, later).run - first)
    assert others[0.0] <= 1
    assert others[1.0] >= 4


def test_workflows_that_end_without_a_word_keep_no_place() -> None:
    """Most clients never say that a workflow has ended: until it expires, it looks like a long pause."""
    admission = room_for_ten()
    first = decide(admission, CROWD, THRASHING, 0.0)
    away = [replace(one, phase=Phase.TOOL, since=1.0, begun=True) if one.id in first.run else one for one in CROWD]
    longest = float(PAUSES[-1])
    then = decide(admission, away, THRASHING, 3.0 + longest)
    assert {then.held[name] for name in first.run} == {AWAY}
    assert len(then.run) >= len(first.run) - 1
    assert then.run == {f"w{number:02}" for number in range(len(first.run), len(first.run) + len(then.run))}


def test_where_few_pauses_are_long_whoever_is_away_for_long_gives_up_its_place_and_waits_for_the_next() -> None:
    """A tenth of the pauses takes ten minutes, the others 2 s: a place kept for so long would stand empty."""
    mostly_short = replace(THRASHING, pauses_s=np.sort(np.concatenate([np.full(540, 2.0), np.full(60, 600.0)])))
    admission = room_for_ten()
    first = decide(admission, CROWD, mostly_short, 0.0)
    assert first.chosen.keeps_s < 600
    away = [replace(one, phase=Phase.TOOL, since=1.0, begun=True) if one.id in first.run else one for one in CROWD]
    now = 3.0 + first.chosen.keeps_s
    then = decide(admission, away, mostly_short, now)
    assert not first.run & then.run
    assert len(then.run) == len(first.run)
    back = [replace(one, phase=Phase.READY, since=now, begun=True) if one.id == "w00" else one for one in away]
    assert decide(admission, back, mostly_short, now + 0.1).held["w00"] == PAUSED, "no place is free"
    ended = next(iter(then.run))
    left = [one for one in back if one.id != ended]
    assert "w00" in decide(admission, left, mostly_short, now + 0.2).run, "it goes before all that are new"


@pytest.mark.parametrize(("rates", "share"), [(DECODING, 0.5), (THRASHING, 0.0)], ids=["measured", "if all ran"])
def test_bounds_are_suspended_where_lost_contexts_take_the_engines_time_and_the_overdue_go_first(
    rates: Rates, share: float
) -> None:
    admission = room_for_ten(least_gain=0.05)
    late = [replace(one, bound_s=5.0) for one in CROWD[-3:]]
    crowd = [*CROWD[:-3], *late]
    first = decide(admission, crowd, rates, 0.0, recomputing_share=0.2)
    busy = decide(admission, crowd, rates, 6.0, recomputing_share=share)
    assert busy.overdue == 3
    assert not busy.run & {one.id for one in late}
    left = [one for one in crowd if one.id not in sorted(first.run)[:2]]
    then = decide(admission, left, rates, 7.0, recomputing_share=share)
    assert then.run - first.run == {late[0].id, late[1].id}


def test_who_is_overdue_runs_once_lost_contexts_take_less() -> None:
    admission = room_for_ten(least_gain=0.05)
    late = replace(CROWD[-1], bound_s=5.0)
    crowd = [*CROWD[:-1], late]
    decide(admission, crowd, DECODING, 0.0, recomputing_share=0.5)
    assert late.id not in decide(admission, crowd, DECODING, 6.0, recomputing_share=0.5).run
    calm = decide(admission, crowd, DECODING, 8.0, recomputing_share=0.1)
    assert calm.overdue == 0
    assert late.id in calm.run


def test_where_all_would_thrash_the_smallest_goes_on_first_and_elsewhere_the_first_that_came() -> None:
    decoding = replace(THRASHING, decode_token_s=8e-3, prefill_token_s=2e-5)  # lost contexts take less than .4 of it
    crowd = [replace(one, begun=True, own_tokens=float(9000 - 100 * number)) for number, one in enumerate(CROWD)]
    for rates, next_one in ((decoding, "w20"), (THRASHING, "w30")):
        admission = room_for_ten()
        first = decide(admission, crowd[:30], rates, 0.0)
        inside = [one for one in crowd if one.id in first.run]
        then = decide(admission, [*inside[1:], crowd[20], crowd[30]], rates, 1.0)
        assert then.run - first.run == {next_one}


def test_of_new_workflows_the_smallest_begins_first_and_who_is_overdue_before_it() -> None:
    admission, large, small = room_for_ten(), ready("large", tokens=30_000), ready("small", tokens=2_000)
    first = decide(admission, CROWD, THRASHING, 0.0)
    inside = [one for one in CROWD if one.id in first.run]
    then = decide(admission, [*inside[1:], *CROWD[20:], large, small], THRASHING, 1.0)
    assert then.run - first.run == {"small"}
    late = replace(large, bound_s=0.5)
    waits = decide(admission, [*inside[2:], *CROWD[20:], late, small], THRASHING, 1.9, recomputing_share=0.5)
    assert waits.run - first.run == {"small", "large"}


def test_nobody_there_and_one_too_large_for_the_cache() -> None:
    assert decide(Admission(100), [], CALM, 0.0).run == frozenset()
    giants = [ready(f"w{i}", tokens=500_000) for i in range(4)]
    assert len(decide(Admission(200_000), giants, THRASHING, 0.0).run) >= 1


moves = st.lists(st.sampled_from(list(Phase)), min_size=12, max_size=12)


@given(st.lists(st.tuples(moves, st.integers(1, 8), st.booleans()), min_size=2, max_size=12))
@settings(max_examples=60)
def test_law_whoever_came_first_is_never_overtaken_by_its_like(turns: list[tuple[list[Phase], int, bool]]) -> None:
    """Whatever the workflows do: at least one may run, and of those that wait none enters before an earlier one."""
    admission, now, phases, begun = room_for_ten(), 0.0, [Phase.READY] * 12, [False] * 12
    inside: frozenset[str] = frozenset()
    for turn, passed, thrashing in turns:
        now += passed
        for i, phase in enumerate(turn):
            begun[i] = begun[i] or phase is Phase.STEP
            phases[i] = phase
        here = [Workflow(f"w{i:02}", phases[i], 0.0, begun[i], 90_000.0) for i in range(12)]
        decision = decide(admission, here, THRASHING if thrashing else CALM, now)
        assert decision.run | decision.held.keys() == {one.id for one in here}
        assert not decision.run & decision.held.keys()
        assert {one.id for one in here if one.phase is Phase.STEP} <= decision.run
        entered = [one for one in here if one.id in decision.run - inside and one.phase is Phase.READY]
        for one in entered:
            waiting = [w.id for w in here if w.phase is Phase.READY and w.begun == one.begun and w.id in decision.held]
            assert all(one.id < other for other in waiting)
        inside = decision.run


def test_who_takes_the_place_of_one_that_has_ended_has_waited_for_nothing() -> None:
    admission = room_for_ten()
    last = CROWD[-1]
    assert last.id in decide(admission, CROWD, THRASHING, 1.0).held
    admission.workflows.drop(last.id)
    decide(admission, [*CROWD[:-1], replace(last, id="fresh", since=5.0)], THRASHING, 5.0)
    assert waited_s(admission, replace(last, id="fresh", since=5.0), 5.0) == 0
    assert len(admission.workflows) == len(CROWD)


def test_where_those_that_are_open_have_far_outgrown_those_that_wait_and_contexts_are_lost_fewer_are_open() -> None:
    """All came together: the mean over those that have hardly begun says nothing about the open ones."""
    chosen = {}
    for lost in (0.45, 0.6):
        admission = room_for_ten()
        young = [ready(f"w{i:02}", 8_000.0, begun=True) for i in range(80)]
        first = decide(admission, young, THRASHING, 0.0)
        assert len(first.run) > 10
        old = {one.id: replace(one, phase=Phase.STEP, context_tokens=40_000.0) for one in young if one.id in first.run}
        crowd = [old.get(one.id, one) for one in young]
        chosen[lost] = decide(admission, crowd, THRASHING, 2.0, recomputing_share=lost).chosen.workflows
    assert chosen[0.6] < chosen[0.45]
