"""The cost model of an engine file as the coefficients of vllm-router's program scheduling.

The router estimates a cold prefill of x thousand tokens by a + b x + c x², and a decode iteration of B requests with C
tokens of context by d + e B + f C (its docs/program_scheduling.md). Our model (`engine_file.py`, fitted by
`presage calibrate-cost`) is of iterations. A prompt of n tokens takes n / m of them, rounded up, of at most m tokens;
each attends to all tokens so far. Rounding up adds half an iteration on average, and the sum over the iterations is
n² / 2m + n / 2 tokens attended to. So

    a = iteration / 2,   b = 1000 (prefill + iteration / m + (context + pair) / 2),   c = 10⁶ (context / m + pair) / 2,

and with prompts in one iteration a = iteration, b = 1000 (prefill + context + pair / 2), c = 10⁶ pair / 2.
"""

from __future__ import annotations

from typing import Any, Final

from presage.serving_hooks.engine_file import EngineFile

_THOUSAND: Final = 1000.0


def router_costs(engine: EngineFile) -> dict[str, Any]:
    """`prefill_cost_model`, `decode_throughput_model` and `token_capacity_per_target` of the router's settings.

    `decode_throughput_alpha`, the share of decode throughput that is left beside a prefill, is that of a full iteration
    with half of the requests and half of the cache; the engine file says nothing of it.
    """
    cost, most = engine.cost, engine.most_tokens
    attended = cost.context_token_s / 2 if engine.chunked_prefill else cost.context_token_s
    pair = cost.attention_pair_s / 2  # n (n + 1) / 2 of them
    requests, context = max(1, engine.most_requests // 2), engine.cache_tokens // 2
    alone = cost.seconds(0, requests, context)
    mixed = cost.seconds(max(0, most - requests), requests, context)
    prefill = {
        "intercept_seconds": cost.iteration_s / 2 if engine.chunked_prefill else cost.iteration_s,
        "linear_seconds_per_1k_tokens": _THOUSAND
        * (cost.prefill_token_s + attended + pair + (cost.iteration_s / most if engine.chunked_prefill else 0.0)),
        "quadratic_seconds_per_1k_tokens_squared": _THOUSAND**2
        * (pair + (attended / most if engine.chunked_prefill else 0.0)),
        "decode_throughput_alpha": alone / mixed,
    }
    decode = {
        "fixed_step_seconds": cost.iteration_s,
        "batch_step_seconds_per_request": cost.decode_token_s,
        "context_step_seconds_per_token": cost.context_token_s,
    }
    return {
        "token_capacity_per_target": engine.cache_tokens,
        "prefill_cost_model": prefill,
        "decode_throughput_model": decode,
    }
