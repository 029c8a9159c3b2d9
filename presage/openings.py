"""Which workflow a prompt of a further agent is of, by what it is given: the question that began one, or an argument.

`presage/continuation.py` knows a workflow by its answers, from 31 tokens on. Agents that answer side by side, or that a
router calls, hold no answer yet, but they are given the question that the workflow began with, alone or in a template
of their own; an agent that is called as a tool is given the argument of the call, often a single line.

A prompt is its template and what was asked; tokens do not say which is which. So what prompts that began other
workflows hold too is template, and the rest is its own. Of the prompt that began a workflow, all that is its own must
stand in the prompt of another agent; or all that is this one's own in an answer of the workflow that its prompt did not
hold. What touches the template around it is left out. A template of which only one workflow is known identifies
nothing, nor does what two workflows have.

Only keyed hashes of eight tokens are kept.
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
"""Tokens that are kept, at the end of a prompt that began a workflow and of answers."""
LOOKED_UP: Final = 512
"""Tokens at the beginning and at the end of a prompt that are compared."""
WINDOW: Final = 8
LEAST: Final = 12
"""Windows of a workflow's own, so 19 tokens."""
ACTIVE_S: Final = 180.0
"""Seconds since the latest request of a workflow within which its opening is compared, as at the gateway."""
MOST_KEPT: Final = 1024
"""Workflows, the latest ones: 2 KiB each."""
_MOST_AGENTS: Final = 64
_SLOTS: Final = 2**18
_NUMBERS: Final = 2**32 - 1


@dataclass(slots=True)
class _Opening(Generic[Known]):
    """How a workflow began: hashes of the windows of its first prompt, those of its first tokens first."""

    workflow: Known
    windows: Hashes
    agents: set[str] = field(default_factory=set)


class _Owned:
    """Whose a hash is: 0 of several workflows. A later hash takes the slot of an earlier one."""

    def __init__(self) -> None:
        self._shift = np.uint64(65 - _SLOTS.bit_length())
        self._hashes = np.zeros(_SLOTS, np.uint64)
        self._owners = np.zeros(_SLOTS, np.uint32)

    def add(self, windows: Hashes, mine: int) -> None:
        known, owners = self.of(windows)
        places = windows >> self._shift
        self._hashes[places] = windows
        self._owners[places] = np.where(known & (owners != np.uint32(mine)), np.uint32(0), np.uint32(mine))

    def of(self, windows: Hashes) -> tuple[NDArray[np.bool_], NDArray[np.uint32]]:
        """Which hashes are known, and their owners; 0 too for those that are not."""
        places = windows >> self._shift
        known: NDArray[np.bool_] = self._hashes[places] == windows
        return known, np.where(known, self._owners[places], np.uint32(0))


class Openings(Generic[Known]):
    """The prompts that began workflows, and the ends of answers, as hashes.

    Args:
        index: knows which workflows run, and hashes.
    """

    def __init__(self, index: PromptIndex[Known]) -> None:
        self._index = index
        self._kept: OrderedDict[int, _Opening[Known]] = OrderedDict()
        self._begun, self._said = _Owned(), _Owned()

    def begins(self, of: Known, prompt: TokenPrompt) -> None:
        """The workflow has begun with this prompt."""
        parts, mine = (slice(TEMPLATE), slice(-OPENING, None)), of.number & _NUMBERS
        windows = np.concatenate([self._windows(prompt, part) for part in parts])
        self._begun.add(windows, mine)
        self._kept[mine] = _Opening(of, windows)
        if len(self._kept) > MOST_KEPT:
            self._kept.popitem(last=False)

    def step(self, of: Known, agent: str) -> None:
        """A request of this agent is of the workflow."""
        opening = self._kept.get(of.number & _NUMBERS)
        if opening is not None and len(opening.agents) < _MOST_AGENTS:
            opening.agents.add(agent)

    def answered(self, of: Known, both: TokenPrompt, prompt_tokens: int) -> None:
        """A prompt of the workflow was answered: tokens are those of `both`, one after the other."""
        mine, start = of.number & _NUMBERS, max(0, prompt_tokens - LOOKED_UP)
        if mine not in self._kept:
            return
        windows, place = self._windows(both, slice(start, None)), prompt_tokens - start
        said = windows[max(place, len(windows) - OPENING) :]
        own = np.concatenate((windows[:place], self._windows(both, slice(min(start, LOOKED_UP)))))
        self._said.add(said[~_among(said, own)], mine)

    def find(self, prompt: TokenPrompt, agent: str, now: float) -> Known | None:
        """The only workflow, active of late and without this agent, that gave it what the prompt holds."""
        behind = max(TEMPLATE, len(prompt.tokens) - LOOKED_UP)
        tail = self._windows(prompt, slice(behind, None))
        held = np.concatenate((self._windows(prompt, slice(TEMPLATE, max(TEMPLATE, min(LOOKED_UP, behind)))), tail))
        opening = self._most(self._begun.of(held)[1], agent, now)
        if opening is not None:
            known, owners = self._begun.of(opening.windows)
            own = ~known | (owners == opening.workflow.number & _NUMBERS)
            has_template = not own[: TEMPLATE - WINDOW + 1].any()
            if has_template and _whole(_among(opening.windows[own], held)):
                return opening.workflow
        asked = tail[-OPENING:]
        owners = self._said.of(asked[~self._begun.of(asked)[0]])[1]
        caller = self._most(owners, agent, now)
        if caller is None or not _whole(owners == caller.workflow.number & _NUMBERS):
            return None
        return caller.workflow

    def _most(self, owners: NDArray[np.uint32], agent: str, now: float) -> _Opening[Known] | None:
        """The workflow with twice as many of the windows as any other that this agent may join."""
        numbers, times = np.unique(owners[owners != 0], return_counts=True)
        fits = [
            (n, number)
            for n, number in zip(times.tolist(), numbers.tolist(), strict=True)
            if n >= LEAST and (opening := self._kept.get(number)) is not None and self._may_join(opening, agent, now)
        ]
        if not fits or sum(2 * n > max(fits)[0] for n, _ in fits) > 1:
            return None
        return self._kept[max(fits)[1]]

    def _may_join(self, opening: _Opening[Known], agent: str, now: float) -> bool:
        of = opening.workflow
        known = self._index.get(of.number) is of
        return known and agent not in opening.agents and now - of.active_at <= ACTIVE_S

    def _windows(self, prompt: TokenPrompt, part: slice) -> Hashes:
        return self._index.windows_of(prompt, part, WINDOW)


def _among(some: Hashes, others: Hashes) -> NDArray[np.bool_]:
    if not len(others):
        return np.zeros(len(some), np.bool_)
    ordered = np.sort(others)
    among: NDArray[np.bool_] = ordered[np.minimum(np.searchsorted(ordered, some), len(ordered) - 1)] == some
    return among


def _whole(told: NDArray[np.bool_]) -> bool:
    """Whether all windows are told but those at the edges, which hold tokens of the template around them."""
    return bool(np.sum(told) >= LEAST and told[WINDOW:-WINDOW].all())
