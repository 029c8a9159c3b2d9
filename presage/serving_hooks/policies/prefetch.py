"""Plans prefetches: which blocks to load into the cache before a request needs them.

Source: PBKV, §4.3. A prefetch has a certain cost and an uncertain gain, so it uses idle resources only:

- only during a step that prefills nothing;
- only into blank and retired blocks, S_a of them, so that it evicts no block of an active workflow;
- at most what the idle channel moves during the step: S = min(S_a, rate × step time). The channel is the bus to an
  offload tier or, while the engine is idle, its own prefill, which would lengthen steps that decode;
- by the one-step value (eq. 1), the highest first, until S is used up. The next step can fetch what is needed later.

Departures from the paper: the last prompt that does not fit is fetched in part, from its front, since the beginning
of a prompt is useful without its end; a prompt below `least_value` is not fetched; and a prompt is valued for its own
workflow, not summed over the workflows that share its blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class PrefetchConfig:
    """Settings of the planning.

    Attributes:
        least_value: least one-step value of a prompt to be fetched: the probability that the next step reads it.
        most_blocks: blocks fetched per step at most.
    """

    least_value: float = 0.2
    most_blocks: int = 4096


def plan(
    config: PrefetchConfig, spare_blocks: int, channel_blocks: float, missing: Sequence[tuple[float, int]]
) -> list[tuple[int, int]]:
    """What to fetch during a step that prefills nothing, best first; prompts of equal value keep their order.

    Args:
        config: settings.
        spare_blocks: S_a, blank and retired free blocks.
        channel_blocks: that the channel moves during the step; from running means, so it may be infinite or NaN.
        missing: of each prompt, the one-step value and the number of uncached blocks.

    Returns:
        The index of a prompt, and how many of its missing blocks, from the front.
    """
    left = min(spare_blocks, config.most_blocks, int(channel_blocks) if math.isfinite(channel_blocks) else 0)
    worth = [index for index, (value, blocks) in enumerate(missing) if value >= config.least_value and blocks > 0]
    fetches: list[tuple[int, int]] = []
    for index in sorted(worth, key=lambda index: -missing[index][0]):
        if left <= 0:
            break
        blocks = min(missing[index][1], left)
        fetches.append((index, blocks))
        left -= blocks
    return fetches
