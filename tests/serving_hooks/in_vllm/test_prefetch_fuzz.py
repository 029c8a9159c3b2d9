"""Random requests, with prefetch: every request is answered, every block accounted for, and no request suffers."""

import random
from pathlib import Path
from typing import Any

import pytest
from prefetch_samples import AGENTS, Clock, Idling, KnowsAsync, KnowsSync, Says, status
from test_fail_open import SECRET, breaks
from test_fuzz import answered
from vllm_samples import TIER, Request, ask, build, everything_is_free

from presage.serving_hooks.vllm.engine import EnginePort
from presage.serving_hooks.vllm.prefetch.prefetcher import Pace, Prefetcher, Yield
from presage.serving_hooks.vllm.prefetch.prompts import CachedConversation, Habits, LastConversations
from presage.serving_hooks.workflows import Workflow

pytestmark = [pytest.mark.vllm, pytest.mark.one_version]


class Chances(Says):
    """By chance."""

    def __init__(self, seed: int) -> None:
        super().__init__({})
        self.draw = random.Random(seed)

    def on_prefill(self, workflow: Workflow, agent: str, **more: Any) -> Any:
        chance = self.draw.random()
        self.chances = {workflow.step.workflow_id: (chance, 1 - chance, 0.0)}
        return super().on_prefill(workflow, agent)


class Watched(Idling):
    """Looks after each step at what prefetch must never do."""

    def step(self) -> None:
        scheduler = self.scheduler
        waited = [
            r.request_id for queue in EnginePort(scheduler).waiting_queues for r in queue if not ours(r.request_id)
        ]
        decoded = [r.request_id for r in scheduler.running if not ours(r.request_id)]
        super().step()
        scheduled, _, preempted = self.log[-1]
        internal = [name for name, request in scheduler.requests.items() if ours(name) and not request.is_finished()]
        if waited:
            assert not internal
            assert not any(map(ours, scheduled))
        if decoded and scheduler.connector is None:
            assert not internal
        if decoded:  # a prompt that was loaded ends with one token
            assert all(tokens == 1 for name, tokens in scheduled.items() if ours(name))
        if scheduler.connector is None or scheduler.connector.takes == (0,):
            assert not (preempted and any(map(ours, scheduler.requests)))
        assert not any(map(ours, self.said))


def ours(name: str) -> bool:
    return name.startswith("presage-prefetch-")


def engine_of(folder: Path, ahead: bool, **more: Any) -> Watched:
    kind = type("Kind", (KnowsAsync if ahead else KnowsSync,), {"says": Chances(3), "clock": Clock()})
    said = {"prefetch": True, "time_to_live_s": 2.0, "starved_after": 5, "quantum": 3}
    return Watched(build(folder, kind, blocks=70, presage=said, **more), ahead)


def drawn(draw: random.Random, number: int) -> Request:
    """A step of one of a few workflows, each of which has a beginning of its own."""
    flow, tokens = draw.randrange(9), draw.choice([17, 64, 130, 300])
    prompt = [(flow * 37 + i) % 500 for i in range(tokens)] + [draw.randrange(500) for _ in range(draw.randrange(40))]
    sent = {"workflow_id": f"w{flow}", "workflow_type": "t", "agent": draw.choice(AGENTS)}
    if draw.random() < 0.05:
        sent["workflow_end"] = True
    return ask(f"r{number}", prompt, draw.randint(1, 24), arrival=float(number), **(sent if flow < 8 else {}))


def pressed(engine: Watched, requests: int, seed: int) -> dict[str, int]:
    """Bursts of random requests with pauses between them, some aborted; the length of each answer that is due."""
    draw, due, number = random.Random(seed), {}, 0
    while number < requests:
        for _ in range(draw.choice([1, 2, 9])):
            request = drawn(draw, number)
            due[request.request_id] = request.max_tokens
            engine.scheduler.add_request(request)
            number += 1
            for _ in range(draw.choice([0, 0, 1, 3])):
                engine.step()
        if draw.random() < 0.2:
            name = f"r{draw.randrange(number)}"
            if name not in engine.ended:
                engine.abort(name)
                due.pop(name, None)
        if draw.random() < 0.3:
            engine.scheduler.workflow_ended("t", f"w{draw.randrange(8)}")
        if draw.random() < 0.01 and engine.scheduler.connector is None:  # vLLM refuses it while anything loads
            engine.drain()
            engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        if draw.random() < 0.5:
            for _ in range(draw.randrange(40)):
                if engine.scheduler.has_requests():
                    engine.step()
        elif draw.random() < 0.5:
            engine.settle(3000)
    engine.settle(3000)
    return due


@pytest.mark.slow
@pytest.mark.parametrize(("ahead", "policy"), [(False, "priority"), (True, "fcfs")])
def test_every_request_is_answered_and_none_suffers(tmp_path: Path, ahead: bool, policy: str) -> None:
    engine = engine_of(tmp_path, ahead, policy=policy)
    answered(engine, pressed(engine, 1800, seed=1))
    assert sum(len(preempted) for *_, preempted in engine.log) > 20
    assert everything_is_free(engine.scheduler)
    assert not engine.scheduler.requests
    said = engine.scheduler.presage_status()
    assert said["on"] == {"priority": True, "eviction": True, "admission": True}
    assert not [reason for reason in said["counts"] if reason.endswith("Error")]
    done = said["prefetch"]
    assert done["on"]
    assert min(done["started"], done["used_tokens"], done["wasted_tokens"]) > 100
    assert ahead == (done["aborted"] > 0)
    assert engine.scheduler.debug_state()["priority keys"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(("ahead", "takes"), [(False, (0,)), (True, (0, 1, 5, 30))])
def test_with_a_tier_too(tmp_path: Path, ahead: bool, takes: tuple[int, ...]) -> None:
    engine = engine_of(tmp_path, ahead, connector=TIER)
    engine.scheduler.connector.takes = takes
    answered(engine, pressed(engine, 1200, seed=2))
    assert sum(len(preempted) for *_, preempted in engine.log) > 5
    assert everything_is_free(engine.scheduler)
    assert not engine.scheduler.requests
    assert sum(blocks for name, blocks in engine.scheduler.connector.loaded.items() if ours(name)) > 100
    said = engine.scheduler.presage_status()
    assert not [reason for reason in said["counts"] if reason.endswith("Error")]
    assert min(said["prefetch"][what] for what in ("started", "aborted", "used_tokens")) > 5


@pytest.mark.parametrize(
    ("kind", "method", "after", "ahead"),
    [
        (Habits, "arrives", 15, True),
        (Habits, "next_prompt", 5, False),
        (LastConversations, "keep", 15, True),
        (LastConversations, "end", 5, False),
        (CachedConversation, "hashes", 5, True),
        (Pace, "scheduled", 50, False),
        (Pace, "done", 50, True),
        (Yield, "add", 2, False),
        (Prefetcher, "_start", 3, True),
        (Prefetcher, "_begin", 2, False),
        (Prefetcher, "_may_run", 50, True),
        (Prefetcher, "_to_abort", 60, True),
    ],
)
def test_a_prefetch_that_fails_is_off_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Any], method: str, after: int, ahead: bool
) -> None:
    breaks(monkeypatch, kind, method, after)
    engine = engine_of(tmp_path, ahead)
    answered(engine, pressed(engine, 150, seed=4))
    assert not status(engine)["on"]
    assert not engine.scheduler.requests
    assert everything_is_free(engine.scheduler)
    said = engine.scheduler.presage_status()
    assert said["on"] == {"priority": True, "eviction": True, "admission": True}
    assert said["counts"]["prefetch: RuntimeError"] == 1
    assert SECRET not in str(said)
