"""Random requests, random metadata, aborts and preemptions: every request is answered, every block accounted for."""

import random
from pathlib import Path
from typing import Any

import pytest
from vllm_samples import AsyncScheduler, Engine, Request, Scheduler, ask, build, everything_is_free, token

from presage.serving_hooks.forecasting.forecasts import Forecasts
from presage.serving_hooks.vllm.config import PresageConfig
from presage.serving_hooks.vllm.scheduler import SyncWorkflowScheduler, WorkflowScheduler
from presage.testing.forecasts import AGENTS, Noise

pytestmark = pytest.mark.vllm
OFF = {"priority": False, "eviction": False, "admission": False}


class Clock:
    """Goes on with each look: what expires, and so who is preempted, does not depend on the machine's speed."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


class Guessing:
    def forecasts(self, config: PresageConfig) -> Forecasts:
        noise = Noise(0)
        return Forecasts(noise, noise, {"review": 50.0})


class GuessingSync(Guessing, SyncWorkflowScheduler):
    pass


class GuessingAsync(Guessing, WorkflowScheduler):
    pass


def sent_by(draw: random.Random) -> dict[str, Any]:
    """Metadata of all kinds, sound and unsound."""
    kind = draw.random()
    if kind < 0.25:
        return {}
    if kind < 0.3:
        return {"workflow_id": draw.choice([[], -1.5, "x\n", "y" * 999, None]), "agent": draw.choice([1, None, {}])}
    return {
        "workflow_type": draw.choice(["review", "search"]),
        "workflow_id": f"w{draw.randrange(60)}",
        "agent": draw.choice([*AGENTS, "stranger"]),
        "workflow_end": draw.random() < 0.1,
    }


def drawn(draw: random.Random, number: int) -> Request:
    """A prompt begins with one of a few beginnings, so that requests share blocks."""
    start, tokens = draw.randrange(12), draw.choice([1, 17, 64, 130, 300])
    prompt = [(start * 37 + i) % 500 for i in range(tokens)] + [draw.randrange(500) for _ in range(draw.randrange(20))]
    priority = draw.randrange(-2, 3)
    return ask(f"r{number}", prompt, draw.randint(1, 12), arrival=number / 10, priority=priority, **sent_by(draw))


def pressed(engine: Engine, requests: int, seed: int, first: int = 0) -> dict[str, int]:
    """Serves so many random requests, aborts some; the length of each answer that is due."""
    draw, due, number = random.Random(seed), {}, first
    while number < first + requests:
        for _ in range(draw.choice([0, 0, 1, 2, 6])):
            request = drawn(draw, number)
            due[request.request_id] = request.max_tokens
            engine.scheduler.add_request(request)
            number += 1
        engine.step()
        if number > first and draw.random() < 0.1:
            name = f"r{draw.randrange(first, number)}"
            if name not in engine.ended:
                engine.abort(name)
                due.pop(name, None)
        if draw.random() < 0.002:
            engine.drain()
            engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.run()
    return due


def answered(engine: Engine, due: dict[str, int]) -> None:
    for name, tokens in due.items():
        assert engine.said[name] == [token(name)] * tokens
    assert len(engine.ended) == len(set(engine.ended))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "ahead", "policy"), [(GuessingSync, False, "fcfs"), (GuessingAsync, True, "priority")]
)
def test_every_request_is_answered_and_every_block_accounted_for(
    tmp_path: Path, kind: type[Any], ahead: bool, policy: str
) -> None:
    said = {"starved_after": 5, "quantum": 3, "time_to_live_s": 0.05}
    timed = type(kind.__name__, (kind,), {"clock": Clock()})
    engine = Engine(build(tmp_path, timed, blocks=70, presage=said, policy=policy), ahead)
    answered(engine, pressed(engine, 1200, seed=1))
    assert sum(len(preempted) for *_, preempted in engine.log) > 15
    assert everything_is_free(engine.scheduler)
    status = engine.scheduler.presage_status()
    assert status["on"] == {"priority": True, "eviction": True, "admission": True}
    assert status["ended"]["expired"] > 0
    assert not [reason for reason in status["counts"] if reason.endswith("Error")]
    left = engine.scheduler
    assert not left.requests
    assert not left.debug_state()["requests"]
    assert left.debug_state()["priority keys"] == 0


def there_was_something_to_decide(log: list[Any]) -> None:
    """Prompts were found in part, were lost in part, and requests were preempted."""
    hits = log[-1][1]
    assert sum(1 for tokens in hits.values() if tokens) > 20
    assert sum(1 for tokens in hits.values() if not tokens) > 20
    assert any(preempted for *_, preempted in log)


@pytest.mark.parametrize(
    ("stock", "ours", "ahead", "policy"),
    [(Scheduler, SyncWorkflowScheduler, False, "priority"), (AsyncScheduler, WorkflowScheduler, True, "fcfs")],
)
def test_with_everything_off_each_step_is_vllms_own(
    tmp_path: Path, stock: type[Any], ours: type[Any], ahead: bool, policy: str
) -> None:
    logs = []
    for kind, presage in ((stock, None), (ours, OFF)):
        engine = Engine(build(tmp_path, kind, blocks=70, presage=presage, policy=policy), ahead)
        answered(engine, pressed(engine, 300, seed=2))
        logs.append(engine.log)
    assert logs[0] == logs[1]
    there_was_something_to_decide(logs[0])


@pytest.mark.parametrize(("kind", "ahead"), [(SyncWorkflowScheduler, False), (WorkflowScheduler, True)])
def test_requests_without_workflows_are_evicted_as_vllm_evicts_them(
    tmp_path: Path, kind: type[Any], ahead: bool
) -> None:
    logs = []
    for presage in (OFF, {"priority": False, "infer_workflows": False}):
        engine = Engine(build(tmp_path, kind, blocks=70, presage=presage), ahead)
        draw = random.Random(3)
        for number in range(300):
            request = drawn(draw, number)
            engine.scheduler.add_request(ask(f"r{number}", list(request.prompt_token_ids), 3 * request.max_tokens))
            for _ in range(draw.choice([0, 0, 0, 4])):
                engine.step()
        engine.run()
        assert everything_is_free(engine.scheduler)
        logs.append(engine.log)
    assert logs[0] == logs[1]
    there_was_something_to_decide(logs[0])


def test_a_request_that_resumes_has_not_begun_again_whichever_way_vllm_lists_it(tmp_path: Path) -> None:
    counts, logs = [], []
    for second_runner in (False, True):  # which lists it among the new ones
        # Waits are bounded in real seconds, and hashes of prompts have a random key: both differ from run to run.
        presage = {"objectives": {"factor": 1e6}, "infer_workflows": False}
        scheduler = build(tmp_path, GuessingSync, blocks=70, presage=presage)
        scheduler.use_v2_model_runner = second_runner
        engine = Engine(scheduler)
        pressed(engine, 400, 3)
        logs.append(any(preempted for _, _, preempted in engine.log))
        counts.append(scheduler.presage_status()["counts"])
    assert logs == [True, True]
    assert counts[0] == counts[1]
