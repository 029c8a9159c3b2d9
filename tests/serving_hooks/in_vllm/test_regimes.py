"""One small workload of each regime, replayed: thrashing, long pauses, and a cache that holds everything.

Virtual time, so the figures are the same on every machine; how much is gained at full size: benchmarks/regimes.py.
"""

import random

import pytest

from presage.replay.metrics import Figures
from presage.replay.policies import POLICIES
from presage.replay.runs import Setting, run_one
from presage.replay.verdict import verdict
from presage.replay.workload import Arrivals, PromptConvention, RecordedRequest, ReplayJob, assemble
from presage.serving_hooks.engine_file import Cost, EngineFile

pytestmark = [pytest.mark.vllm, pytest.mark.one_version]

CONVENTION = PromptConvention("own-conversation", opening_tokens=512)
COST = Cost(
    source="a test", iteration_s=0.01, prefill_token_s=1e-4, decode_token_s=1e-4, context_token_s=0.0,
    attention_pair_s=1e-9,
)  # fmt: skip


def sessions(count: int, long_pauses: float = 0.0) -> tuple[ReplayJob, ...]:
    """Conversations of 16 steps that grow to some 12,000 tokens; a share of the pauses takes minutes, the rest 2 s."""
    rng, jobs = random.Random(0), []
    for number in range(count):
        said, asked = 512, []
        for step in range(16):
            new, output = rng.randint(400, 1000), rng.randint(40, 80)
            pause_s = rng.expovariate(1 / 200.0) if rng.random() < long_pauses else rng.expovariate(1 / 2.0)
            parents = ((step - 1,), pause_s) if step else ((), 0.0)
            asked.append(RecordedRequest("coder", said + new, output, *parents))
            said += new + output
        jobs.append(ReplayJob("sessions", str(number), assemble(asked, CONVENTION)))
    return tuple(jobs)


def replayed(jobs: tuple[ReplayJob, ...], cache_tokens: int, at_once: int) -> dict[str, Figures]:
    """Figures of vLLM alone and of all policies with online counts."""
    engine = EngineFile(cache_tokens=cache_tokens, block_tokens=64, most_requests=64, most_tokens=4096, cost=COST)
    setting = Setting(jobs, CONVENTION, Arrivals(at_once), engine, "counts")
    return {name: run_one(setting, POLICIES[name], 0).figures for name in ("stock", "full")}


def regime(found: dict[str, Figures]) -> str:
    name = verdict({policy: {0: figures} for policy, figures in found.items()}, (), 64, 12_000)["regime"]["name"]
    assert isinstance(name, str)
    return name


def test_where_vllm_thrashes_new_workflows_wait_and_the_cache_serves_the_others() -> None:
    found = replayed(sessions(60), 80_000, 24)
    stock, full = found["stock"], found["full"]
    assert regime(found) == "thrashing"
    assert full["recomputing_share"] < 0.5 * stock["recomputing_share"]
    assert full["completion_mean_s"] < 0.8 * stock["completion_mean_s"]
    assert full["makespan_s"] < stock["makespan_s"]
    assert full["start_delay_p99_s"] > stock["start_delay_p99_s"], "the price"


def test_where_it_thrashes_places_are_not_kept_empty_over_long_pauses() -> None:
    found = replayed(sessions(80, long_pauses=0.1), 80_000, 60)
    stock, full = found["stock"], found["full"]
    assert regime(found) == "thrashing"
    assert full["recomputing_share"] < 0.5 * stock["recomputing_share"]
    assert full["completion_mean_s"] < 0.8 * stock["completion_mean_s"]
    assert full["makespan_s"] < 1.05 * stock["makespan_s"]


def test_where_little_is_lost_little_is_risked() -> None:
    """The contexts of all do not fit the cache, but most of them pause for long: one in ten prompts finds nothing."""
    found = replayed(sessions(60, long_pauses=0.1), 80_000, 24)
    assert regime(found) == "no headroom"
    assert found["full"]["completion_mean_s"] < 1.05 * found["stock"]["completion_mean_s"]
    assert found["full"]["makespan_s"] < 1.02 * found["stock"]["makespan_s"]


def test_where_the_cache_holds_everything_nothing_changes() -> None:
    found = replayed(sessions(30), 400_000, 12)
    assert regime(found) == "no headroom"
    same = ("completion_mean_s", "completion_p99_s", "start_delay_p99_s", "later_ttft_p99_s", "makespan_s")
    assert {name: found["full"][name] for name in same} == pytest.approx(
        {name: found["stock"][name] for name in same}, rel=0.02
    )
