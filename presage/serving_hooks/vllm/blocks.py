"""Free blocks ordered by score, with the methods of vLLM's free-block queue, and the owners of blocks.

vLLM's own queue stays underneath and is kept up to date; the order of policies/eviction.py only chooses the next block
to take out of it. If the order is wrong or fails, no block is lost or used twice: naming a block that is not free ends
the scored order, and vLLM's queue serves the rest.

All requests without a workflow form one pseudo-workflow whose blocks have no forecast value. Their blocks are evicted
after all retired ones and before those that an active workflow is expected to use, least recently used first; so an
engine without workflows evicts as vLLM does. (With a pseudo-workflow per request the rule "fewer users first" would
count uses, and blocks of finished long conversations would never be evicted.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any, Final

from presage.serving_hooks.listeners import Found, Listener
from presage.serving_hooks.modes import Switch
from presage.serving_hooks.policies.eviction import EvictionConfig, FreeOrder
from presage.serving_hooks.policies.next_use import ReturnCurve
from presage.serving_hooks.policies.score import NO_ROWS, Lookahead
from presage.serving_hooks.vllm.engine import Block, EngineRequest, FreeQueue, Iteration
from presage.serving_hooks.workflows import EndReason, RunningStep, Workflow
from presage.serving_hooks.workflows.identity import Step

NO_WORKFLOW: Final = ""
"""The pseudo-workflow; names of workflows contain a separator, so none is equal to it."""

_NOTHING: Final = Lookahead({}, NO_ROWS, ())

_PRESSED_FOR: Final = 256
"""Calls of the pool for which forecasts are ranked beside the model, and not only when an eviction needs them."""


class ScoredBlocks(Listener[EngineRequest]):
    """Free blocks by score, with the methods of vLLM's free-block queue, and the attribution of blocks to workflows.

    Args:
        step_of: the workflow step of a request, by request id; None without a workflow.

    Attributes:
        in_use: whether the pool uses this order; else it hears of workflows only.
        rank: passes on the forecasts that `forecast` has not received yet. Must not raise.
        vllm_queue: vLLM's own queue.
        acts: whether the order chooses; in shadow vLLM's queue chooses and the order is only compared.
        watched: evictions in shadow ("given up"), and those the order would have avoided ("otherwise").
    """

    def __init__(
        self,
        queue: FreeQueue,
        blocks: Sequence[Any],
        config: EvictionConfig,
        step_of: Callable[[str], Step | None],
        switch: Switch,
        clock: Callable[[], float],
    ) -> None:
        self.switch = switch
        self.in_use = False
        self.rank: Callable[[], object] = lambda: None
        self._pressed = 0
        self.acts = True
        self.watched: Counter[str] = Counter()
        self._config, self._clock = config, clock
        self.vllm_queue = queue
        self._blocks = blocks
        self._step_of = step_of
        self._used_again: list[int] = []
        self._unsettled: list[tuple[str, Sequence[Block]]] = []
        self.begin()

    def begin(self) -> None:
        """Starts from the blocks in vLLM's queue; their owners are unknown."""
        self._used_again.clear()
        self._unsettled.clear()
        self._owned = bytearray(len(self._blocks))
        self._order = FreeOrder(len(self._blocks), self._clock, self._config)
        self._order.forecast("", NO_WORKFLOW, _NOTHING)
        self._freed(self.vllm_queue.get_all_free_blocks())

    @property
    def evicted(self) -> dict[str, int]:
        """Evicted blocks by class (policies/eviction.py); those vLLM's queue chose after a failure do not count."""
        return self._order.evicted

    @property
    def pressed(self) -> bool:
        """Whether forecasts matter now: blocks that running workflows use were evicted lately.

        While blank and retired blocks suffice, nothing is ranked.
        """
        return self._pressed > 0

    # Called by vLLM's pool.

    num_free_blocks: property = property(attrgetter("vllm_queue.num_free_blocks"), doc="Free blocks.")
    """Read some seventy times an iteration, so without a Python frame."""

    def popleft(self) -> Any:
        """The next block to evict.

        Raises:
            ValueError: there is none.
        """
        if not self.vllm_queue.num_free_blocks:
            raise ValueError("No free blocks available")  # vLLM's words
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[Any]:
        """The next n blocks to evict."""
        self._settle_uses()
        self.switch.attempt(self._rank_for, n)
        if self.switch.on and not self.acts:
            given = self.vllm_queue.popleft_n(n)
            self.switch.attempt(self._watch, [block.block_id for block in given])
            return given
        given = []
        if self.switch.on and n <= self.vllm_queue.num_free_blocks:
            try:
                for block_id in self._order.pop(n):
                    block = self._blocks[block_id]
                    self.vllm_queue.remove(block)  # raises where the block is not free
                    given.append(block)
                    self._owned[block_id] = 0
            except Exception as error:
                self.switch.off(error)
        return given + self.vllm_queue.popleft_n(n - len(given)) if len(given) < n else given

    def remove(self, block: Any) -> None:
        """A free block is in use again. The order learns of it later: it is called for each block of a prompt."""
        self.vllm_queue.remove(block)
        self._used_again.append(block.block_id)

    def append(self, block: Any) -> None:
        """A block is free; it keeps its contents until it is evicted."""
        self.append_n([block])

    def append_n(self, blocks: list[Any]) -> None:
        """These blocks are free; they keep their contents until they are evicted."""
        self.settle()
        self.vllm_queue.append_n(blocks)
        self.switch.attempt(self._freed, blocks)

    def prepend_n(self, blocks: list[Any]) -> None:
        """These blocks are free and empty."""
        self.settle()
        self.vllm_queue.prepend_n(blocks)
        self.switch.attempt(self._freed_blank, [block.block_id for block in blocks])

    def get_all_free_blocks(self) -> list[Any]:
        """All free blocks in eviction order."""
        self._settle_uses()
        self.rank()
        ordered: list[Any] | None = self.switch.attempt(self._all) if self.acts else None
        return self.vllm_queue.get_all_free_blocks() if ordered is None else ordered

    def iter_blocks_after(self, cursor: Any | None) -> Iterator[Any]:
        """Free blocks in eviction order after `cursor`; all, if it is None or not free."""
        blocks = self.get_all_free_blocks()
        start = next((i for i, block in enumerate(blocks) if block is cursor), -1)
        return iter(blocks[start + 1 :])

    # Events of the pool; see `BlockOrder`.

    def filled(self, request: EngineRequest, blocks: Sequence[Block]) -> None:
        """A request has computed blocks; as they are in use, their owner is recorded later, by `settle`."""
        self.switch.attempt(self._filled, request, blocks)

    def settle(self) -> None:
        """Records blocks in use again, and the owners of blocks computed since the last call; before they matter."""
        self._settle_uses()
        if self._unsettled:
            unsettled, self._unsettled = self._unsettled, []
            for written in unsettled:
                self.switch.attempt(self._written, *written)

    def lost(self, blocks: Iterable[int]) -> None:
        """The cache has dropped the contents of these blocks, free or in use."""
        self.settle()
        self.switch.attempt(self._disown, blocks)

    # Workflow events.

    def request_scheduled(self, request: EngineRequest, step: RunningStep | None, found: Found) -> None:
        """A request is selected for the first time.

        vLLM has already cached what the step will write; those blocks are its agent's own and not counted.
        """
        if not self.in_use:
            return
        self.settle()
        if step is None:
            self._order.filled(NO_WORKFLOW, "", found.blocks)
        else:
            named = step.step
            self._order.found(named.stats_key, named.workflow, named.agent, found.blocks)

    def iteration(self, output: Iteration, began_at: float) -> None:
        """Records what the iteration has taken and written."""
        self.settle()

    def forecast(
        self, step: Step, lookahead: Lookahead, curve: ReturnCurve | None, since: float, step_s: float
    ) -> None:
        """New forecasts of the workflow that `step` belongs to; see `FreeOrder.forecast`."""
        self.settle()
        self.switch.attempt(self._order.forecast, step.stats_key, step.workflow, lookahead, curve, since, step_s)

    def workflow_ended(self, workflow: Workflow, reason: EndReason) -> None:
        """A workflow has ended: its blocks are retired."""
        self.settle()
        self._order.end(workflow.key)

    def explain(self, workflow: str) -> dict[str, Any] | None:
        """The blocks of a workflow and their places in the order; None where the order is off."""
        self.settle()
        self.rank()
        if not self.switch.on:
            return None
        blocks, free = self._order.blocks_of(workflow)
        groups = self._order.explain(workflow)
        return {"blocks": blocks, "free": free, "all_free": self.num_free_blocks, "groups": groups}

    def debug_state(self) -> dict[str, int]:
        """Entries of each table, to find leaks."""
        return self._order.debug_state(NO_WORKFLOW)

    # Blocks filled ahead of requests.

    def spare(self, found: Iterable[int]) -> int:
        """Blank and retired free blocks (PBKV's S_a), except those in `found`."""
        self._settle_uses()
        return self._order.spare() - self._order.spared(found) if self.switch.on else 0

    def filled_for(self, workflow: str, agents: Iterable[str], blocks: list[int]) -> None:
        """These blocks are filled for these agents of a workflow; no sharing is learnt from that."""
        self.settle()
        for agent in agents:
            self.switch.attempt(self._order.filled, workflow, agent, blocks)

    def _settle_uses(self) -> None:
        if self._used_again:
            used_again, self._used_again = self._used_again, []
            self.switch.attempt(self._order.remove, used_again)

    # Guarded by the switch.

    def _filled(self, request: EngineRequest, blocks: Sequence[Block]) -> None:
        self._unsettled.append((request.request_id, [block for block in blocks if block.block_hash is not None]))

    def _rank_for(self, n: int) -> None:
        """Ranks before n blocks are evicted, if that may take blocks that running workflows use."""
        if self._order.takes_active(n):
            self._pressed = _PRESSED_FOR
            self.rank()
        elif self._pressed:
            self._pressed -= 1

    def _all(self) -> list[Any]:
        return [self._blocks[block_id] for block_id in self._order]

    def _watch(self, given: list[int]) -> None:
        wanted = set(self._order.first(len(given)))
        self.watched["given up"] += len(given)
        self.watched["otherwise"] += len(wanted.difference(given))
        self._order.remove(given)
        for block_id in given:
            self._owned[block_id] = 0
        self._order.forget(given)

    def _written(self, request_id: str, blocks: Sequence[Block]) -> None:
        step = self._step_of(request_id)
        workflow, agent = (NO_WORKFLOW, "") if step is None else (step.workflow, step.agent)
        self._order.filled(workflow, agent, self._own(blocks))

    def _freed(self, blocks: Sequence[Block]) -> None:
        # Some cached blocks are never reported as filled, such as partial blocks; they have no owner.
        ids = [block.block_id for block in blocks]
        if not all(map(self._owned.__getitem__, ids)):
            strays = [block for block in blocks if not self._owned[block.block_id] and block.block_hash is not None]
            if strays:
                self._order.filled(NO_WORKFLOW, "", self._own(strays))
        self._order.append(ids)

    def _freed_blank(self, ids: list[int]) -> None:
        self._disown(ids)
        self._order.append(ids)

    def _own(self, blocks: Sequence[Block]) -> list[int]:
        ids = [block.block_id for block in blocks]
        for block_id in ids:
            self._owned[block_id] = 1
        return ids

    def _disown(self, ids: Iterable[int]) -> None:
        lost = [block_id for block_id in ids if self._owned[block_id]]
        for block_id in lost:
            self._owned[block_id] = 0
        self._order.forget(lost)
