"""Pause and restore by hand: who is paused, who is restored, and that the engine never stands still."""

from collections import Counter

import pytest

from presage.serving_hooks.replay.pause_restore import CHECK_S, HALF_LIFE_S, PauseRestore
from presage.serving_hooks.vllm.metadata import Step
from presage.serving_hooks.vllm.modes import Switch


class Engine:
    """Tells a gate of requests, named by workflow and number."""

    def __init__(self, cache_tokens: float) -> None:
        self.now, self.ended = 0.0, set[str]()
        self.gate = PauseRestore(cache_tokens, self.alive, lambda: self.now, Switch("admission", Counter()))

    def alive(self, workflow: str) -> bool:
        return workflow not in self.ended

    def step(self, name: str) -> Step:
        return Step("t", name.split(".")[0], "p")

    def asks(self, name: str, tokens: int, begins: bool = True) -> None:
        self.gate.arrives(name, self.step(name), tokens, [], None)
        if begins and not self.gate.holds(name):
            self.gate.begins(name, 0, [])

    def answers(self, name: str, tokens: int = 0) -> None:
        self.gate.leaves(name, [], True, tokens)

    def check(self) -> list[str]:
        self.now += CHECK_S
        return sorted(self.gate.decide(False))


def test_a_new_workflow_runs_where_it_fits_and_nobody_waits() -> None:
    engine = Engine(100)
    engine.asks("a.0", 60)
    engine.asks("b.0", 50)
    engine.asks("c.0", 10)
    assert [engine.gate.holds(name) for name in ("a.0", "b.0", "c.0")] == [False, True, True]


def test_the_smallest_in_a_tool_call_is_paused_first_and_the_running_are_not_touched() -> None:
    engine = Engine(100)
    for name, tokens in (("a.0", 10), ("b.0", 20), ("c.0", 30)):
        engine.asks(name, tokens)
    engine.answers("b.0")
    engine.answers("c.0")
    engine.answers("a.0", 0)
    engine.asks("a.1", 65)
    # After 5 s 20 and 30 count for 14.1 and 21.2, and with 65 that is 100.4: the smaller goes.
    assert engine.check() == []
    engine.asks("b.1", 25)
    engine.asks("c.1", 30)
    assert [engine.gate.holds(name) for name in ("a.1", "b.1", "c.1")] == [False, True, False]


def test_one_that_runs_is_paused_once_it_has_ended_and_restored_when_there_is_room() -> None:
    engine = Engine(100)
    engine.asks("a.0", 40)
    engine.asks("b.0", 45)
    engine.answers("b.0", 0)
    engine.asks("b.1", 80)
    engine.check()  # 120 of 100, both run: the smaller is marked
    assert not engine.gate.holds("a.0")
    engine.answers("a.0", 5)
    engine.asks("a.1", 50)
    assert engine.gate.holds("a.1")
    assert engine.check() == []
    engine.answers("b.1", 0)
    engine.ended.add(engine.step("b.1").workflow)
    assert engine.check() == ["a.1"]
    assert not engine.gate.holds("a.1")


def test_the_weight_of_a_tool_call_decays() -> None:
    engine = Engine(100)
    engine.asks("a.0", 80)
    engine.answers("a.0", 0)
    engine.asks("b.0", 50)
    assert engine.gate.holds("b.0")
    engine.now = HALF_LIFE_S - CHECK_S  # at the check 80 count for 40
    assert engine.check() == ["b.0"]


def test_decisions_are_made_at_intervals_and_nobody_waits_where_nothing_runs() -> None:
    engine = Engine(100)
    engine.asks("a.0", 90)
    engine.asks("b.0", 60, begins=False)
    engine.asks("c.0", 50, begins=False)
    engine.check()
    assert engine.gate.decide(True) == []
    engine.answers("a.0", 0)
    assert engine.gate.let_one_in() == ["c.0"]
    assert engine.gate.status() == {"held": 1, "paused": 0}
    assert engine.gate.let_one_in() == ["b.0"]
    assert engine.gate.let_one_in() == []


def test_requests_of_nobody_are_never_held() -> None:
    engine = Engine(10)
    assert not engine.gate.holds("stranger")
    engine.gate.leaves("stranger", [], True, 3)
    assert engine.gate.status()["held"] == pytest.approx(0)
