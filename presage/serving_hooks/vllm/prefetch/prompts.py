"""Finds prompts that are likely to come next, known with certainty, and not cached.

A workflow is due from a new forecast until every prompt worth fetching is cached or cannot be cached. That bounds the
work per iteration, and the number of iterations between two forecasts that have work.

With a forecast of its return time, a workflow is fetched only when it may return soon: from a low quantile on, less the
time that its latest conversation takes to move. Of equally likely prompts that of the workflow that returns first comes
first. A sleeping engine cannot wake itself at that moment: if idle, it goes on with those that return next.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from presage.serving_hooks.policies.eviction import MOST_AGENTS, PRIOR_BLOCKS
from presage.serving_hooks.policies.next_use import ReturnCurve
from presage.serving_hooks.policies.score import UNIT, Lookahead
from presage.serving_hooks.vllm.engine import EnginePort, EngineRequest, can_be_repeated
from presage.serving_hooks.workflows.identity import Step

ENTRY: Final = 2048
"""Bytes counted for a conversation beside its tokens and hashes: names of up to 256 characters, and tables."""

CERTAIN: Final = 0.9
"""Share of repeated blocks from which a conversation counts as the beginning of the next prompt."""

_FRESH: Final = ((0, PRIOR_BLOCKS),) * 4
"""(repeated blocks, blocks) of: own prompt, own output, latest prompt, latest output."""

_MOST_VALUED: Final = 16
"""Workflows whose next prompts are valued in one iteration."""

_MOST_LOOKED_UP: Final = 8
"""The likeliest prompts of these workflows, which are looked up in the cache."""

_MAY_RETURN: Final = 0.1
"""Share of returns that come before the workflow counts as one that may return soon."""

_LEAST_CHANCE: Final = 0.01
"""Less likely agents are ignored, although the values of agents that share a prompt add up."""

Key = tuple[str, str]
"""A workflow, and an agent of it."""


class CachedConversation:
    """The prompt and the output of one completed request, in whole blocks.

    The hashes are kept and not recomputed, since vLLM may have included other data in them.

    Args:
        tokens: ids of the prompt and the output.
        hashes: of its whole blocks, all of one length.
        lookahead: tokens after a block that its hash covers too.

    Attributes:
        tokens: int32 [blocks · block + lookahead].
        stem: first blocks of the prompt that it shares with the agent's previous conversation.
    """

    __slots__ = ("_hashes", "_width", "prompt_blocks", "salt", "stem", "tokens")

    def __init__(
        self,
        tokens: Sequence[int],
        hashes: Sequence[bytes],
        prompt_tokens: int,
        block: int,
        salt: str | None,
        lookahead: int = 0,
    ) -> None:
        blocks = min(len(hashes), max(0, len(tokens) - lookahead) // block)
        self.tokens: NDArray[np.int32] = np.array(tokens[: blocks * block + lookahead], np.int32)
        self._hashes = b"".join(hashes[:blocks])
        self._width = len(hashes[0]) if blocks else 1
        self.prompt_blocks = min(blocks, max(0, prompt_tokens - lookahead) // block)
        self.salt = salt
        self.stem = 0

    def __len__(self) -> int:
        """Blocks."""
        return len(self._hashes) // self._width

    @property
    def size(self) -> int:
        """Bytes it counts for."""
        return self.tokens.nbytes + len(self._hashes) + ENTRY

    def hashes(self, blocks: int) -> list[bytes]:
        """Of its first blocks."""
        width = self._width
        return [self._hashes[i : i + width] for i in range(0, blocks * width, width)]

    def common(self, hashes: Sequence[bytes]) -> int:
        """Number of first blocks shared with a prompt of these hashes.

        A hash covers all blocks before it, so bisection finds the first difference in O(log blocks).
        """
        width = self._width

        def differs(block: int) -> bool:
            return self._hashes[block * width : (block + 1) * width] != hashes[block]

        return bisect_left(range(min(len(self), len(hashes))), True, key=differs)


class LastConversations:
    """The last conversation of each agent of each workflow; the least recently used is dropped first.

    Bounded: 4 bytes per token, one hash per block (32 bytes with SHA-256), and `ENTRY` for the tables around them.
    Texts are not kept, and nothing is written to disk.

    Attributes:
        bytes: of the kept conversations; never above `most_bytes`.
        dropped: conversations dropped to make room.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.bytes = self.dropped = 0
        self._kept: OrderedDict[Key, CachedConversation] = OrderedDict()
        self._agents: dict[str, dict[str, None]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, workflow: str, agent: str, conversation: CachedConversation) -> None:
        """Replaces the last conversation of an agent; it becomes the latest of the workflow."""
        before = self._drop((workflow, agent))
        if before is not None:
            conversation.stem = before.common(conversation.hashes(conversation.prompt_blocks))
        if conversation.size > self.most_bytes:
            return
        self._kept[workflow, agent] = conversation
        self._agents.setdefault(workflow, {})[agent] = None
        self.bytes += conversation.size
        while self.bytes > self.most_bytes:
            self._drop(next(iter(self._kept)))
            self.dropped += 1

    def own(self, workflow: str, agent: str) -> CachedConversation | None:
        """The agent's last conversation."""
        conversation = self._kept.get((workflow, agent))
        if conversation is not None:
            self._kept.move_to_end((workflow, agent))
        return conversation

    def latest(self, workflow: str) -> CachedConversation | None:
        """The workflow's last conversation, of any agent."""
        agent = next(reversed(self._agents.get(workflow, {})), None)
        return None if agent is None else self.own(workflow, agent)

    def end(self, workflow: str) -> None:
        """Forgets a workflow; unknown ones are ignored."""
        for agent in list(self._agents.get(workflow, ())):
            self._drop((workflow, agent))

    def __contains__(self, workflow: str) -> bool:
        return workflow in self._agents

    def _drop(self, key: Key) -> CachedConversation | None:
        conversation = self._kept.pop(key, None)
        if conversation is None:
            return None
        self.bytes -= conversation.size
        workflow, agent = key
        agents = self._agents[workflow]
        del agents[agent]
        if not agents:
            del self._agents[workflow]
        return conversation


Beginning = tuple[CachedConversation, int]
"""The first blocks of a conversation."""


class Habits:
    """Counts how the next prompt of an agent begins, for each workflow type and agent.

    A prompt may begin like the agent's own last prompt or, where prompts share a history, like the workflow's latest
    one; with or without the output that followed. This depends on the application, so each arriving prompt is compared
    with these, block by block. A beginning that matched in nearly all blocks counts as certain. Otherwise only the
    first blocks that an agent's last two prompts share are fetched. Counts halve at 2**16 blocks, since applications
    change.
    """

    def __init__(self, conversations: LastConversations) -> None:
        self._conversations = conversations
        self._counts: dict[tuple[str, str], tuple[tuple[int, int], ...]] = {}

    def arrives(self, workflow_type: str, workflow: str, agent: str, hashes: Sequence[bytes]) -> None:
        """A step has arrived, with a prompt whose whole blocks have these hashes."""
        own, latest = self._conversations.own(workflow, agent), self._conversations.latest(workflow)
        if latest is None:
            return
        key = workflow_type, agent
        counts = self._counts.get(key, _FRESH)
        if counts is _FRESH and len(self._counts) == MOST_AGENTS:
            return
        seen = (*_compared(own, hashes), *_compared(latest, hashes))
        self._counts[key] = tuple(_added(*pair) for pair in zip(counts, seen, strict=True))

    def next_prompt(self, workflow_type: str, workflow: str, agent: str) -> Beginning | None:
        """The conversation, and its number of first blocks, with which the agent's next prompt will begin."""
        own, latest = self._conversations.own(workflow, agent), self._conversations.latest(workflow)
        if latest is None:
            return None
        counts = self._counts.get((workflow_type, agent), _FRESH)
        own_prompt, own_output, latest_prompt, latest_output = (again >= CERTAIN * there for again, there in counts)
        best = latest, _known(latest, latest_prompt, latest_output)
        if own is not None:
            best = max((own, _known(own, own_prompt, own_output) or own.stem), best, key=lambda option: option[1])
        return best if best[1] else None


def _known(conversation: CachedConversation, prompt: bool, output: bool) -> int:
    """Blocks that will be repeated, if its prompt and its output are."""
    return (len(conversation) if output else conversation.prompt_blocks) if prompt else 0


def _compared(
    conversation: CachedConversation | None, hashes: Sequence[bytes]
) -> tuple[tuple[int, int], tuple[int, int]]:
    """(repeated blocks, blocks) of its prompt, and of its output."""
    if conversation is None:
        return (0, 0), (0, 0)
    common, prompt = conversation.common(hashes), conversation.prompt_blocks
    whole = common >= prompt  # an output counts only after a fully repeated prompt
    return (min(common, prompt), prompt), (common - prompt, len(conversation) - prompt) if whole else (0, 0)


def _added(count: tuple[int, int], seen: tuple[int, int]) -> tuple[int, int]:
    touched, there = count[0] + seen[0], count[1] + seen[1]
    return (touched // 2, there // 2) if there >= 2**16 else (touched, there)


class Prompt(NamedTuple):
    """The next prompt of some agents of a workflow, and its cached blocks.

    Attributes:
        step: of one of the agents; it owns the blocks that are fetched.
        value: the one-step value, the probability that one of the agents comes next.
        found: ids of the cached blocks.
    """

    step: Step
    value: float
    agents: frozenset[str]
    beginning: Beginning
    found: list[int]


class _Due(NamedTuple):
    """A workflow with a new forecast.

    Attributes:
        from_s: the moment from which it is fetched beside requests that decode; minus infinity for at once.
        back_s: the median moment of its return; minus infinity if unknown.
        reached: blocks of prompts that were cached before their last fetch; all blocks if no more can be cached.
        absent: prompts of which the connector has no more; only an idle engine can prefill them.
    """

    step: Step
    lookahead: Lookahead
    from_s: float
    back_s: float
    reached: dict[Beginning, int]
    absent: set[Beginning]


class ExpectedPrompts:
    """The conversations of workflows, and which workflows are due; prompts below `least_value` are not fetched.

    Attributes:
        next_s: the moment at which the next workflow may be fetched that `missing` has left out; infinity if none.
    """

    def __init__(self, port: EnginePort, least_value: float, most_bytes: int) -> None:
        self.memory = LastConversations(most_bytes)
        self._habits = Habits(self.memory)
        self._port, self._least_value = port, least_value
        self.next_s = math.inf
        self._due: dict[str, _Due] = {}
        self._queue: list[tuple[float, int, _Due]] = []  # a heap by `from_s`, then in order; stale ones are skipped
        self._number = 0

    def __len__(self) -> int:
        """Workflows that are due."""
        return len(self._due)

    def arrives(self, step: Step, request: EngineRequest) -> None:
        """A step has arrived."""
        self._habits.arrives(step.stats_key, step.workflow, step.agent, request.block_hashes)

    def completed(self, step: Step, request: EngineRequest) -> None:
        """A step has completed."""
        if can_be_repeated(request):
            tokens, hashes, prompt = request.all_token_ids, request.block_hashes, request.num_prompt_tokens
            block, lookahead = self._port.block_tokens, self._port.hash_lookahead
            conversation = CachedConversation(tokens, hashes, prompt, block, request.cache_salt, lookahead)
            self.memory.keep(step.workflow, step.agent, conversation)

    def forecast(
        self, step: Step, lookahead: Lookahead, returning: tuple[ReturnCurve, float] | None, tokens_per_s: float
    ) -> None:
        """A new forecast of the workflow that `step` belongs to.

        Args:
            returning: that of its return time, and since when it is away; None for none.
            tokens_per_s: that the channel moves; 0 if unknown.
        """
        self._forget(step.workflow)
        latest = self.memory.latest(step.workflow)
        if latest is None:
            return
        from_s = back_s = -math.inf
        if returning is not None:
            curve, since = returning
            lasts_s = len(latest.tokens) / tokens_per_s if tokens_per_s else 0.0
            from_s, back_s = since + curve.within_s(_MAY_RETURN) - lasts_s, since + curve.within_s(0.5)
        self._due[step.workflow] = due = _Due(step, lookahead, from_s, back_s, {}, set())
        self._number += 1
        heapq.heappush(self._queue, (from_s, self._number, due))
        if len(self._queue) > 64 + 2 * len(self._due):
            self._queue = [entry for entry in self._queue if self._stands(entry[-1])]
            heapq.heapify(self._queue)

    def end(self, workflow: str) -> None:
        """The workflow has ended."""
        self._forget(workflow)
        self.memory.end(workflow)

    def fetched(self, prompt: Prompt) -> None:
        """More of a prompt is being fetched; if the cache has no more of it later, it cannot be cached."""
        self._due[prompt.step.workflow].reached[prompt.beginning] = len(prompt.found)

    def absent(self, prompt: Prompt) -> None:
        """The connector has no more of a prompt."""
        self._due[prompt.step.workflow].absent.add(prompt.beginning)

    def refused(self, prompt: Prompt) -> None:
        """vLLM refused a prompt for lack of blocks."""
        self._forget(prompt.step.workflow)

    def missing(self, from_tier: bool, now: float) -> list[Prompt]:
        """The likeliest prompts with uncached blocks.

        With `from_tier`, beside requests that decode, only those that the connector may have, of workflows that may
        return soon.

        Costs O(agents) for each of `_MOST_VALUED` workflows and O(blocks) for each of `_MOST_LOOKED_UP` prompts.
        """
        valued: list[tuple[float, _Due, Beginning, set[str]]] = []
        for entry in self._next(now if from_tier else math.inf):
            due = entry[-1]
            likely = self._likely(due)
            if likely:
                heapq.heappush(self._queue, entry)
            else:
                del self._due[due.step.workflow]
            valued += (
                (value, due, beginning, agents)
                for value, beginning, agents in likely
                if not (from_tier and beginning in due.absent)
            )
        prompts = []
        valued.sort(key=lambda one: (-one[0], one[1].back_s))
        for value, due, beginning, agents in valued[:_MOST_LOOKED_UP]:
            conversation, blocks = beginning
            cached = self._port.cached(conversation.hashes(blocks))
            if due.reached.get(beginning, -1) < len(cached) < blocks:
                step = replace(due.step, agent=min(agents))
                prompts.append(Prompt(step, value, frozenset(agents), beginning, cached))
            else:
                due.reached[beginning] = blocks
        return prompts

    def _next(self, until_s: float) -> list[tuple[float, int, _Due]]:
        """Takes the first entries of the queue that are not after `until_s`; sets `next_s`."""
        entries: list[tuple[float, int, _Due]] = []
        queue = self._queue
        while queue and len(entries) < _MOST_VALUED and queue[0][0] <= until_s:
            entry = heapq.heappop(queue)
            if self._stands(entry[-1]):
                entries.append(entry)
        self.next_s = queue[0][0] if queue and queue[0][0] > until_s else math.inf
        return entries

    def _forget(self, workflow: str) -> None:
        due = self._due.pop(workflow, None)
        if due is not None:  # the queue still has it, but no conversation
            due.reached.clear()
            due.absent.clear()

    def _stands(self, due: _Due) -> bool:
        return self._due.get(due.step.workflow) is due

    def _likely(self, due: _Due) -> list[tuple[float, Beginning, set[str]]]:
        """(value, prompt, agents) of the next prompts in a workflow."""
        step, most = due.step, (self._port.longest - 1 - self._port.hash_lookahead) // self._port.block_tokens
        prompts: dict[Beginning, set[str]] = {}
        for agent in due.lookahead.next_agents(_LEAST_CHANCE):
            beginning = self._habits.next_prompt(step.stats_key, step.workflow, agent)
            if beginning is not None:
                prompts.setdefault((beginning[0], min(beginning[1], most)), set()).add(agent)
        return [
            (value, prompt, agents)
            for prompt, agents in prompts.items()
            if (value := due.lookahead.one_step(agents) / UNIT) >= self._least_value
            and due.reached.get(prompt, -1) < prompt[1]
        ]
