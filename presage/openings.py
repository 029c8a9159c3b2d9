"""Which workflow a prompt of a further agent is of: one that began with a message which stands in it.

`presage/continuation.py` knows a workflow by its answers. Agents that answer side by side, or that a router calls, hold
no answer yet, but they are given the question that the workflow began with, alone or in a template of their own.

A prompt is its template and what a user asked; tokens do not say which is which. So what prompts that began other
workflows hold too is template, and the rest of the prompt that began a workflow is its own. All of this must stand in
the prompt of another agent, but for what touches the template around it. A template of which only one workflow is known
identifies nothing, nor does a question that two workflows began with.

Only keyed hashes of eight tokens are kept. A hash whose slot was taken by another one counts as the workflow's own.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final, Generic

import numpy as np
from numpy.typing import NDArray

from presage.continuation import Hashes, Known, PromptIndex, TokenPrompt

TEMPLATE: Final = 16
"""Tokens at the beginning of a prompt by which an agent is known where nothing else tells it; the same for all that it
is asked, else the prompt began with a question and identifies nothing."""
OPENING: Final = 256
"""Tokens at the end of a prompt that began a workflow that are kept."""
LOOKED_UP: Final = 512
"""Tokens at the beginning and at the end of a prompt that are compared with them."""
WINDOW: Final = 8
LEAST: Final = 12
"""Windows of a workflow's own, so 19 tokens."""
ACTIVE_S: Final = 180.0
"""Seconds since the latest request of a workflow within which its opening is compared, as at the gateway."""
MOST_KEPT: Final = 1024
"""Openings, the latest ones: 2 KiB each."""
_SLOTS: Final = 2**18
_NUMBERS: Final = 2**32 - 1


@dataclass(slots=True)
class _Opening(Generic[Known]):
    """How a workflow began: hashes of the windows of its first prompt, those of its first tokens first."""

    workflow: Known
    windows: Hashes
    agents: set[str] = field(default_factory=set)


class Openings(Generic[Known]):
    """The prompts that began workflows, as hashes.

    Args:
        index: knows which workflows run, and hashes.
    """

    def __init__(self, index: PromptIndex[Known]) -> None:
        self._index = index
        self._kept: OrderedDict[int, _Opening[Known]] = OrderedDict()
        self._shift = np.uint64(65 - _SLOTS.bit_length())
        self._hashes = np.zeros(_SLOTS, np.uint64)
        self._owners = np.zeros(_SLOTS, np.uint32)  # 0: several

    def begins(self, of: Known, prompt: TokenPrompt) -> None:
        """The workflow has begun with this prompt."""
        head, tail = (self._index.windows_of(prompt, part, WINDOW) for part in (slice(TEMPLATE), slice(-OPENING, None)))
        windows, mine = np.concatenate((head, tail)), of.number & _NUMBERS
        others = self._of_others(windows, mine)
        places = windows >> self._shift
        self._hashes[places] = windows
        self._owners[places] = np.where(others, np.uint32(0), np.uint32(mine))
        self._kept[mine] = _Opening(of, windows)
        if len(self._kept) > MOST_KEPT:
            self._kept.popitem(last=False)

    def step(self, of: Known, agent: str) -> None:
        """A request of this agent is of the workflow."""
        opening = self._kept.get(of.number & _NUMBERS)
        if opening is not None:
            opening.agents.add(agent)

    def find(self, prompt: TokenPrompt, agent: str, now: float) -> Known | None:
        """The only workflow, active of late and without this agent, whose whole opening stands in the prompt."""
        ends = slice(TEMPLATE, LOOKED_UP), slice(max(LOOKED_UP, len(prompt.tokens) - LOOKED_UP), None)
        held = np.concatenate([self._index.windows_of(prompt, part, WINDOW) for part in ends])
        places = held >> self._shift
        owners = np.where(self._hashes[places] == held, self._owners[places], np.uint32(0))
        numbers, times = np.unique(owners[owners != 0], return_counts=True)
        fits = [
            (n, number)
            for n, number in zip(times.tolist(), numbers.tolist(), strict=True)
            if n >= LEAST and (opening := self._kept.get(number)) is not None and self._may_join(opening, agent, now)
        ]
        if not fits:
            return None
        most, number = max(fits)
        opening = self._kept[number]
        own = ~self._of_others(opening.windows, number)
        has_template = not own[: TEMPLATE - WINDOW + 1].any()
        told = np.isin(opening.windows[own], held)
        whole = has_template and np.sum(told) >= LEAST and bool(told[WINDOW:-WINDOW].all())
        return opening.workflow if whole and sum(2 * n > most for n, _ in fits) == 1 else None

    def _may_join(self, opening: _Opening[Known], agent: str, now: float) -> bool:
        of = opening.workflow
        known = self._index.get(of.number) is of
        return known and agent not in opening.agents and now - of.active_at <= ACTIVE_S

    def _of_others(self, windows: Hashes, mine: int) -> NDArray[np.bool_]:
        places = windows >> self._shift
        others: NDArray[np.bool_] = (self._hashes[places] == windows) & (self._owners[places] != np.uint32(mine))
        return others
