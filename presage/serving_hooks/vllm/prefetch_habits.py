"""How the next prompt of an agent begins: counted, a workflow type and an agent at a time.

A prompt can begin as the agent's own last one did, or, where prompts begin with the common history, as the latest of
the workflow, whoever had it; and with or without what was answered there. Which of these holds is for the application
to decide, so each time a step arrives, its prompt is compared with what there was, block by block. What has held for
nearly all blocks counts as certain; nothing else is fetched but the first blocks an agent was asked twice in a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from presage.serving_hooks.policies.eviction import MOST_AGENTS, PRIOR_BLOCKS
from presage.serving_hooks.vllm.prefetch_memory import Conversation, Conversations

CERTAIN: Final = 0.9
"""Share of blocks that came again, from which on a conversation counts as the beginning of the next prompt."""

_FRESH: Final = ((0, PRIOR_BLOCKS),) * 4
"""(blocks that came again, blocks there were) of: own prompt, own output, latest prompt, latest output."""


Beginning = tuple[Conversation, int]
"""The first blocks of a conversation."""


class Habits:
    """Counts of all workflow types, and what follows from them. Counts halve at 2**16 blocks: applications change."""

    def __init__(self, conversations: Conversations) -> None:
        self._conversations = conversations
        self._counts: dict[tuple[str, str], tuple[tuple[int, int], ...]] = {}

    def arrives(self, workflow_type: str, workflow: str, agent: str, hashes: Sequence[bytes]) -> None:
        """A step has come, with a prompt whose whole blocks have these hashes."""
        own, latest = self._conversations.own(workflow, agent), self._conversations.latest(workflow)
        if latest is None:
            return
        key = workflow_type, agent
        counts = self._counts.get(key)
        if counts is None:
            if len(self._counts) == MOST_AGENTS:
                return
            counts = _FRESH
        seen = (*_compared(own, hashes), *_compared(latest, hashes))
        self._counts[key] = tuple(_added(*pair) for pair in zip(counts, seen, strict=True))

    def next_prompt(self, workflow_type: str, workflow: str, agent: str) -> Beginning | None:
        """A conversation and how many of its first blocks the agent's next prompt in this workflow will begin with."""
        own, latest = self._conversations.own(workflow, agent), self._conversations.latest(workflow)
        counts = self._counts.get((workflow_type, agent), _FRESH)
        own_prompt, own_output, latest_prompt, latest_output = (again >= CERTAIN * there for again, there in counts)
        options: list[Beginning] = []
        if own is not None:
            options.append((own, _known(own, own_prompt, own_output) or own.stem))
        if latest is not None:
            options.append((latest, _known(latest, latest_prompt, latest_output)))
        best = max(options, key=lambda option: option[1], default=None)
        return best if best is not None and best[1] else None


def _known(conversation: Conversation, prompt: bool, output: bool) -> int:
    """Blocks that will come again, if its prompt does, and its output."""
    return (len(conversation) if output else conversation.prompt_blocks) if prompt else 0


def _compared(conversation: Conversation | None, hashes: Sequence[bytes]) -> tuple[tuple[int, int], tuple[int, int]]:
    """(blocks that came again, blocks that could have) of its prompt, and of its output."""
    if conversation is None:
        return (0, 0), (0, 0)
    common, prompt = conversation.common(hashes), conversation.prompt_blocks
    whole = common >= prompt  # where the prompt did not come again, nothing is learnt of the output
    return (min(common, prompt), prompt), (common - prompt, len(conversation) - prompt) if whole else (0, 0)


def _added(count: tuple[int, int], seen: tuple[int, int]) -> tuple[int, int]:
    touched, there = count[0] + seen[0], count[1] + seen[1]
    return (touched // 2, there // 2) if there >= 2**16 else (touched, there)
