"""The published policies over vLLM's own scheduler: quick and step by step alike, also with a host behind the cache."""

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; these tests run its own scheduler")

from papers import THUNDERAGENT, static_graph

from presage.replay.metrics import VirtualClock
from presage.replay.policies import Policy
from presage.replay.runs import Setting, run_one
from presage.replay.vllm_scheduler import HookedScheduler, scheduler_class
from presage.replay.workload import Arrivals, PromptConvention, RecordedRequest, ReplayJob, assemble
from presage.serving_hooks.engine_file import EngineFile

pytestmark = [pytest.mark.vllm, pytest.mark.one_version]

CONVENTION = PromptConvention("own-conversation", opening_tokens=40)
COST = {"source": "a test", "iteration_s": 0.01, "prefill_token_s": 1e-4, "decode_token_s": 1e-4}
COST |= {"context_token_s": 1e-7, "host_token_s": 2e-5}


def job(number: int) -> ReplayJob:
    """A workflow whose agents take turns, each in a conversation of its own."""
    new, output, pause_s = 37 + 13 * (number % 5), 9 + 17 * (number % 4), 0.3 * (number % 3)
    asked, own = [], dict.fromkeys("pqrs", 40)
    for step, agent in enumerate(("pqrqrs", "pqrs", "pqrqrqrs")[number % 3]):
        asked.append(
            RecordedRequest(agent, own[agent] + new, output, (step - 1,) if step else (), pause_s * (step > 0))
        )
        own[agent] += new + output
    return ReplayJob("t", f"w{number}", assemble(asked, CONVENTION))


JOBS = tuple(map(job, range(14)))


@pytest.mark.parametrize("policy", [THUNDERAGENT, static_graph(JOBS)], ids=lambda policy: policy.name)
@pytest.mark.parametrize(("tokens", "host"), [(1400, 0), (2400, 0), (1400, 2000), (2400, 8000)])
def test_quick_is_step_by_step(policy: Policy, tokens: int, host: int) -> None:
    given = {"cache_tokens": tokens, "host_cache_tokens": host, "most_requests": 8, "most_tokens": 128, "cost": COST}
    setting = Setting(JOBS, CONVENTION, Arrivals(9), EngineFile.model_validate(given), "noise:0.3")
    quick, slow = (run_one(setting, policy, 1, fast_path=fast) for fast in (True, False))
    assert quick == slow
    assert quick.off == ()


def test_pause_and_restore_stand_where_the_hooks_have_their_admission() -> None:
    kind = scheduler_class(THUNDERAGENT, None, VirtualClock())
    assert kind.make_admission is not HookedScheduler.make_admission
