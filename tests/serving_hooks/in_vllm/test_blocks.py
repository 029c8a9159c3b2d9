"""The scored queue over vLLM's own: what it answers, and what becomes of blocks that came by an unwatched way."""

from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; these tests use its queue of free blocks")

from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock

from presage.serving_hooks.counts import EventCounts
from presage.serving_hooks.modes import Switch
from presage.serving_hooks.policies.eviction import EvictionConfig
from presage.serving_hooks.vllm.blocks import ScoredBlocks
from presage.serving_hooks.workflows import EndReason, Workflow
from presage.serving_hooks.workflows.identity import Step

pytestmark = pytest.mark.vllm
STEPS = {"r": Step("review", "w1", "coder")}


def scored(blocks: int) -> tuple[ScoredBlocks, list[KVCacheBlock]]:
    all_ = [KVCacheBlock(number) for number in range(blocks)]
    queue = FreeKVCacheBlockQueue(list(all_))
    switch = Switch("eviction", EventCounts())
    return ScoredBlocks(queue, all_, EvictionConfig(), STEPS.get, switch, lambda: 0.0), all_


class Request:
    def __init__(self, request_id: str) -> None:
        self.request_id = request_id


def ids(blocks: Any) -> list[int]:
    return [block.block_id for block in blocks]


def known(blocks: list[KVCacheBlock]) -> list[KVCacheBlock]:
    """The cache knows what these hold."""
    for block in blocks:
        block.set_block_hash(b"%d" % block.block_id)
    return blocks


def test_what_the_cache_knows_is_not_blank_though_nobody_claimed_it() -> None:
    queue, _ = scored(6)
    stray, blank = known(queue.popleft_n(2)), queue.popleft_n(2)
    queue.append_n(stray)
    queue.prepend_n(blank)
    assert ids(queue.get_all_free_blocks()) == [4, 5, 2, 3, 0, 1]
    assert ids(queue.popleft_n(6)) == [4, 5, 2, 3, 0, 1]


def test_blocks_without_a_workflow_come_between_retired_and_active_ones() -> None:
    queue, _ = scored(6)
    own, other, nobodys = (known(queue.popleft_n(2)) for _ in range(3))
    queue.filled(Request("r"), own)
    STEPS["ended"] = Step("review", "w2", "coder")
    queue.filled(Request("ended"), other)
    queue.filled(Request("a stranger"), nobodys)
    for blocks in (own, nobodys, other):
        queue.append_n(blocks)
    queue.workflow_ended(Workflow(STEPS.pop("ended"), 0.0, 0.0), EndReason.FINISHED)
    assert ids(queue.popleft_n(6)) == [*ids(other), *ids(nobodys), *ids(own)]
    assert queue.num_free_blocks == 0


def test_what_is_lost_is_the_first_to_be_given_up() -> None:
    queue, _ = scored(4)
    own = known(queue.popleft_n(2))
    queue.filled(Request("r"), own)
    queue.append_n(own)
    queue.lost({1, 3})
    assert ids(queue.popleft_n(4)) == [2, 3, 1, 0]


def test_blocks_after_a_cursor_are_those_given_up_after_it() -> None:
    queue, blocks = scored(4)
    assert ids(queue.iter_blocks_after(None)) == [0, 1, 2, 3]
    assert ids(queue.iter_blocks_after(blocks[1])) == [2, 3]
    queue.remove(blocks[1])
    assert ids(queue.iter_blocks_after(blocks[1])) == [0, 2, 3]
    queue.append(blocks[1])
    assert ids(queue.iter_blocks_after(blocks[2])) == [3, 1]


def test_an_empty_queue_says_what_vllm_says() -> None:
    queue, _ = scored(1)
    assert queue.popleft_n(0) == []
    assert queue.popleft().block_id == 0
    with pytest.raises(ValueError, match="No free blocks available"):
        queue.popleft()
    with pytest.raises(AssertionError):
        queue.popleft_n(1)
    assert queue.switch.on


def test_forecasts_are_asked_for_when_blocks_of_running_workflows_may_go() -> None:
    queue, _ = scored(8)
    asked: list[int] = []
    queue.rank = lambda: asked.append(queue.num_free_blocks)
    own = known(queue.popleft_n(3))
    queue.filled(Request("r"), own)
    STEPS["ended"] = Step("review", "w2", "coder")
    other = known(queue.popleft_n(2))
    queue.filled(Request("ended"), other)
    queue.append_n(own)
    queue.append_n(other)
    queue.workflow_ended(Workflow(STEPS.pop("ended"), 0.0, 0.0), EndReason.FINISHED)
    assert ids(queue.popleft_n(3)) == [5, 6, 7]
    assert ids(queue.popleft_n(2)) == ids(other)
    assert not asked, "blank blocks, and those of an ended workflow"
    assert not queue.pressed
    assert ids(queue.popleft_n(1)) == [own[0].block_id]
    assert asked == [3]
    assert queue.pressed
