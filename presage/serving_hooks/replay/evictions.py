"""Which blocks were given up: those that held nothing, those of ended workflows, or those of workflows under way.

Counted alike under every policy, vLLM's own order of free blocks included, and by the definition of the metric
`presage_evicted_blocks_total`: a workflow uses a block once a step of it that has begun reads or writes it, and a block
is retired when all that used it have ended. What serving tells apart of active blocks by what was forecast of them
(worthless, unknown, forecast) is one class here, since most policies forecast nothing. A plain request is of no
workflow that could end, so its blocks stay active, as in serving.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
        pool.replay_evictions, pool._reuse_watchers = self, _Asked(pool._reuse_watchers)
        pool.__class__ = type(f"Watched{type(pool).__name__}", (_Watched, type(pool)), {})

    def gives_up(self, blocks: Iterable[Any]) -> None:
        """Free blocks are taken for something else; what they hold is still known."""
        owner, sharers, using = self._owner, self._sharers, self._using
        blank = retired = active = 0
        for block in blocks:
            if block.block_hash is None:
                blank += 1
                continue
            content = block.block_hash[:-4]  # without the group of layers
            of = sharers.get(content)
            if owner.get(content) in using if of is None else not of.isdisjoint(using):
                active += 1
            else:
                retired += 1
        self.counts[BLANK] += blank
        self.counts[RETIRED] += retired
        self.counts[ACTIVE] += active

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
    """vLLM tells whoever asked for it which blocks it hands out, all of one call together; here it always tells."""

    replay_evictions: Evictions

    def _notify_reuse(self, blocks: Any) -> None:
        self.replay_evictions.gives_up(blocks)
        super()._notify_reuse(blocks)  # type: ignore[misc]


class _Asked(dict[int, Any]):
    """Who asked to be told: somebody, even where nobody is named."""

    def __bool__(self) -> bool:
        return True
