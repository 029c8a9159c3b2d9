"""What an iteration of the engine costs: the one thing of a replay that vLLM does not decide.

    seconds = iteration_s + prefill_token_s · tokens prefilled + decode_token_s · tokens decoded
              + context_token_s · tokens attended to

Linear in what an iteration computes, as published schedulers' cost models are; the terms are those of a batch that is
bound by reading weights, by arithmetic, and by reading the cache. The quadratic part of a long prefill's attention is
not in it, nor is anything of transfers between tiers.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of an iteration.

    Attributes:
        iteration_s: whatever is in it.
        prefill_token_s: each token of a prompt computed.
        decode_token_s: each token produced.
        context_token_s: each token of each request in it, cached or computed, that is attended to.
        source: where the numbers come from.
    """

    iteration_s: float
    prefill_token_s: float
    decode_token_s: float
    context_token_s: float
    source: str

    def seconds(self, prefill_tokens: int, decode_tokens: int, context_tokens: int) -> float:
        """Of one iteration."""
        return (
            self.iteration_s
            + self.prefill_token_s * prefill_tokens
            + self.decode_token_s * decode_tokens
            + self.context_token_s * context_tokens
        )
