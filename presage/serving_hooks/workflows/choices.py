"""The requests that vLLM makes of one with `n` > 1: together they are one step of a workflow.

vLLM's front adds them at once as `0_ID`, `1_ID`, …, all with the metadata of the client's request. The step begins with
the first of them that is selected, and completes with the last that leaves; its output tokens are those of all choices,
as `usage` of the API and traces have them. A choice that arrives after all others have left belongs to no
step any more: a short one may be done before vLLM's front has added the next.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass
from typing import Final, NamedTuple

from presage.serving_hooks.workflows.identity import Step

_CHOICE: Final = re.compile(r"[0-9]+_(.+)", re.DOTALL)
_LEFT_KEPT: Final = 64
"""Steps that have left and of which a choice may still arrive: milliseconds later."""


def parent_of(request_id: str) -> str | None:
    """The client's request of which vLLM has made this one; None if it is no such choice."""
    found = _CHOICE.fullmatch(request_id)
    return None if found is None else found[1]


class LeftStep(NamedTuple):
    """A step of which no request is in the engine any more.

    Attributes:
        request_id: the request with which it began.
        completed: whether any choice has its last token.
        output_tokens: of all choices; None where the server did not tell.
        finish_reason: that of the first choice to leave.
    """

    request_id: str
    completed: bool
    output_tokens: int | None
    finish_reason: str | None


@dataclass(slots=True)
class _OpenStep:
    parent: str
    step: Step
    running: int = 0
    began_as: str | None = None
    completed: bool = False
    output_tokens: int = 0
    finish_reason: str | None = None
    ranking: float | None = None
    has_left: bool = False


class Choices:
    """The open steps of several choices. A request that is no such choice is a step of its own."""

    def __init__(self) -> None:
        self._by_parent: dict[str, _OpenStep] = {}
        self._of: dict[str, _OpenStep] = {}
        self._left: deque[str] = deque()

    def __len__(self) -> int:
        return len(self._of)

    def clear(self) -> None:
        """Forgets all steps."""
        self._by_parent.clear()
        self._of.clear()
        self._left.clear()

    def arrives(self, request_id: str, step: Step) -> bool:
        """A request of this step arrives; returns whether the step does, or it is a further choice of it."""
        parent = parent_of(request_id)
        if parent is None:
            return True
        known = self._by_parent.get(parent)
        if known is None or known.step != step:
            known = self._by_parent[parent] = _OpenStep(parent, step)
        known.running += 1
        self._of[request_id] = known
        return known.running == 1 and not known.has_left

    def begins(self, request_id: str) -> bool:
        """A request is selected for the first time; returns whether the step begins with it. May be called again."""
        known = self._of.get(request_id)
        if known is None:
            return True
        known.began_as = known.began_as or request_id
        return known.began_as == request_id

    def ranked(self, request_id: str, ranking: float | None) -> None:
        """The remaining tokens by which the step is ranked."""
        known = self._of.get(request_id)
        if known is not None:
            known.ranking = ranking

    def ranking(self, request_id: str) -> tuple[float | None] | None:
        """The ranking of the step if another choice of it has one; None if this request asks first."""
        known = self._of.get(request_id)
        return (known.ranking,) if known is not None and (known.running > 1 or known.has_left) else None

    def leaves(
        self, request_id: str, completed: bool, output_tokens: int, finish_reason: str | None
    ) -> LeftStep | None:
        """A request leaves; returns the step if none of its requests is left, else None."""
        known = self._of.pop(request_id, None)
        if known is None:
            return LeftStep(request_id, completed, output_tokens, finish_reason)
        known.running -= 1
        known.completed |= completed
        known.output_tokens += output_tokens
        known.finish_reason = known.finish_reason or finish_reason
        if known.running or known.has_left:
            return None
        known.has_left = True
        self._left.append(known.parent)
        if len(self._left) > _LEFT_KEPT:
            self._by_parent.pop(self._left.popleft(), None)
        return LeftStep(known.began_as or request_id, known.completed, known.output_tokens, known.finish_reason)
