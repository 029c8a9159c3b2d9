"""Which way a priority points. Inside Presage one rule holds: the lower key runs first, the lower key is evicted first.

Others differ: vLLM runs the lower `priority` first, Dynamo says the higher one matters more. Both take one number, so a
key (starvation level, predicted remaining tokens) is folded into one integer here, at the edge, and nowhere else.
Arrival is left out: both engines break ties by it themselves.
"""

from __future__ import annotations

from typing import Final

MOST_TOKENS: Final = 2**32 - 1
"""Where remaining tokens are cut: more work than that is all the same, and so is work nobody knows."""


def vllm_priority(level: int, remaining_tokens: float) -> int:
    """One integer, lower runs first: the level decides, whole predicted tokens break its ties.

    Args:
        level: starvation level, 0 or below; lower runs first.
        remaining_tokens: predicted, 0 or more; infinity is allowed.
    """
    tokens = MOST_TOKENS if remaining_tokens >= MOST_TOKENS else int(remaining_tokens)
    return level * (MOST_TOKENS + 1) + tokens


def dynamo_priority(level: int, remaining_tokens: float) -> int:
    """The same order for an engine where the higher number matters more."""
    return -vllm_priority(level, remaining_tokens)
