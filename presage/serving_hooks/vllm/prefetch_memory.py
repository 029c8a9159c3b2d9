"""What the agents of workflows were last asked, kept so that it can be read into the cache again before they are.

Of a request that has completed: its token ids, the hashes vLLM gave their blocks, and what it was salted with. Hashes
are kept, not computed again: they say whether a block is in the cache, and they hold whatever else vLLM put into them.
Only whole blocks are kept, nothing else of a request.

Bounded: 4 bytes a token, the width of a hash a block (32 bytes with SHA-256), and `ENTRY` for what stands around them.
What was last used longest ago is dropped first. Texts are not kept, and nothing is written anywhere.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

ENTRY: Final = 2048
"""Bytes counted for a conversation beside its tokens and hashes: names of up to 256 characters, and tables."""

Key = tuple[str, str]
"""A workflow, and an agent of it."""


class Conversation:
    """The prompt and the output of one request, in whole blocks.

    Args:
        tokens: ids of the prompt and the output.
        hashes: of its whole blocks, all of one length.
        prompt_tokens: how many of the tokens are the prompt's.
        block: tokens of a block.
        salt: vLLM's `cache_salt` of the request.

    Attributes:
        tokens: int32 [blocks · block].
        prompt_blocks: whole blocks of the prompt.
        stem: first blocks of the prompt that the agent's conversation before began with too.
    """

    __slots__ = ("_hashes", "_width", "prompt_blocks", "salt", "stem", "tokens")

    def __init__(
        self, tokens: Sequence[int], hashes: Sequence[bytes], prompt_tokens: int, block: int, salt: str | None
    ) -> None:
        blocks = min(len(hashes), len(tokens) // block)
        self.tokens: NDArray[np.int32] = np.array(tokens[: blocks * block], np.int32)
        self._hashes = b"".join(hashes[:blocks])
        self._width = len(hashes[0]) if blocks else 1
        self.prompt_blocks = min(blocks, prompt_tokens // block)
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
        """First blocks it shares with a prompt of these hashes. A hash stands for all before it, so bisection finds it.

        Costs O(log blocks).
        """
        low, high, width = 0, min(len(self), len(hashes)), self._width
        while low < high:
            middle = (low + high + 1) // 2
            if self._hashes[(middle - 1) * width : middle * width] == hashes[middle - 1]:
                low = middle
            else:
                high = middle - 1
        return low


class Conversations:
    """The last conversation of each agent of each workflow, the one used longest ago first.

    Args:
        most_bytes: of all of them.

    Attributes:
        bytes: of those there are; never above `most_bytes`.
        dropped: those that had to make room.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.bytes = self.dropped = 0
        self._kept: OrderedDict[Key, Conversation] = OrderedDict()
        self._agents: dict[str, dict[str, None]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, workflow: str, agent: str, conversation: Conversation) -> None:
        """The last conversation of an agent, in place of the one before; it is the latest of the workflow."""
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

    def own(self, workflow: str, agent: str) -> Conversation | None:
        """The agent's last one."""
        found = self._kept.get((workflow, agent))
        if found is not None:
            self._kept.move_to_end((workflow, agent))
        return found

    def latest(self, workflow: str) -> Conversation | None:
        """The last one of the workflow, whoever had it."""
        agent = next(reversed(self._agents.get(workflow, {})), None)
        return None if agent is None else self.own(workflow, agent)

    def end(self, workflow: str) -> None:
        """The workflow has ended; no error if it is not there."""
        for agent in list(self._agents.get(workflow, ())):
            self._drop((workflow, agent))

    def __contains__(self, workflow: str) -> bool:
        return workflow in self._agents

    def _drop(self, key: Key) -> Conversation | None:
        found = self._kept.pop(key, None)
        if found is None:
            return None
        self.bytes -= found.size
        workflow, agent = key
        agents = self._agents[workflow]
        del agents[agent]
        if not agents:
            del self._agents[workflow]
        return found
