"""vLLM's executor for one process, with the time of a device: an iteration takes as long as TIMED_EXECUTOR says.

`TIMED_EXECUTOR="20 0.06"`: 20 ms an iteration and 0.06 ms for each of its tokens. The model, which is small, computes
within that time; the rest is slept. So engines on a machine of few cores keep the server, the scheduler and the cache
of vLLM, and do not wait for each other's arithmetic. `vllm serve … --distributed-executor-backend
timed_executor.TimedExecutor`.
"""

from __future__ import annotations

import os
import time
from typing import Any

from vllm.v1.executor.uniproc_executor import UniProcExecutor


class TimedExecutor(UniProcExecutor):
    """Sleeps until the time of an iteration has passed."""

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        """As vLLM's, later."""
        began = time.perf_counter()
        output = super().execute_model(scheduler_output, non_block)
        step_ms, token_ms = map(float, os.environ["TIMED_EXECUTOR"].split())
        tokens = scheduler_output.total_num_scheduled_tokens
        if tokens:
            time.sleep(max(0.0, began + (step_ms + token_ms * tokens) / 1e3 - time.perf_counter()))
        return output
