"""How fast an upstream is, from its engine file or measured while it serves, and how wrong that is.

Without an engine file, seconds per token are geometric running means of what requests show: the time between two output
tokens, and the time to a first token that nothing was ahead of. The estimate of the whole answer is corrected by the
ratio of the seconds that answers took to those estimated for their true lengths; the ratio is clipped and forgotten.
"""

from __future__ import annotations

import math
from typing import Final

from presage.serving_hooks.engine_file import EngineFile

TOKEN_S: Final = 0.02
PREFILL_TOKEN_S: Final = 1e-4
"""Seconds assumed before anything was measured, alike for all upstreams."""

MOST_REQUESTS: Final = 256
"""Requests of one iteration assumed before requests had to wait: vLLM's usual `max_num_seqs`."""

LEAST_PREFILL_TOKENS: Final = 128
"""A shorter prompt says nothing of the speed of prefill."""

LARGEST_BIAS: Final = 8.0
HALF_LIFE_S: Final = 600.0
"""Seconds without answers in which half of the correction, on a log scale, is forgotten."""

_NEW: Final = 0.1
_FASTEST_S, _SLOWEST_S = 1e-7, 60.0


class _Mean:
    """Geometric mean of positive seconds: the plain one first, later one that forgets."""

    def __init__(self, assumed: float) -> None:
        self.value, self.count = assumed, 0

    def add(self, seconds: float) -> None:
        self.count += 1
        weight = max(1 / self.count, _NEW)
        log_s = math.log(min(max(seconds, _FASTEST_S), _SLOWEST_S))
        self.value = math.exp((1 - weight) * math.log(self.value) + weight * log_s)


class UpstreamSpeed:
    """Seconds per token of one upstream.

    Args:
        engine: its engine file; None measures.
    """

    def __init__(self, engine: EngineFile | None) -> None:
        self._measures = engine is None
        if engine is None:
            self.most_requests = MOST_REQUESTS
            self._token, self._prefill = _Mean(TOKEN_S), _Mean(PREFILL_TOKEN_S)
        else:
            self.most_requests = engine.most_requests
            full = engine.cost.seconds(0, engine.most_requests, engine.cache_tokens)
            self._token, self._prefill = _Mean(full), _Mean(engine.cost.prefill_token_s)
        self._log_bias, self._at_s = 0.0, 0.0

    @property
    def token_s(self) -> float:
        """Seconds of an iteration, before correction."""
        return self._token.value

    @property
    def prefill_token_s(self) -> float:
        """Seconds each prefilled token adds, before correction."""
        return self._prefill.value

    @property
    def measured(self) -> tuple[int, int]:
        """Answers that measured decoding and prefill."""
        return self._token.count, self._prefill.count

    def first_token(self, seconds: float, prefilled_tokens: float) -> None:
        """A first token came after so many seconds, in which nothing but its prompt was prefilled."""
        if self._measures and prefilled_tokens >= LEAST_PREFILL_TOKENS:
            decoding = self.token_s if self._token.count else 0.0
            self._prefill.add((seconds - decoding) / prefilled_tokens)

    def decoded(self, seconds: float, tokens: int) -> None:
        """So many tokens came in so many seconds after the first token."""
        if self._measures and tokens > 0 and seconds > 0:
            self._token.add(seconds / tokens)

    def saturated(self, running: int) -> None:
        """Requests wait while so many run."""
        if self._measures and running > 0:
            self.most_requests = running

    def estimate_s(self, ahead_tokens: float, prefill_tokens: float, output_tokens: float) -> float:
        """Seconds to the last token, before correction: queue, prefill and decoding (`chimera.last_token_s`)."""
        decoding = (ahead_tokens / self.most_requests + output_tokens) * self.token_s
        return decoding + prefill_tokens * self.prefill_token_s

    def answered(self, estimated_s: float, took_s: float, now: float) -> None:
        """An answer took so long, and was estimated to take so long given its length."""
        if not (estimated_s > 0 and took_s > 0 and math.isfinite(estimated_s + took_s)):
            return
        most = math.log(LARGEST_BIAS)
        off = min(max(math.log(took_s / estimated_s), -most), most)
        before = math.log(self.bias(now))
        self._log_bias, self._at_s = before + _NEW * (off - before), now

    def bias(self, now: float) -> float:
        """Factor of the correction, 1 without answers."""
        return math.exp(self._log_bias * 2.0 ** (-max(0.0, now - self._at_s) / HALF_LIFE_S))
