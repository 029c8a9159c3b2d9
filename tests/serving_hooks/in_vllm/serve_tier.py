"""Run as a program: a workflow loses its cache to another, and comes back after a third has decoded a while.

Prints tokens, and what the hooks say of themselves after each request, as JSON.
"""

import json
import os
import sys
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # so that the scheduler can be asked
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"

SCHEDULER = "presage.serving_hooks.vllm.WorkflowScheduler"
REQUESTS = (
    # name, first token, prompt tokens, output tokens
    ("a1", 0, 640, 2),
    ("a2", 0, 640, 2),
    ("z1", 100, 900, 2),  # ends with it
    ("r1", 300, 20, 60),
    ("a3", 0, 660, 8),
)


def returns() -> Any:
    """The planner comes next, for certain."""
    from prefetch_samples import Says

    from presage.serving_hooks.forecasting.forecasts import Forecasts

    return Forecasts(Says({}))


def main(model: str, settings: Any) -> dict[str, Any]:
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    from presage.serving_hooks.status import as_json

    tier = {"spec_name": "MemcpySpec", "spec_module_path": "memcpy_tier", "cpu_bytes_to_use": 2**26}
    llm = LLM(
        model=model,
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=1024,
        block_size=32,
        num_gpu_blocks_override=40,
        max_num_seqs=8,
        max_num_batched_tokens=256,
        enable_prefix_caching=True,
        seed=0,
        scheduler_cls=SCHEDULER,
        additional_config={"presage": settings},
        kv_transfer_config=KVTransferConfig(
            kv_connector="OffloadingConnector", kv_role="kv_both", kv_connector_extra_config=tier
        ),
    )
    core: Any = llm.llm_engine.engine_core.engine_core
    tokens, said = {}, {}
    for name, start, length, output in REQUESTS:
        sent = {"workflow_type": "t", "workflow_id": name[0], "agent": "planner", "workflow_end": name[0] == "z"}
        wanted = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True, extra_args=sent, detokenize=False)
        prompt = {"prompt_token_ids": [(start + i) % 500 for i in range(length)]}
        (answer,) = llm.generate([prompt], [wanted], use_tqdm=False)
        tokens[name] = list(answer.outputs[0].token_ids)
        said[name] = as_json(core.scheduler.engine_status())
    for _ in range(200):
        if not core.scheduler.has_requests():
            break
        core.step_fn()
    return {"tokens": tokens, "said": said, "left": list(core.scheduler.requests)}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], json.loads(sys.argv[2]))))
