"""The scored order of free blocks in place of vLLM's: the same methods, and who touched which block.

vLLM's own queue stays underneath and hears of everything; the order of policies/eviction.py only says which block to
take out of it next. So the order can be wrong, or fail, and no block is lost or given away twice: what it names and
vLLM does not have as free ends the scored order, and the rest comes from vLLM's queue as ever. The price is one more
step a block.

Requests without a workflow are, all of them, one pseudo-workflow that is worth nothing to the forecasts: their blocks
come after all retired ones and before all that an active workflow is expected to touch, among themselves the least
recently used first, which is vLLM's own rule. An engine that serves no workflows therefore evicts as vLLM does.
(A pseudo-workflow for each request would turn the rule "fewer users first" into a count of uses, and blocks of long
conversations that are over would stay for ever.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any, Final

from presage.serving_hooks.policies.eviction import EvictionConfig, FreeOrder
from presage.serving_hooks.policies.score import NO_ROWS, Lookahead
from presage.serving_hooks.vllm.engine import Block, EngineRequest, FreeQueue
from presage.serving_hooks.vllm.modes import Switch
from presage.serving_hooks.workflows.identity import Step

NO_WORKFLOW: Final = ""
"""The pseudo-workflow; no workflow has this name, since all of theirs hold a separator."""

_NOTHING: Final = Lookahead({}, NO_ROWS, ())


class ScoredBlocks:
    """Free blocks by score, with the methods of vLLM's free-block queue, and the attribution of blocks to workflows.

    Args:
        queue: vLLM's queue as it stands.
        blocks: all blocks of the pool, each at its id.
        config: of the order.
        step_of: the step a request is, by request id; None for one without a workflow.
        switch: off once the order has failed.

    Attributes:
        acts: without, vLLM's own queue chooses, and the order only watches.
        watched: blocks given up while it watched, and how many of them it would have kept for others.
    """

    def __init__(
        self,
        queue: FreeQueue,
        blocks: Sequence[Any],
        config: EvictionConfig,
        step_of: Callable[[str], Step | None],
        switch: Switch,
    ) -> None:
        self.switch = switch
        self.acts = True
        self.watched: Counter[str] = Counter()
        self._config = config
        self._queue = queue
        self._blocks = blocks
        self._step_of = step_of
        self._owned = bytearray(len(blocks))
        self._unsettled: list[tuple[str, Sequence[Block]]] = []
        self.begin()

    def begin(self) -> None:
        """Begins anew, from what vLLM's queue holds now; whose it was is not known any more."""
        self._unsettled.clear()
        self._owned = bytearray(len(self._blocks))
        self._order = FreeOrder(len(self._blocks), self._config)
        self._order.forecast("", NO_WORKFLOW, _NOTHING)
        self._freed(self._queue.get_all_free_blocks())

    @property
    def vllms(self) -> FreeQueue:
        """vLLM's own queue."""
        return self._queue

    @property
    def given_up(self) -> dict[str, int]:
        """Blocks given up, by what they were (policies/eviction.py, `CLASSES`); those of requests without a workflow
        are the worthless ones. What vLLM's queue gave, where the order has failed, is not counted."""
        return self._order.given_up

    # What vLLM's pool calls.

    num_free_blocks: property = property(attrgetter("_queue.num_free_blocks"), doc="Free blocks.")
    """Asked some seventy times an iteration, so without a frame of its own."""

    def popleft(self) -> Any:
        """The next free block to be given up.

        Raises:
            ValueError: there is none.
        """
        if not self._queue.num_free_blocks:
            raise ValueError("No free blocks available")  # vLLM's words
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[Any]:
        """The next n free blocks to be given up."""
        given: list[Any] = []
        if self.switch.on and not self.acts:
            return self._popped_by_vllm(n)
        if self.switch.on and n <= self._queue.num_free_blocks:
            try:
                for block_id in self._order.pop(n):
                    block = self._blocks[block_id]
                    self._queue.remove(block)  # raises where the block is not free
                    given.append(block)
                    self._owned[block_id] = 0
            except Exception as error:
                self.switch.off(error)
        return given + self._queue.popleft_n(n - len(given)) if len(given) < n else given

    def remove(self, block: Any) -> None:
        """A free block is in use again."""
        self._queue.remove(block)
        if self.switch.on:  # not by `attempt`: this is called for every block that is found in the cache
            try:
                self._order.remove(block.block_id)
            except Exception as error:
                self.switch.off(error)

    def append(self, block: Any) -> None:
        """A block is free, and keeps what it holds until it is given up."""
        self.append_n([block])

    def append_n(self, blocks: list[Any]) -> None:
        """These blocks are free, and keep what they hold until they are given up."""
        self.settle()
        self._queue.append_n(blocks)
        self.switch.attempt(self._freed, blocks)

    def prepend_n(self, blocks: list[Any]) -> None:
        """These blocks are free and hold nothing."""
        self.settle()
        self._queue.prepend_n(blocks)
        self.switch.attempt(self._freed_blank, [block.block_id for block in blocks])

    def get_all_free_blocks(self) -> list[Any]:
        """All free blocks, the next to be given up first."""
        if self.switch.on and self.acts:
            try:
                return [self._blocks[block_id] for block_id in self._order]
            except Exception as error:
                self.switch.off(error)
        return self._queue.get_all_free_blocks()

    def iter_blocks_after(self, cursor: Any | None) -> Iterator[Any]:
        """Free blocks in the order they are given up, those after `cursor`; all, if it is None or not free."""
        blocks = self.get_all_free_blocks()
        at = next((i for i, block in enumerate(blocks) if block is cursor), -1)
        return iter(blocks[at + 1 :])

    # What the hooks of the pool tell.

    def filled(self, request: EngineRequest, blocks: Sequence[Block]) -> None:
        """A request has written blocks that the cache knows now. They are in use: whose they are can wait."""
        self._unsettled.append((request.request_id, blocks))

    def settle(self) -> None:
        """Whose the blocks are that were written since the last time; done before anything hangs on it."""
        if self._unsettled:
            unsettled, self._unsettled = self._unsettled, []
            for written in unsettled:
                self.switch.attempt(self._written, *written)

    def lost(self, blocks: Iterable[int]) -> None:
        """What these blocks held is not in the cache any more, be they free or in use."""
        self.settle()
        self.switch.attempt(self._disown, blocks)

    # What is known of workflows.

    def begins(self, request_id: str, found: list[int]) -> None:
        """A request is selected for the first time, with these blocks of its prompt found."""
        self.settle()
        self.switch.attempt(self._found, request_id, found)

    def forecast(self, step: Step, lookahead: Lookahead) -> None:
        """A new forecast of the workflow that `step` belongs to."""
        self.settle()
        self.switch.attempt(self._order.forecast, step.stats_key, step.workflow, lookahead)

    def end(self, workflow: str) -> None:
        """A workflow has ended."""
        self.settle()
        self.switch.attempt(self._order.end, workflow)

    def explain(self, workflow: str) -> dict[str, Any] | None:
        """How many blocks a workflow uses, and where they stand in the order; None where that is off."""
        self.settle()
        if not self.switch.on:
            return None
        groups = self._order.explain(workflow)
        return {
            "blocks": sum(group["blocks"] for group in groups),
            "free": sum(group["free"] for group in groups),
            "all_free": self.num_free_blocks,
            "groups": groups,
        }

    # What a prefetch asks and tells.

    def spare(self, found: Iterable[int]) -> int:
        """S_a, blank and retired free blocks, without those of `found`, which a prefetch would take for itself."""
        return self._order.spare() - self._order.spared(found) if self.switch.on else 0

    def fetched(self, workflow: str, agents: Iterable[str], blocks: list[int]) -> None:
        """These blocks are in use for a prefetch, by those it was fetched for; no sharing is learnt from that."""
        self.settle()
        for agent in agents:
            self.switch.attempt(self._order.filled, workflow, agent, blocks)

    # What the switch guards.

    def _popped_by_vllm(self, n: int) -> list[Any]:
        given = self._queue.popleft_n(n)
        self.switch.attempt(self._watch, [block.block_id for block in given])
        return given

    def _watch(self, given: list[int]) -> None:
        wanted = set(self._order.first(len(given)))
        self.watched["given up"] += len(given)
        self.watched["otherwise"] += len(wanted.difference(given))
        for block_id in given:
            self._order.remove(block_id)
            self._owned[block_id] = 0
        self._order.forget(given)

    def _found(self, request_id: str, found: list[int]) -> None:
        # vLLM has cached by now what the step will write; those blocks are its agent's own and not counted.
        step = self._step_of(request_id)
        if step is None:
            self._order.filled(NO_WORKFLOW, "", found)
        else:
            self._order.found(step.stats_key, step.workflow, step.agent, found)

    def _written(self, request_id: str, blocks: Sequence[Block]) -> None:
        step = self._step_of(request_id)
        workflow, agent = (NO_WORKFLOW, "") if step is None else (step.workflow, step.agent)
        self._order.filled(workflow, agent, self._own(blocks))

    def _freed(self, blocks: Sequence[Block]) -> None:
        # What the cache knows and nobody has claimed came by a way we do not watch, a partial block for one.
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
