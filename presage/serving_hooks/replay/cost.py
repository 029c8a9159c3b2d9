"""What an iteration of the engine costs: the one thing of a replay that vLLM does not decide.

    seconds = iteration_s + prefill_token_s · tokens prefilled + decode_token_s · tokens decoded
              + context_token_s · tokens attended to + host_token_s · tokens loaded from the host

Linear in what an iteration computes, as published schedulers' cost models are; the terms are those of a batch that is
bound by reading weights, by arithmetic, and by reading the cache. The quadratic part of a long prefill's attention is
not in it. A load from the host's memory is waited for before the iteration computes, so nothing of it is hidden; what
is written to the host goes beside the engine and costs nothing.
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
        host_token_s: each token loaded from the host: bytes of a token's cache by bytes a second of the way.
    """

    iteration_s: float
    prefill_token_s: float
    decode_token_s: float
    context_token_s: float
    source: str
    host_token_s: float = 0.0

    def seconds(self, prefill_tokens: int, decode_tokens: int, context_tokens: int, host_tokens: int = 0) -> float:
        """Of one iteration."""
        return (
            self.iteration_s
            + self.prefill_token_s * prefill_tokens
            + self.decode_token_s * decode_tokens
            + self.context_token_s * context_tokens
            + self.host_token_s * host_tokens
        )
