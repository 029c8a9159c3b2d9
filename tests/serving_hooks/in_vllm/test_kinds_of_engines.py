"""Engines that are more than one model with one kind of attention: they work with the hooks, or are refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from test_fuzz import Guessing, answered, pressed
from vllm_samples import BLOCK, Engine, Scheduler, ask, build, everything_is_free

from presage.errors import EngineError
from presage.serving_hooks.vllm.engine import EnginePort
from presage.serving_hooks.vllm.scheduler import SyncWorkflowScheduler, WorkflowScheduler

pytest.importorskip("vllm", reason="vLLM is not installed; these tests run its own scheduler")

from vllm.config import ParallelConfig
from vllm.config.lora import LoRAConfig
from vllm.lora.request import LoRARequest
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec

pytestmark = pytest.mark.vllm


class GuessingSync(Guessing, SyncWorkflowScheduler):
    pass


class GuessingAhead(Guessing, WorkflowScheduler):
    pass


ONE = {"num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
FULL = FullAttentionSpec(block_size=BLOCK, **ONE)
WINDOW = SlidingWindowSpec(block_size=BLOCK, sliding_window=48, **ONE)
MAMBA = MambaSpec(block_size=BLOCK, shapes=((1, 32),), dtypes=(torch.float32,), mamba_cache_mode="align")


@pytest.mark.parametrize("kind", [GuessingSync, GuessingAhead])
@pytest.mark.parametrize("groups", [(FULL, WINDOW), (FULL, FULL, WINDOW), (FULL, MAMBA)])
def test_hybrid_models_lose_no_block_and_answer_all(tmp_path: Path, kind: type[Any], groups: Any) -> None:
    scheduler = build(tmp_path, kind, blocks=70 * len(groups), groups=groups)
    engine = Engine(scheduler, ahead=kind is GuessingAhead)
    answered(engine, pressed(engine, 300, seed=11))
    assert everything_is_free(scheduler)
    assert all(scheduler.presage_status()["on"].values())


def test_tokens_that_fit_take_a_slot_in_each_group_and_blocks_span_the_ranks_of_a_context(tmp_path: Path) -> None:
    def tokens(**given: Any) -> float:
        return EnginePort(build(tmp_path, Scheduler, blocks=41, **given)).cache_tokens()

    assert tokens() == 40 * BLOCK
    assert tokens(groups=(FULL, WINDOW)) == 20 * BLOCK
    ranks = ParallelConfig(tensor_parallel_size=2, decode_context_parallel_size=2)
    assert tokens(parallel_config=ranks) == 40 * 2 * BLOCK


def test_hybrid_models_keep_the_prefix_of_a_running_workflow(tmp_path: Path) -> None:
    prompt, hits = list(range(160)), {}
    for kind in (Scheduler, SyncWorkflowScheduler):
        engine = Engine(build(tmp_path, kind, blocks=60, groups=(FULL, WINDOW)))
        sent = {"workflow_type": "t", "workflow_id": "w", "agent": "a"}
        engine.scheduler.add_request(ask("first", prompt, 2, **sent))
        engine.run()
        for number in range(4):  # other workflows, over as soon as they have been served
            over = {**sent, "workflow_id": f"other-{number}", "workflow_end": True}
            engine.scheduler.add_request(ask(f"o{number}", [200 + number] * 200, 2, **over))
            engine.run()
        engine.scheduler.add_request(ask("again", prompt, 2, **sent))
        engine.run()
        hits[kind] = engine.hits["again"]
    assert hits[SyncWorkflowScheduler] == 144
    assert hits[SyncWorkflowScheduler] > hits[Scheduler]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_requests_of_more_adapters_than_fit_are_all_served(tmp_path: Path, policy: str) -> None:
    """vLLM takes requests whose adapter does not fit out of our queue and puts them back."""
    for kind in (Scheduler, SyncWorkflowScheduler):
        lora = LoRAConfig(max_loras=1, max_lora_rank=8)
        engine = Engine(build(tmp_path, kind, blocks=70, policy=policy, lora_config=lora))
        for number in range(12):
            request = ask(
                f"r{number}", list(range(40)), 3, arrival=number, workflow_type="t", workflow_id=f"w{number % 3}"
            )
            adapter = number % 3
            request.lora_request = LoRARequest(f"adapter-{adapter}", adapter, "/nowhere") if adapter else None
            engine.scheduler.add_request(request)
        engine.run()
        assert sorted(engine.ended) == sorted(f"r{number}" for number in range(12))
        assert all(len(said) == 3 for said in engine.said.values())
        for scheduled, _, _ in engine.log:
            adapters = {int(name[1:]) % 3 for name in scheduled} - {0}
            assert len(adapters) <= 1
    assert everything_is_free(engine.scheduler)
    assert all(engine.scheduler.presage_status()["on"].values())


def test_a_kv_connector_works_beside_the_hooks(tmp_path: Path) -> None:
    transfer = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "store")},
    }
    scheduler = build(tmp_path / "model", GuessingSync, blocks=70, connector=transfer)
    assert scheduler.connector is not None
    engine = Engine(scheduler)
    answered(engine, pressed(engine, 200, seed=13))
    assert everything_is_free(scheduler)
    assert all(scheduler.presage_status()["on"].values())


def test_a_diffusion_model_is_refused_for_it_needs_a_scheduler_of_its_own(tmp_path: Path) -> None:
    scheduler = build(tmp_path, Scheduler, blocks=70)
    EnginePort(scheduler)
    scheduler.vllm_config.diffusion_config = object()
    with pytest.raises(EngineError, match="diffusion models need vLLM's diffusion scheduler"):
        EnginePort(scheduler)


def test_the_status_tells_that_several_engines_share_the_requests(tmp_path: Path) -> None:
    for engines in (1, 2):
        scheduler = build(tmp_path, SyncWorkflowScheduler, blocks=41, presage={})
        scheduler.parallel_config.data_parallel_size = engines
        assert scheduler.presage_status()["data_parallel"] == engines
