"""How long iterations take, between what an engine tells its scheduler.

An iteration begins when it is scheduled and is over when the scheduler is updated with its output. An engine that
schedules ahead has begun the next by then, so what counts is the time since the update before, where that came later:
the beat at which a busy engine completes iterations, whatever it overlaps. The first iteration after an idle time
counts from its own beginning. What vLLM does after an update is not seen where nothing overlaps it.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final

from presage.serving_hooks.policies.workload import IterationCosts, StepTimes

_UNDER_WAY: Final = 64
"""More than any pipeline is deep; one whose update never comes is forgotten."""

_FIT_EVERY_S: Final = 2.0


class IterationTimes:
    """Times of iterations, and what they cost."""

    def __init__(self) -> None:
        self._times = StepTimes()
        self._under_way: deque[tuple[object, int, int, float]] = deque(maxlen=_UNDER_WAY)
        self._updated_at = -math.inf
        self._fit_at = -math.inf
        self._costs: IterationCosts | None = None

    def scheduled(self, output: object, decode_tokens: int, prefill_tokens: int, began_at: float) -> None:
        """An iteration is scheduled, which the engine will compute."""
        self._under_way.append((output, decode_tokens, prefill_tokens, began_at))

    def updated(self, output: object, now: float) -> None:
        """The output of an iteration has come. Iterations come in order."""
        while self._under_way:
            known, decode_tokens, prefill_tokens, began_at = self._under_way.popleft()
            if known is output:
                self._times.observe(decode_tokens, prefill_tokens, now - max(began_at, self._updated_at))
                break
        self._updated_at = now

    def costs(self, now: float) -> IterationCosts | None:
        """What iterations cost, fitted anew every few seconds; as last fitted, while too few prefill to say anew."""
        if now >= self._fit_at:
            self._fit_at, self._costs = now + _FIT_EVERY_S, self._times.fit() or self._costs
        return self._costs
