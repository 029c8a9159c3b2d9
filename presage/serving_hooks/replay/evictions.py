"""Which blocks were given up: those that held nothing, those of ended workflows, or those of workflows under way.

Counted alike under every policy, vLLM's own order of free blocks included, and by the definition of the metric
`presage_evicted_blocks_total`: a workflow uses a block once a step of it that has begun reads or writes it, and a block
is retired when all that used it have ended. What serving tells apart of active blocks by what was forecast of them
(worthless, unknown, forecast) is one class here, since most policies forecast nothing. A plain request is of no
workflow that could end, so its blocks stay active, as in serving.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from presage.serving_hooks.replay.prompts import Prompts
from presage.serving_hooks.replay.workload import Job

BLANK: Final = "blank"
RETIRED: Final = "retired"
ACTIVE: Final = "active"


class Evictions:
    """Counts blocks that are given up.

    Args:
        jobs: that are replayed.
        prompts: theirs, hashed.

    Attributes:
        counts: blocks by class.
    """

    def __init__(self, jobs: Sequence[Job], prompts: Prompts) -> None:
        self.counts = dict.fromkeys((BLANK, RETIRED, ACTIVE), 0)
        self._jobs, self._owner, self._sharers = jobs, prompts.owner, prompts.sharers
        self._left = [len(job.steps) for job in jobs]
        self._using: set[int | None] = set()  # jobs with a step that has begun, which have not ended

    def watch(self, pool: Any) -> None:
        """Looks on as vLLM's pool gives up blocks."""
        pool.replay_evictions = self
        pool.__class__ = type(f"Watched{type(pool).__name__}", (_Watched, type(pool)), {})

    def gives_up(self, block_hash: bytes | None) -> None:
        """A free block is taken for something else; the hash of what it holds, None for nothing."""
        if block_hash is None:
            self.counts[BLANK] += 1
            return
        content = block_hash[:-4]  # without the group of layers
        sharers = self._sharers.get(content)
        used = self._owner.get(content) in self._using if sharers is None else not sharers.isdisjoint(self._using)
        self.counts[ACTIVE if used else RETIRED] += 1

    def began(self, number: int, at_s: float) -> None:
        """A job begins; it uses nothing yet."""

    def asked(self, number: int, index: int, at_s: float) -> None:
        """A step of it has come; it uses nothing yet."""

    def selected(self, number: int, index: int, at_s: float) -> None:
        """A step of it begins."""
        self._using.add(number)

    def finished(self, number: int, index: int, at_s: float) -> None:
        """A step of it has ended."""
        self._left[number] -= 1
        if not self._left[number] and self._jobs[number].workflow_type:
            self._using.discard(number)


class _Watched:
    replay_evictions: Evictions

    def _maybe_evict_cached_block(self, block: Any) -> bool:
        self.replay_evictions.gives_up(block.block_hash)
        return bool(super()._maybe_evict_cached_block(block))  # type: ignore[misc]
