"""vLLM's own scheduler in virtual time: quick and step by step decide alike, and figures are what they must be."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from replay_samples import chain
from vllm_samples import everything_is_free

from presage.errors import TraceError
from presage.replay import vllm_scheduler
from presage.replay.engine import EngineLoop, Evictions, ReplayEngine
from presage.replay.forecasts import source
from presage.replay.metrics import PolicyRun, VirtualClock
from presage.replay.policies import POLICIES, Policy, crossed
from presage.replay.prompts import HASH_BYTES, PromptIds
from presage.replay.runs import Setting, result, run_all, run_one
from presage.replay.vllm_scheduler import scheduler_class
from presage.replay.workload import (
    STAGGER_S,
    Arrivals,
    PromptConvention,
    RecordedRequest,
    ReplayJob,
    assemble,
    check_fits,
    schedule,
)
from presage.serving_hooks.engine_file import Cost, EngineFile
from presage.serving_hooks.vllm.engine import EnginePort

pytestmark = [pytest.mark.vllm, pytest.mark.one_version]

HISTORY, OWN = (
    PromptConvention(opening_tokens=40, closing_tokens=10),
    PromptConvention("own-conversation", opening_tokens=40),
)
COST = {"source": "a test", "iteration_s": 0.01, "prefill_token_s": 1e-4, "decode_token_s": 1e-4}


def engine(tokens: int, **more: Any) -> EngineFile:
    given = {"most_requests": 8, "most_tokens": 128, "cost": {**COST, "context_token_s": 1e-7}}
    return EngineFile.model_validate({"cache_tokens": tokens, **given, **more})


def jobs(convention: PromptConvention, many: int = 14) -> tuple[ReplayJob, ...]:
    agents = ("pqrqrs", "pqrs", "pqrqrqrs")
    return tuple(
        chain(n, agents[n % 3], convention, new=37 + 13 * (n % 5), output=9 + 17 * (n % 4), pause_s=0.3 * (n % 3))
        for n in range(many)
    )


def without_switches(presage: dict[str, Any] | None, *names: str) -> dict[str, Any] | None:
    """Settings of the hooks with their own defaults for these switches."""
    return None if presage is None else {name: on for name, on in presage.items() if name not in names}


def play(
    convention: PromptConvention,
    policy: Policy,
    machine: EngineFile,
    *,
    quick: bool = True,
    forecasts: str | None = "oracle",
    arrivals: Arrivals | None = None,
    folder: Path,
    of: tuple[ReplayJob, ...] | None = None,
    seed: int = 0,
    counted: bool = False,
) -> tuple[PolicyRun, Any]:
    played, clock = of or jobs(convention), VirtualClock()
    foretells = source(forecasts)(played, clock) if forecasts else None
    longest = max(step.prompt_tokens + step.output_tokens for job in played for step in job.steps)
    scheduler = vllm_scheduler.make_scheduler(
        scheduler_class(policy, foretells, clock, quick),
        machine,
        longest,
        without_switches(policy.presage(), "admission", "prefetch"),
        folder,
    )
    prompts, watchers = PromptIds(played, convention), []
    if counted:
        prompts.hash_all(machine.block_tokens, vllm_scheduler.block_hash)
        watchers.append(Evictions(played, prompts))
        EnginePort(scheduler).on_reuse(watchers[0].gives_up)
    run = ReplayEngine(
        played,
        prompts,
        schedule(arrivals or Arrivals(concurrency=9), played, seed),
        [EngineLoop(scheduler, machine.cost, machine.block_tokens, clock)],
        watchers=watchers,
    ).play()
    run.evicted = watchers[0].counts if counted else {}
    return run, scheduler


class Ageing(Policy):
    """Priority with so short a patience that requests change places all the time."""

    def presage(self) -> dict[str, Any] | None:
        return {"priority": True, "eviction": True, "starved_after": 3, "quantum": 2}


AGEING = Ageing("ageing", frozenset({"priority", "eviction"}), "asked")


@pytest.mark.parametrize(
    ("convention", "policy", "tokens"),
    [
        (HISTORY, POLICIES["stock"], 1400),
        (OWN, POLICIES["stock"], 2400),
        (OWN, POLICIES["lifecycle"], 1400),
        (HISTORY, POLICIES["lifecycle"], 12000),
        (OWN, POLICIES["oracle"], 2400),
        (HISTORY, POLICIES["oracle"], 1400),
        (OWN, AGEING, 1400),
        (HISTORY, AGEING, 2400),
    ],
)
def test_quick_is_step_by_step(convention: PromptConvention, policy: Policy, tokens: int, tmp_path: Path) -> None:
    forecasts = "oracle" if policy.forecasts else None
    quick, one = play(convention, policy, engine(tokens), forecasts=forecasts, folder=tmp_path)
    slow, other = play(convention, policy, engine(tokens), forecasts=forecasts, folder=tmp_path, quick=False)
    assert quick.fast_iterations > quick.iterations / 10
    assert slow.fast_iterations == 0
    quick.fast_iterations = 0
    assert quick == slow
    pools = [s.kv_cache_manager.block_pool for s in (one, other)]
    held = [[b.block_hash and b.block_hash[:HASH_BYTES] for b in pool.blocks] for pool in pools]
    assert held[0] == held[1]
    assert everything_is_free(one)


def forked(seed: int, many: int = 16) -> tuple[ReplayJob, ...]:
    """Workflows of every shape: steps wait for one or two of those before, sizes and pauses are drawn."""
    rng = random.Random(seed)
    drawn = []
    for number in range(many):
        asked = [
            RecordedRequest(
                rng.choice("pqr"),
                rng.randint(5, 260),
                rng.randint(1, 40),
                tuple(sorted(set(rng.choices(range(step), k=rng.randint(1, 2))))) if step else (),
                rng.choice([0.0, rng.expovariate(4.0)]),
            )
            for step in range(rng.randint(1, 7))
        ]
        drawn.append(ReplayJob("t", f"w{number}", assemble(asked, OWN)))
    return tuple(drawn)


@pytest.mark.parametrize(
    ("policy", "block_tokens", "seed"),
    [
        (POLICIES["stock"], 1, 0),
        (POLICIES["oracle"], 4, 1),
        (AGEING, 1, 2),
        (POLICIES["stock"], 16, 3),
        (POLICIES["oracle"], 16, 4),
        (AGEING, 16, 5),
    ],
)
def test_quick_is_step_by_step_for_forks_and_blocks_of_any_size(
    policy: Policy, block_tokens: int, seed: int, tmp_path: Path
) -> None:
    machine, of = engine(900, block_tokens=block_tokens, most_requests=5), forked(seed)
    runs = [
        play(OWN, policy, machine, folder=tmp_path, of=of, seed=seed, quick=quick, counted=True)[0]
        for quick in (True, False)
    ]
    assert runs[0].fast_iterations > 0
    runs[0].fast_iterations = 0
    assert runs[0] == runs[1]


@pytest.mark.parametrize("name", ["lifecycle", "oracle"])
@pytest.mark.parametrize("convention", [HISTORY, OWN], ids=["history", "own"])
def test_evictions_are_counted_as_serving_counts_them(name: str, convention: PromptConvention, tmp_path: Path) -> None:
    run, scheduler = play(convention, POLICIES[name], engine(2400), folder=tmp_path, counted=True)
    serving = scheduler.presage_status()["evicted"]
    active = sum(serving[kind] for kind in ("unowned", "unknown", "forecast"))
    assert run.evicted == {"blank": serving["blank"], "retired": serving["retired"], "active": active}
    assert all(run.evicted.values())


def compared(convention: PromptConvention, machine: EngineFile, many: int = 14) -> Setting:
    played = jobs(convention, many)
    return Setting(played, convention, Arrivals(9), machine, "noise:0.3")


POLICIES_OF_REPLAY = [
    POLICIES["belady"],
    POLICIES["next-use"],
    POLICIES["oracle"],
    POLICIES["full"],
    replace(POLICIES["best-fixed"], at_once=4),
    *crossed([POLICIES["stock"], POLICIES["lifecycle"]], "sjf,stjf,stjf-oracle"),
]


@pytest.mark.parametrize("policy", POLICIES_OF_REPLAY, ids=[policy.name for policy in POLICIES_OF_REPLAY])
def test_every_policy_is_quick_and_step_by_step_alike(policy: Policy) -> None:
    setting = compared(OWN, engine(1400))
    prompts = PromptIds(setting.jobs, OWN)
    quick, slow = (run_one(setting, policy, 1, quick, prompts) for quick in (True, False))
    assert quick == slow
    assert quick.off == ()
    if policy.name == "oracle":
        assert quick == run_one(setting, policy, 1), "hashes of before make no difference"


@pytest.mark.parametrize(("name", "block_tokens"), [("stock", 16), ("lifecycle", 64), ("oracle", 16), ("belady", 64)])
def test_recorded_prompts_that_branch_are_quick_and_step_by_step_alike(name: str, block_tokens: int) -> None:
    asked = [
        RecordedRequest("p", 200, 12, (), 0.0, [[1, 3]]),
        RecordedRequest("q", 330, 30, (0,), 0.2, [[1, 3], [10, 11]]),
        RecordedRequest("r", 400, 9, (0,), 0.0, [[1, 3], [10, 12]]),  # repeats a prompt that may still be computed
        RecordedRequest("p", 300, 20, (1, 2), 0.5, [[1, 2], [20, 21]]),
        RecordedRequest("p", 420, 70, (3,), 0.1, [[1, 2], [20, 23]]),
        RecordedRequest("p", 500, 5, (4,), 0.1, [[1, 2], [20, 23], [30, 30]]),
    ]
    steps = assemble(asked, PromptConvention())
    of = tuple(ReplayJob("t", f"w{number}", steps) for number in range(14))
    machine = engine(1500, block_tokens=block_tokens)
    setting = Setting(of, PromptConvention(), Arrivals(concurrency=14), machine, "oracle")
    quick, slow = (run_one(setting, POLICIES[name], 1, quick) for quick in (True, False))
    assert quick == slow
    assert 0 < quick.figures["hit_rate"] < quick.figures["reusable_share"]


def test_a_limit_is_kept_and_waiting_counts_from_arrival() -> None:
    setting = compared(HISTORY, engine(10**5), many=20)
    free = run_one(setting, POLICIES["oracle"], 0).figures
    limited = run_one(setting, replace(POLICIES["best-fixed"], at_once=1), 0).figures
    alone = run_one(replace(setting, arrivals=Arrivals(1)), POLICIES["oracle"], 0).figures
    # One after the other either way; but with a limit the others have come and wait.
    assert limited["makespan_s"] == pytest.approx(alone["makespan_s"], abs=STAGGER_S)
    assert limited["completion_mean_s"] > 3 * alone["completion_mean_s"]
    assert limited["longest_wait_s"] > alone["completion_mean_s"] > 10 * free["longest_wait_s"]


def test_the_best_fixed_number_is_found_and_every_seed_runs_with_it() -> None:
    setting = compared(OWN, engine(1600))
    done, interrupted = run_all(setting, [POLICIES["best-fixed"], POLICIES["oracle"]], (0, 1), processes=1)
    assert not interrupted
    assert [(one.policy, one.seed) for one in done] == [
        ("best-fixed", 0),
        ("best-fixed", 1),
        ("oracle", 0),
        ("oracle", 1),
    ]
    fixed = [one for one in done if one.policy == "best-fixed"]
    assert len({one.at_once for one in fixed}) == 1
    assert result(done)["best-fixed"]["at_once"] == fixed[0].at_once


def test_orders_of_the_queue_differ() -> None:
    crowded = EngineFile.model_validate(
        {"cache_tokens": 64000, "most_requests": 2, "most_tokens": 128, "cost": {**COST, "context_token_s": 1e-7}}
    )
    setting = replace(compared(OWN, crowded, many=40), arrivals=Arrivals(30))
    waits = {
        policy.name: run_one(setting, policy, 0).figures["queueing_mean_s"]
        for policy in crossed([POLICIES["stock"]], "fcfs,stjf,stjf-oracle")
    }
    assert len(set(waits.values())) == 3


def test_preempted_requests_are_among_what_was_compared(tmp_path: Path) -> None:
    assert play(HISTORY, POLICIES["stock"], engine(1400), forecasts=None, folder=tmp_path)[0].preemptions > 0


def test_quick_is_step_by_step_at_random_arrivals_and_without_chunks(tmp_path: Path) -> None:
    machine = engine(2400, chunked_prefill=False)
    for policy in (POLICIES["stock"], AGEING):
        runs = [
            play(OWN, policy, machine, arrivals=Arrivals(rate=3.0, cv=2.0), folder=tmp_path, quick=quick)[0]
            for quick in (True, False)
        ]
        runs[0].fast_iterations = 0
        assert runs[0] == runs[1]


def test_one_request_takes_what_the_cost_model_says(tmp_path: Path) -> None:
    machine = engine(1600)
    alone = (ReplayJob("t", "w", assemble([RecordedRequest("p", 200, 3, (), 0.0)], PromptConvention())),)
    run, _ = play(PromptConvention(), POLICIES["stock"], machine, forecasts=None, folder=tmp_path, of=alone)
    cost: Cost = machine.cost
    # Two chunks, 128 and 72 tokens, then two tokens one at a time.
    steps = [cost.seconds(128, 0, 128), cost.seconds(72, 0, 200), cost.seconds(0, 1, 201), cost.seconds(0, 1, 202)]
    assert run.completions_s == [pytest.approx(sum(steps))]
    assert run.asked[0].first_token_s == pytest.approx(run.asked[0].came_s + sum(steps[:2]))
    assert (run.iterations, run.prefilled_tokens, run.output_tokens) == (4, 200, 3)


def test_in_an_endless_cache_every_repeated_block_is_found(tmp_path: Path) -> None:
    for convention in (HISTORY, OWN):
        run, _ = play(convention, POLICIES["stock"], engine(10**6), forecasts=None, folder=tmp_path)
        of = jobs(convention)
        later = [one for one in run.asked if of[one.job].steps[one.step].continues is not None]
        assert len(later) > 20
        assert all(one.hit_tokens == one.again_tokens > 0 for one in later)
        assert run.preemptions == 0


def test_a_join_waits_for_all_its_parents_and_a_pause_for_its_time(tmp_path: Path) -> None:
    asked = [
        RecordedRequest("p", 50, 5, (), 0.0),
        RecordedRequest("q", 80, 5, (0,), 1.0),
        RecordedRequest("r", 80, 60, (0,), 0.0),
        RecordedRequest("s", 200, 5, (1, 2), 0.25),
    ]
    forked = (ReplayJob("t", "w", assemble(asked, PromptConvention())),)
    run, _ = play(PromptConvention(), POLICIES["stock"], engine(2000), forecasts=None, folder=tmp_path, of=forked)
    by_step = {one.step: one for one in run.asked}
    assert by_step[1].came_s == pytest.approx(by_step[0].ended_s + 1.0)
    assert by_step[2].came_s == by_step[0].ended_s
    assert by_step[3].came_s == pytest.approx(max(by_step[1].ended_s, by_step[2].ended_s) + 0.25)
    assert by_step[3].hit_tokens >= 128  # of the longest branch, 140 tokens


def test_a_request_larger_than_the_cache_is_refused_before_anything_runs() -> None:
    with pytest.raises(TraceError, match="'w2': one of its requests has"):
        check_fits(jobs(HISTORY), engine(700))


def setting(forecasts: str = "counts") -> Setting:
    return Setting(jobs(OWN), OWN, Arrivals(concurrency=9), engine(1400), forecasts)


def test_the_same_seed_gives_the_same_figures_whoever_runs_it() -> None:
    policies = [POLICIES["stock"], POLICIES["next-use"]]
    here, _ = run_all(setting(), policies, range(2), processes=1)
    assert here == run_all(setting(), policies, range(2), processes=1)[0]
    assert [(one.policy, one.seed) for one in here] == [(p.name, s) for p in policies for s in range(2)]
    assert here[0].figures != here[1].figures
    assert here[2].forecasts["back-off"] > 0
    assert not any(one.off for one in here)


@pytest.mark.slow
def test_processes_side_by_side_do_the_same() -> None:
    assert run_all(setting(), [POLICIES["oracle"]], range(2), 2) == run_all(
        setting(), [POLICIES["oracle"]], range(2), 1
    )
