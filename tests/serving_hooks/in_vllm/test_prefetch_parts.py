"""The memory of prompts is bounded, habits are what was seen, means are means, and what was fetched is followed up."""

import math
import sys
from hashlib import blake2b
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from presage.serving_hooks.policies.next_use import ReturnCurve
from presage.serving_hooks.policies.score import ScoreConfig, lookahead
from presage.serving_hooks.vllm.engine import EnginePort
from presage.serving_hooks.vllm.prefetch.prefetcher import Pace, Yield
from presage.serving_hooks.vllm.prefetch.prompts import (
    ENTRY,
    CachedConversation,
    ExpectedPrompts,
    Habits,
    LastConversations,
)
from presage.serving_hooks.workflows.identity import Step

BLOCK = 4


def hashes(tokens: list[int]) -> list[bytes]:
    """Of whole blocks, each of all tokens before it."""
    ends = range(BLOCK, len(tokens) + 1, BLOCK)
    return [blake2b(repr(tokens[:end]).encode(), digest_size=32).digest() for end in ends]


def talk(tokens: list[int], prompt: int | None = None) -> CachedConversation:
    return CachedConversation(tokens, hashes(tokens), len(tokens) if prompt is None else prompt, BLOCK, None)


def counted(start: int, blocks: int) -> list[int]:
    return list(range(start, start + blocks * BLOCK))


@given(st.lists(st.integers(0, 1), max_size=30), st.lists(st.integers(0, 1), max_size=30))
def test_what_two_prompts_share_is_found_by_their_hashes(one: list[int], other: list[int]) -> None:
    wanted = 0
    while (wanted + 1) * BLOCK <= min(len(one), len(other)) and (
        one[: (wanted + 1) * BLOCK] == other[: (wanted + 1) * BLOCK]
    ):
        wanted += 1
    assert talk(one).common(hashes(other)) == wanted


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("xyz"), st.integers(0, 40), st.booleans())))
def test_the_memory_never_exceeds_its_bytes_and_forgets_the_oldest(
    events: list[tuple[str, str, int, bool]],
) -> None:
    kept = LastConversations(4 * ENTRY)
    order: dict[tuple[str, str], int] = {}
    for workflow, agent, blocks, ends in events:
        if ends:
            kept.end(workflow)
            order = {key: size for key, size in order.items() if key[0] != workflow}
            assert workflow not in kept
            continue
        conversation = talk(counted(0, blocks))
        kept.keep(workflow, agent, conversation)
        order.pop((workflow, agent), None)
        if conversation.size <= kept.most_bytes:
            order[workflow, agent] = conversation.size
        while sum(order.values()) > kept.most_bytes:
            del order[next(iter(order))]
        assert kept.bytes == sum(order.values()) <= 4 * ENTRY
        assert len(kept) == len(order)


def test_a_conversation_counts_for_what_it_takes() -> None:
    one = talk(counted(0, 1000))
    assert one.tokens.dtype == "int32"
    held = sys.getsizeof(one) + sys.getsizeof(one.tokens) + sys.getsizeof(b"".join(one.hashes(len(one))))
    assert one.size - ENTRY == 1000 * (4 * BLOCK + 32) <= held <= one.size


def test_one_that_exceeds_all_memory_is_not_kept() -> None:
    kept = LastConversations(ENTRY + 100)
    kept.keep("w", "a", talk(counted(0, 1)))
    kept.keep("w", "a", talk(counted(0, 10)))
    assert (len(kept), kept.bytes, kept.own("w", "a"), kept.latest("w")) == (0, 0, None, None)


def seen(
    agent: str, kept: LastConversations, habits: Habits, tokens: list[int], said: int, workflow: str = "w"
) -> None:
    habits.arrives("t", workflow, agent, hashes(tokens))
    whole = tokens + counted(10_000 * said, 5)
    kept.keep(workflow, agent, talk(whole, len(tokens)))


def test_at_first_only_what_an_agent_was_asked_twice_in_a_row_is_known() -> None:
    kept = LastConversations(2**20)
    habits = Habits(kept)
    assert habits.next_prompt("t", "w", "a") is None
    seen("a", kept, habits, counted(0, 6), 1)
    assert habits.next_prompt("t", "w", "a") is None
    seen("a", kept, habits, counted(0, 4) + counted(500, 3), 2)
    assert habits.next_prompt("t", "w", "a") == (kept.own("w", "a"), 4)
    assert habits.next_prompt("t", "w", "b") is None


def test_an_agents_own_conversation_is_known_to_go_on_once_it_did_often_enough() -> None:
    kept = LastConversations(2**24)
    habits = Habits(kept)
    for workflow in "uvw":
        for number in range(4):  # each prompt is the one before and more, without what was answered
            seen("a", kept, habits, counted(0, 50 + 10 * number), number + 1, workflow)
            seen("b", kept, habits, counted(7000 + 90 * number, 9), 9, workflow)
    seen("a", kept, habits, counted(300, 20), 1, "x")
    assert habits.next_prompt("t", "x", "a") == (kept.own("x", "a"), 20)
    assert habits.next_prompt("t", "x", "b") is None  # starts anew each time
    assert habits.next_prompt("another", "x", "a") is None


def test_the_common_history_is_known_whoever_comes_and_with_what_was_answered() -> None:
    kept = LastConversations(2**24)
    habits = Habits(kept)
    history = counted(0, 100)
    for number in range(120):
        agent = "ab"[number % 2]
        seen(agent, kept, habits, history, number + 1)
        history = history + counted(10_000 * (number + 1), 5)
        if len(history) > 8000:
            history = counted(number, 100)
    for agent in "ab":
        latest = kept.latest("w")
        assert habits.next_prompt("t", "w", agent) == (latest, len(latest))


class Port:
    """An engine whose cache is empty."""

    block_tokens, hash_lookahead, longest = BLOCK, 0, 10_000

    def cached(self, hashes: list[bytes]) -> list[int]:
        return []


SURE = lookahead(np.array([[1.0, 0.0]]), ("a",), ScoreConfig())


def expected(back: dict[str, float | None], tokens_per_s: float = 100.0) -> ExpectedPrompts:
    """Workflows with a conversation of 40 tokens that are away since 0 s; a tenth are back after so many seconds."""
    prompts = ExpectedPrompts(cast(EnginePort, Port()), 0.2, 2**20)
    for name, seconds in back.items():
        step = Step("t", name, "a")
        for _ in range(2):
            prompts.memory.keep(step.workflow, "a", talk(counted(0, 10)))
        curve = None if seconds is None else ReturnCurve((0.1, 0.5), (seconds, 2 * seconds))
        prompts.forecast(step, SURE, None if curve is None else (curve, 0.0), tokens_per_s)
    return prompts


def due(prompts: ExpectedPrompts, now: float, *, decoding: bool = True) -> list[str]:
    return [prompt.step.workflow_id for prompt in prompts.missing(decoding, now)]


def test_prompts_are_due_when_their_workflows_may_return_less_the_time_to_move_them() -> None:
    prompts = expected({"late": 60.0, "soon": 10.0, "unknown": None})
    assert due(prompts, 0.0) == ["unknown"]
    assert prompts.next_s == pytest.approx(9.6)  # 40 tokens in 0.4 s
    assert due(prompts, 9.61) == ["unknown", "soon"]
    assert prompts.next_s == pytest.approx(59.6)
    assert due(prompts, 9.0) == ["unknown"]
    assert due(prompts, 60.0) == ["unknown", "soon", "late"]
    assert prompts.next_s == math.inf


def test_an_idle_engine_goes_on_with_those_that_return_next() -> None:
    prompts = expected({f"w{number:02}": 100.0 - number for number in range(30)})
    assert due(prompts, 0.0, decoding=False) == [f"w{number:02}" for number in range(29, 21, -1)]
    assert due(prompts, 0.0) == []


def test_without_a_measured_pace_nothing_is_moved_earlier() -> None:
    assert expected({"a": 10.0}, 0.0).missing(True, 9.99) == []
    assert due(expected({"a": 10.0}, 0.0), 10.01) == ["a"]


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.one_of(st.none(), st.floats(0.1, 100.0))), max_size=200))
def test_only_the_last_forecast_of_a_workflow_counts(events: list[tuple[str, float | None]]) -> None:
    prompts, last = expected(dict.fromkeys("abcdef", 50.0)), dict.fromkeys("abcdef", 50.0)
    for name, seconds in events:
        step = Step("t", name, "a")
        if seconds is None:
            prompts.end(step.workflow)
            last.pop(name, None)
            continue
        prompts.forecast(step, SURE, (ReturnCurve((0.1, 0.5), (seconds, 2 * seconds)), 0.0), 0.0)
        if step.workflow in prompts.memory:
            last[name] = seconds
    for now in (0.0, 20.123, 50.123, 101.0):
        assert set(due(prompts, now)) == {name for name, seconds in last.items() if seconds <= now}
    assert len(prompts) == len(last)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_means_are_of_steps_of_clients_and_leave_out_idle_time() -> None:
    clock = Clock()
    pace = Pace(clock)
    assert (pace.step_s, pace.prefilled_per_s) == (0.0, 0.0)

    def step(number: int, at: float, done: float, prefilled: int, counts: bool = True) -> None:
        clock.now = at
        pace.scheduled(number, prefilled, counts)
        clock.now = done
        pace.done(number)

    step(1, 1.0, 1.5, 100)
    step(2, 5.0, 5.5, 300)  # 400 tokens in a second
    step(3, 6.0, 6.1, 0)
    step(4, 9.0, 9.3, 0)
    step(5, 9.3, 19.0, 900, counts=False)
    pace.done(77)
    assert pace.prefilled_per_s == pytest.approx(400)
    assert pace.step_s == pytest.approx(0.2)


def test_a_step_that_was_scheduled_ahead_begins_when_the_one_before_it_is_done() -> None:
    clock = Clock()
    pace = Pace(clock)
    clock.now = 1.0
    pace.scheduled(1, 0, True)
    pace.scheduled(2, 0, True)
    clock.now = 2.0
    pace.done(1)
    clock.now = 3.0
    pace.done(2)
    assert pace.step_s == pytest.approx(1.0)


def test_a_block_is_used_where_it_still_holds_what_was_fetched() -> None:
    held: dict[int, str | None] = {1: "a", 2: "b", 3: "c", 4: "d"}
    followed = Yield(held.get)
    followed.add([1, 2, 3])
    followed.found([1, 4])
    held[2] = None
    held[3] = "e"
    followed.found([3])
    assert (followed.fetched, followed.used, followed.wasted()) == (3, 1, 2)
    followed.found([1, 2])
    assert (followed.fetched, followed.used, followed.wasted()) == (3, 1, 2)
