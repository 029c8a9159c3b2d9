"""The published policies of papers.py: who is paused and restored, distances on a graph, what it learns."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from papers import (
    CHECK_S,
    DEEPEST,
    HALF_LIFE_S,
    SETTINGS,
    THUNDERAGENT,
    PauseRestore,
    StaticGraph,
    distances,
    transitions_of,
)

from presage.errors import ConfigurationError
from presage.replay.policies import named
from presage.replay.workload import PromptConvention, RecordedRequest, ReplayJob, assemble
from presage.serving_hooks.counts import EventCounts
from presage.serving_hooks.listeners import Found
from presage.serving_hooks.modes import Switch
from presage.serving_hooks.policies.score import UNIT, ScoreConfig, lookahead
from presage.serving_hooks.workflows import EndReason, RunningStep, Workflow
from presage.serving_hooks.workflows.identity import Step

RING = {"p": frozenset("q"), "q": frozenset("rp"), "r": frozenset("s")}


def test_distances_are_the_fewest_steps_and_an_agent_may_come_again() -> None:
    assert distances(RING, "p") == {"q": 1, "r": 2, "p": 2, "s": 3}
    assert distances(RING, "r") == {"s": 1}
    assert distances(RING, "s") == distances(RING, "unknown") == {}
    assert distances(RING, "p", deepest=2) == {"q": 1, "r": 2, "p": 2}


def workflow(workflow_type: str, workflow_id: str) -> Workflow:
    return Workflow(Step(workflow_type, workflow_id, "p"))


def test_the_nearer_agent_counts_for_more_than_all_further_ones_together() -> None:
    graph = StaticGraph({"t": {"p": frozenset("q"), "q": frozenset("abcdefg")}})
    said = graph.on_prefill(workflow("t", "w"), "p")
    ahead = lookahead(said.probabilities, said.agents, ScoreConfig(SETTINGS["horizon"], SETTINGS["gamma"]))
    near, far = ahead.score("q"), ahead.score("abcdefg")
    assert near == UNIT
    assert 0 < far < near
    assert ahead.score("p") == 0


def test_every_workflow_of_a_type_gets_the_same_and_others_nothing() -> None:
    graph = StaticGraph({"t": RING})
    one, other = (graph.on_prefill(workflow("t", name), "p").probabilities for name in "ab")
    assert np.array_equal(one, other)
    assert graph.on_completion(workflow("t", "a")).probabilities.tolist() == one.tolist()
    assert one.shape == (DEEPEST, 5)
    assert not graph.on_prefill(workflow("u", "c"), "p").probabilities.any()


def job(agents: str) -> ReplayJob:
    """A workflow whose agents take turns."""
    asked = [RecordedRequest(a, 100 * (n + 1), 10, (n - 1,) if n else (), 0.0) for n, a in enumerate(agents)]
    return ReplayJob("t", agents, assemble(asked, PromptConvention()))


def test_transitions_are_those_from_parents() -> None:
    jobs = [job(agents) for agents in ("pqpr", "pqr", "pqps")]
    assert transitions_of(jobs) == {"t": {"p": frozenset("qrs"), "q": frozenset("pr")}}


def test_a_policy_of_a_module_goes_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert named("stock,papers:THUNDERAGENT")[1] is THUNDERAGENT
    for wrong in ("papers:NONE", "nowhere:THUNDERAGENT", ":x", "papers:"):
        with pytest.raises(ConfigurationError, match="cannot be imported"):
            named(wrong)
    (tmp_path / "broken_policies.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigurationError, match="cannot be imported: division by zero"):
        named("broken_policies:MINE")
    with pytest.raises(ConfigurationError, match="is a float; give the name of a Policy"):
        named("papers:CHECK_S")


class Engine:
    """Tells a gate of requests, named by workflow and number."""

    def __init__(self, cache_tokens: float) -> None:
        self.now = 0.0
        self.gate = PauseRestore(cache_tokens, lambda: self.now, Switch("admission", EventCounts()))

    def step(self, name: str) -> RunningStep:
        step = Step("t", name.split(".")[0], "p")
        return RunningStep(name, step, Workflow(step, 0.0, self.now))

    def asks(self, name: str, tokens: int, begins: bool = True) -> None:
        asked = SimpleNamespace(request_id=name, num_prompt_tokens=tokens)
        self.gate.request_arrived(asked, self.step(name))
        if begins and not self.gate.holds(name):
            self.gate.request_scheduled(asked, self.step(name), Found([], 0))

    def answers(self, name: str, tokens: int = 0) -> None:
        self.gate.request_finished(SimpleNamespace(request_id=name, num_output_tokens=tokens), None, None)

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
    engine.gate.workflow_ended(engine.step("b.1").workflow, EndReason.FINISHED)
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
    engine.answers("stranger", 3)
    assert engine.gate.status()["held"] == pytest.approx(0)
