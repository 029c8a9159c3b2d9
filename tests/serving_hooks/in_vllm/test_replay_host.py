"""The host behind the GPU's cache: what was given up there comes back at the time that the way takes."""

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; these tests run its own scheduler")

from replay_samples import chain

from presage.replay import vllm_scheduler
from presage.replay.metrics import PolicyRun
from presage.replay.policies import POLICIES, Policy, crossed
from presage.replay.prompts import HASH_BYTES
from presage.replay.runs import Setting, run_one
from presage.replay.workload import Arrivals, PromptConvention, RecordedRequest, ReplayJob, assemble
from presage.serving_hooks.engine_file import EngineFile

pytestmark = [pytest.mark.vllm, pytest.mark.one_version]

OWN, HISTORY = (
    PromptConvention("own-conversation", opening_tokens=40),
    PromptConvention(opening_tokens=40, closing_tokens=10),
)
COST = {"source": "a test", "iteration_s": 0.01, "prefill_token_s": 1e-4, "decode_token_s": 1e-4}


def engine(tokens: int, host: int, **more: Any) -> EngineFile:
    cost = {**COST, "context_token_s": 1e-7, "host_token_s": 2e-5}
    given = {"cache_tokens": tokens, "host_cache_tokens": host, "most_requests": 8, "most_tokens": 128, "cost": cost}
    return EngineFile.model_validate({**given, **more})


def jobs(convention: PromptConvention, many: int = 14) -> tuple[ReplayJob, ...]:
    agents = ("pqrqrs", "pqrs", "pqrqrqrs")
    return tuple(
        chain(n, agents[n % 3], convention, new=37 + 13 * (n % 5), output=9 + 17 * (n % 4), pause_s=0.3 * (n % 3))
        for n in range(many)
    )


def setting(convention: PromptConvention, machine: EngineFile) -> Setting:
    return Setting(jobs(convention), convention, Arrivals(9), machine, "oracle")


def played(of: Setting, policy: Policy, quick: bool = True, seed: int = 0) -> tuple[PolicyRun, Any]:
    """A run, and its scheduler."""
    runs, schedulers, made = [], [], vllm_scheduler.make_scheduler

    def kept(*args: Any) -> Any:
        schedulers.append(made(*args))
        return schedulers[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_scheduler, "make_scheduler", kept)
        done = run_one(of, policy, seed, quick, on_run=runs.append)
    assert done.off == ()
    return runs[0], schedulers[0]


def apart() -> tuple[ReplayJob, ...]:
    """p's conversation is given up for q's, which needs the whole cache of 512 tokens, and goes on then."""
    asked = [
        RecordedRequest("p", 160, 4, (), 0.0),
        RecordedRequest("q", 480, 4, (0,), 0.0),
        RecordedRequest("p", 200, 3, (1,), 0.0),
    ]
    return (ReplayJob("t", "w", assemble(asked, PromptConvention("own-conversation"))),)


@pytest.mark.parametrize(
    ("host", "loaded", "steps"),
    [
        (0, 0, [(128, 0, 128, 0), (72, 0, 200, 0)]),
        (16 * 64, 160, [(40, 0, 200, 160)]),
        # q has filled 30 blocks since, so the first 5 of p's 10 are left.
        (16 * 35, 80, [(120, 0, 200, 80)]),
        (16 * 30, 0, [(128, 0, 128, 0), (72, 0, 200, 0)]),
    ],
)
def test_what_was_given_up_comes_back_at_the_time_of_the_way(
    host: int, loaded: int, steps: list[tuple[int, int, int, int]]
) -> None:
    machine = engine(512, host)
    of = Setting(apart(), PromptConvention("own-conversation"), Arrivals(1), machine, "oracle")
    run, _ = played(of, POLICIES["stock"])
    last = next(one for one in run.asked if one.step == 2)
    took = [machine.cost.seconds(*step) for step in (*steps, (0, 1, 201), (0, 1, 202))]
    assert (last.hit_tokens, last.host_tokens) == (loaded, loaded)
    assert last.ended_s - last.came_s == pytest.approx(sum(took))
    assert last.first_token_s - last.came_s == pytest.approx(sum(took[: len(steps)]))
    assert run.loaded_tokens == (loaded if host else None)
    if host == 16 * 64:
        assert took[0] == pytest.approx(0.01 + 0.004 + 0.00002 + 0.0032)


def test_what_the_gpu_still_has_is_not_loaded() -> None:
    of = Setting(apart(), PromptConvention("own-conversation"), Arrivals(1), engine(16000, 16000), "oracle")
    run, _ = played(of, POLICIES["stock"])
    last = next(one for one in run.asked if one.step == 2)
    assert (last.hit_tokens, last.host_tokens, run.loaded_tokens) == (160, 0, 0)


FULL = POLICIES["full"]
ALIKE = [
    *(POLICIES[name] for name in ("stock", "lifecycle", "oracle", "belady")),
    FULL,
    *crossed([POLICIES["lifecycle"]], "stjf-oracle"),
]


@pytest.mark.parametrize("convention", [HISTORY, OWN], ids=["history", "own"])
@pytest.mark.parametrize("policy", ALIKE, ids=lambda policy: policy.name)
@pytest.mark.parametrize(("tokens", "host"), [(1400, 2000), (2400, 8000)])
def test_quick_is_step_by_step_with_a_host(
    convention: PromptConvention, policy: Policy, tokens: int, host: int
) -> None:
    of = setting(convention, engine(tokens, host))
    (quick, one), (slow, other) = (played(of, policy, alike) for alike in (True, False))
    assert quick.fast_iterations > quick.iterations / 10
    assert quick.loaded_tokens or tokens == 2400
    quick.fast_iterations = 0
    assert quick == slow
    assert list(one.connector.host) == list(other.connector.host)  # in their order
    pools = [scheduler.kv_cache_manager.block_pool for scheduler in (one, other)]
    held = [[block.block_hash and block.block_hash[:HASH_BYTES] for block in pool.blocks] for pool in pools]
    assert held[0] == held[1]


def test_quick_is_step_by_step_with_a_host_and_without_chunks() -> None:
    machine = engine(1400, 2000, chunked_prefill=False, block_tokens=4)
    of = replace(setting(OWN, machine), arrivals=Arrivals(rate=3.0, cv=2.0))
    quick, slow = (played(of, POLICIES["lifecycle"], alike)[0] for alike in (True, False))
    assert quick.fast_iterations
    quick.fast_iterations = 0
    assert quick == slow


@pytest.mark.parametrize("convention", [HISTORY, OWN], ids=["history", "own"])
def test_an_endless_host_has_what_an_endless_cache_would_have(convention: PromptConvention) -> None:
    of = setting(convention, engine(1400, 10**6))
    run, scheduler = played(of, POLICIES["lifecycle"])
    later = [one for one in run.asked if of.jobs[one.job].steps[one.step].continues is not None]
    assert all(one.hit_tokens == one.again_tokens > 0 for one in later)
    host = sum(one.host_tokens for one in run.asked)
    counted = scheduler.presage_status()["prompts"]  # from vLLM's own account
    assert counted["external_tokens"] == host > 0
    assert counted["local_tokens"] == sum(one.hit_tokens for one in run.asked) - host
    if run.preemptions:
        assert run.loaded_tokens > host  # those preempted come back from there too
    else:
        assert run.loaded_tokens == host


def test_without_a_host_nothing_is_as_it_would_be_with_one() -> None:
    without = run_one(setting(OWN, engine(1400, 0)), POLICIES["oracle"], 0)
    never = engine(1400, 0).model_dump(exclude={"host_cache_tokens": True, "cost": {"host_token_s"}})
    assert without == run_one(setting(OWN, EngineFile.model_validate(never)), POLICIES["oracle"], 0)
    assert not {"hit_tokens_gpu", "hit_tokens_host", "loaded_tokens"} & without.figures.keys()
    assert played(setting(OWN, engine(1400, 0)), POLICIES["stock"])[1].connector is None


def test_figures_tell_the_tiers_apart() -> None:
    of = setting(OWN, engine(1400, 8000))
    with_host = run_one(of, POLICIES["stock"], 0).figures
    assert with_host["hit_tokens"] == with_host["hit_tokens_gpu"] + with_host["hit_tokens_host"]
    assert with_host["hit_tokens_gpu"] > 0
    assert with_host["hit_tokens_host"] > 0
