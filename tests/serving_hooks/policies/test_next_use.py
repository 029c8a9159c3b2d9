"""Where every block is needed for certain, knowing when keeps more of them than knowing what was used last."""

import heapq
import random

import numpy as np
import pytest

from presage.serving_hooks.policies.eviction import EvictionConfig, FreeOrder
from presage.serving_hooks.policies.score import ScoreConfig, lookahead

AGENTS = ("planner", "worker")
BLOCKS, HISTORY, WORKFLOWS = 300, 40, 12


def hit_share(*, seed: int, forecasts: bool, times: bool) -> float:
    """Twelve workflows take turns in a cache for seven and a half; every step reads the workflow's 40 blocks."""
    rng = random.Random(seed)
    order = FreeOrder(BLOCKS, EvictionConfig())
    order.append(range(BLOCKS))
    held: dict[int, list[int]] = {w: [] for w in range(WORKFLOWS)}  # its history: block ids, in prompt order
    owner: dict[int, int] = {}
    due = [(rng.uniform(0, 5), w) for w in range(WORKFLOWS)]
    heapq.heapify(due)
    hits = 0
    for turn in range(600):
        now, workflow = heapq.heappop(due)
        name, agent = f"w{workflow}", AGENTS[turn % 2]
        found = []
        for block in held[workflow]:
            if owner.get(block) != workflow:
                break
            found.append(block)
        for block in found:
            order.remove(block)
        order.found("t", name, agent, found)
        hits += len(found)
        written = order.pop(HISTORY - len(found))
        order.filled(name, agent, written)
        owner.update(dict.fromkeys(written, workflow))
        held[workflow] = found + written
        back = now + rng.choice([1.0, 2.0, 30.0])
        if forecasts:
            certain = lookahead(np.array([[0.5, 0.5, 0.0]] * 3), AGENTS, ScoreConfig())
            order.forecast("t", name, certain, next_step_at=back if times else 0.0)
        order.append(reversed(held[workflow]))
        heapq.heappush(due, (back, workflow))
    return hits / (600 * HISTORY)


@pytest.mark.parametrize("seed", range(3))
def test_time_to_next_use_decides_where_scores_tie(seed: int) -> None:
    last_use = hit_share(seed=seed, forecasts=False, times=False)
    score_alone = hit_share(seed=seed, forecasts=True, times=False)
    with_times = hit_share(seed=seed, forecasts=True, times=True)
    assert with_times > max(last_use, score_alone) + 0.05
