"""Run as a program: a hybrid model, of convolutions and attention, by vLLM alone and with hooks that record its states.

Prints tokens, the kinds of cache, and what is said of the recorder's states, of each as JSON.
"""

import json
import os
import sys
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # so that the scheduler can be asked
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"


def main(model: str, recording: str | None) -> dict[str, Any]:
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    from presage.serving_hooks.vllm.start.multi_connector import ALONE

    hooks = {
        "scheduler_cls": "presage.serving_hooks.vllm.WorkflowScheduler",
        "worker_cls": "presage.serving_hooks.vllm.StatesWorker",
        "kv_transfer_config": KVTransferConfig(**ALONE),
        "additional_config": {"presage": {"recorder": {"folder": recording, "states": "both"}}},
    }
    llm = LLM(
        model=model,
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=4,
        enable_prefix_caching=True,
        seed=0,
        **(hooks if recording is not None else {}),  # type: ignore[arg-type]
    )
    sent = {"workflow_type": "t", "workflow_id": "w", "agent": "planner"}
    wanted = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, extra_args=sent, detokenize=False)
    prompts = [{"prompt_token_ids": [(7 * i + start) % 500 for i in range(200)]} for start in range(3)]
    tokens = [list(answer.outputs[0].token_ids) for answer in llm.generate(prompts, wanted, use_tqdm=False)]
    llm.llm_engine.step()  # as the loop of an engine's own process: it tells the worker of the last that have finished
    scheduler: Any = llm.llm_engine.engine_core.engine_core.scheduler  # type: ignore[attr-defined]
    kinds = [type(group.kv_cache_spec).__name__ for group in scheduler.kv_cache_config.kv_cache_groups]
    states = scheduler.presage_status()["recorder"]["states"] if recording is not None else None
    llm.llm_engine.engine_core.shutdown()  # what waits is written
    return {"tokens": tokens, "kinds": kinds, "states": states}


if __name__ == "__main__":
    print(json.dumps([main(sys.argv[1], recording) for recording in (None, sys.argv[2])]))
