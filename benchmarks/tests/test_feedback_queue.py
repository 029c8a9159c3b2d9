"""The multilevel feedback queue over vLLM's own scheduler: short requests pass long ones, and all are served."""

from dataclasses import replace

import pytest
from mlfq import MLFQ, QUANTUM

from presage.serving_hooks.replay.engine_file import Cost, EngineFile
from presage.serving_hooks.replay.metrics import PolicyRun
from presage.serving_hooks.replay.policies import POLICIES
from presage.serving_hooks.replay.runs import Setting, run_one
from presage.serving_hooks.replay.workload import Arrivals, PromptConvention, RecordedRequest, ReplayJob, assemble

pytestmark = [pytest.mark.vllm, pytest.mark.one_version]

CONVENTION = PromptConvention("history-first")
COST = Cost(source="a test", iteration_s=0.01, prefill_token_s=1e-4, decode_token_s=0.0, context_token_s=0.0)
LONG, SHORT = 6 * QUANTUM, 10


def job(name: str, output: int, arrives_s: float) -> ReplayJob:
    steps = assemble([RecordedRequest("a", 100, output, (), 0.0)], CONVENTION)
    return ReplayJob("t", name, steps, arrives_s)


JOBS = (*(job(f"long-{n}", LONG, 0.0) for n in range(2)), *(job(f"short-{n}", SHORT, 3.0 + n) for n in range(4)))


def setting(cache_tokens: int = 8000) -> Setting:
    engine = EngineFile(cache_tokens=cache_tokens, most_requests=2, cost=COST)
    return Setting(JOBS, CONVENTION, Arrivals(as_recorded=True), engine, "oracle")


def test_a_short_request_takes_the_place_of_a_long_one_that_has_fallen() -> None:
    queues, first_come = list[PolicyRun](), list[PolicyRun]()
    done = run_one(setting(), MLFQ, 0, on_run=queues.append)
    run_one(setting(), POLICIES["stock"], 0, on_run=first_come.append)
    assert done.off == ()
    assert done.figures["preemptions"] > 0
    took = {one.job: (one.ended_s or 0.0) - one.came_s for one in queues[0].asked}
    assert took.keys() == set(range(len(JOBS)))
    assert max(took[n] for n in range(2, 6)) < 5 * SHORT * COST.iteration_s
    assert min((one.began_s or 0.0) - one.came_s for one in first_come[0].asked if one.job > 1) > 1.0


def test_what_was_computed_before_a_preemption_is_found_again() -> None:
    figures = run_one(setting(), MLFQ, 0).figures
    assert figures["recomputed_tokens"] < figures["preemptions"] * 2 * 16 + 16


def test_the_fast_path_takes_the_same_decisions() -> None:
    many = replace(setting(2000), jobs=tuple(job(f"{n}", 20 + 90 * (n % 5), 0.4 * n) for n in range(40)))
    fast, slow = (run_one(many, MLFQ, 0, fast_path=fast).figures for fast in (True, False))
    assert fast["preemptions"] == slow["preemptions"] > 10
    assert fast == pytest.approx(slow, rel=1e-9)
