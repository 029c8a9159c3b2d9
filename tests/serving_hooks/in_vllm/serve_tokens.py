"""Run as a program: serves requests on the real engine, under vLLM's scheduler and under ours; prints JSON.

A process of its own, as in life: vLLM looks through all modules that are loaded when it starts. The engine starts once
and is given a new scheduler, with an empty cache, for each of the settings.
"""

import json
import os
import random
import sys
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # so that the scheduler can be asked
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"

BLOCK = 32


def by_chance() -> Any:
    """Forecasts of no use."""
    from presage.serving_hooks.forecasting.forecasts import Forecasts
    from presage.testing.forecasts import Noise

    noise = Noise(1)
    return Forecasts(noise, noise)


def requests(round_: int, seed: int, draw: random.Random) -> tuple[list[Any], list[Any]]:
    """Prompts of one round, which begin as those of the round before, and how to answer them."""
    from vllm import SamplingParams

    prompts, wanted = [], []
    for number in range(20):
        start = number % 6
        own = [draw.randrange(500) for _ in range(draw.randrange(20))]
        prompts.append(
            {"prompt_token_ids": [(seed * 13 + start * 41 + i) % 500 for i in range(60 + 90 * round_)] + own}
        )
        sent = {"workflow_type": "t", "workflow_id": f"w{seed}.{start}", "agent": draw.choice(["coder", "tester"])}
        extra = {} if number % 5 == 0 else {**sent, "workflow_end": round_ == 2}
        wanted.append(
            SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, extra_args=extra, detokenize=False)
        )
    return prompts, wanted


def leaving(round_: int, seed: int) -> tuple[list[Any], list[Any]]:
    """A long prompt of a workflow that ends with it: takes the space of others, and leaves it."""
    from vllm import SamplingParams

    sent = {"workflow_type": "t", "workflow_id": f"z{seed}.{round_}", "agent": "coder", "workflow_end": True}
    wanted = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, extra_args=sent, detokenize=False)
    return [{"prompt_token_ids": [(round_ * 7 + i * 3) % 500 for i in range(900)]}], [wanted]


def main(model: str, several: list[Any]) -> list[dict[str, Any]]:
    """What was served under each of the settings; None stands for vLLM's own scheduler, and comes first."""
    from vllm import LLM

    llm = LLM(
        model=model,
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=1024,
        block_size=BLOCK,
        num_gpu_blocks_override=40,
        max_num_seqs=8,
        max_num_batched_tokens=256,
        enable_prefix_caching=True,
        async_scheduling=True,
        seed=0,
    )
    return [served(llm, settings) for settings in several]


def served(llm: Any, settings: Any) -> dict[str, Any]:
    """Tokens of all requests, preemptions, and the status of our scheduler."""
    core: Any = llm.llm_engine.engine_core.engine_core
    if settings is not None:
        give_scheduler(core, settings)
    scheduler, preempted, tokens = core.scheduler, [], []
    schedule = scheduler.schedule

    def counted(*args: Any, **more: Any) -> Any:
        before = {name: request.num_preemptions for name, request in scheduler.requests.items()}
        output = schedule(*args, **more)
        preempted.extend(name for name, times in before.items() if scheduler.requests[name].num_preemptions > times)
        return output

    scheduler.schedule = counted
    for seed in range(3):
        draw = random.Random(seed)
        for round_ in range(3):
            for prompts, wanted in (requests(round_, seed, draw), leaving(round_, seed)):
                answers = llm.generate(prompts, wanted, use_tqdm=False)
                tokens += [list(answer.outputs[0].token_ids) for answer in answers]
            while scheduler.has_requests():  # as the engine does in a process of its own
                told, _ = core.step_fn()
                assert not any(client.outputs for client in (told or {}).values())  # None: under way
    status = None if settings is None else scheduler.presage_status()
    return {"tokens": tokens, "preempted": len(preempted), "status": status}


def give_scheduler(core: Any, settings: Any) -> None:
    """Ours, with an empty cache, in the place of the scheduler that the engine has."""
    from presage.serving_hooks.vllm import WorkflowScheduler

    old = core.scheduler
    old.vllm_config.additional_config = {"presage": settings}
    core.scheduler = WorkflowScheduler(
        vllm_config=old.vllm_config,
        kv_cache_config=old.kv_cache_config,
        structured_output_manager=core.structured_output_manager,
        block_size=BLOCK,
        hash_block_size=BLOCK,
        log_stats=True,
    )


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], json.loads(sys.argv[2]))))
