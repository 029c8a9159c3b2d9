"""Who may run, without forecasts: workflows are paused where their contexts do not fit, and restored where they do.

Source: ThunderAgent, section 4.3. Every Δt the contexts of the workflows that may run are summed, those in a tool call
with a weight that decays (eq. 6 and 7). While they are more than the cache, workflows are paused: those in a tool call
first, the smallest first (eq. 10). While there is room they are restored: those whose request waits first, the smallest
first (eq. 11). One whose request is being computed is not interrupted: it is paused once that has ended. A new workflow
runs at once if nobody waits and it fits.

The figures of Δt and of the decay are the program's own, not the paper's: every 5 s, and a half-life of 10 s, which is
what the hooks' own admission takes for a tool call of unknown length. Where nothing runs the smallest is restored at
once, so the engine never stands still.

It has the methods of `vllm/admission.py` and stands in its place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from presage.serving_hooks.vllm.metadata import Step
    from presage.serving_hooks.vllm.modes import Switch

CHECK_S: Final = 5.0
"""Δt."""
HALF_LIFE_S: Final = 10.0


class _NoTimes:
    """The hooks tell admission how long iterations take; this one does not ask."""

    def updated(self, *args: Any) -> None: ...
    def scheduled(self, *args: Any) -> None: ...


@dataclass(slots=True)
class _Workflow:
    """Tokens of its longest context, its requests by whether they have begun, and since when it has none."""

    tokens: int
    requests: dict[str, bool] = field(default_factory=dict)
    since: float = 0.0
    paused: bool = False
    marked: bool = False


class PauseRestore:
    """Who is held.

    Args:
        cache_tokens: what the cache holds.
        alive: whether a workflow without requests has not ended.
        clock: seconds, rising.
        switch: off once it has failed.
    """

    def __init__(
        self, cache_tokens: float, alive: Callable[[str], bool], clock: Callable[[], float], switch: Switch
    ) -> None:
        self.switch, self.times = switch, _NoTimes()
        self._cache_tokens, self._alive, self._clock = cache_tokens, alive, clock
        self._workflows: dict[str, _Workflow] = {}
        self._of: dict[str, str] = {}
        self._checked_at = -math.inf

    def arrives(
        self, request_id: str, step: Step, prompt_tokens: int, hashes: Sequence[bytes], remaining_tokens: float | None
    ) -> None:
        """A step of a workflow enters the engine."""
        workflow = self._workflows.get(step.workflow)
        if workflow is None:
            self._forget()
            waits = any(of.paused for of in self._workflows.values())
            fits = self._used(self._clock()) + prompt_tokens <= self._cache_tokens
            workflow = self._workflows[step.workflow] = _Workflow(prompt_tokens, paused=waits or not fits)
        workflow.tokens = max(workflow.tokens, prompt_tokens) if workflow.requests else prompt_tokens
        workflow.requests[request_id] = False
        self._of[request_id] = step.workflow

    def begins(self, request_id: str, found_tokens: int, hashes: Sequence[bytes]) -> None:
        """A request is selected for the first time."""
        if request_id in self._of:
            self._workflows[self._of[request_id]].requests[request_id] = True

    def leaves(self, request_id: str, hashes: Sequence[bytes], completed: bool, output_tokens: int) -> None:
        """A request leaves the engine."""
        name = self._of.pop(request_id, None)
        if name is None:
            return
        workflow = self._workflows[name]
        del workflow.requests[request_id]
        workflow.tokens += output_tokens
        if not workflow.requests:
            workflow.since = self._clock()
            workflow.paused, workflow.marked = workflow.paused or workflow.marked, False

    def holds(self, request_id: str) -> bool:
        """Whether a request that has had nothing of the engine yet is to be passed by."""
        return self.switch.on and request_id in self._of and self._workflows[self._of[request_id]].paused

    def decide(self, idle: bool) -> list[str]:
        """Before an iteration: the requests which `holds` may answer differently for now."""
        now = self._clock()
        if now - self._checked_at < CHECK_S or not self.switch.on:
            return []
        self._checked_at = now
        self._forget()
        return self._pause(now) + self._restore(now)

    def let_one_in(self) -> list[str]:
        """Nothing runs, and nothing waits that is not held: the requests of the smallest that waits."""
        waiting = [of for of in self._workflows.values() if of.paused and of.requests]
        if not waiting:
            return []
        smallest = min(waiting, key=lambda of: of.tokens)
        smallest.paused = False
        return list(smallest.requests)

    def status(self) -> dict[str, Any]:
        """How many are held while a request of theirs waits, and while their tool runs."""
        held = [bool(of.requests) for of in self._workflows.values() if of.paused]
        return {"held": sum(held), "paused": len(held) - sum(held)}

    def _pause(self, now: float) -> list[str]:
        """Those in a tool call, then those that are computed, once they are; the smallest first."""
        used, changed = self._used(now), list[str]()
        for of in sorted(self._workflows.values(), key=lambda of: (bool(of.requests), of.tokens)):
            if used <= self._cache_tokens:
                break
            if of.paused or of.marked:
                continue
            used -= self._weight(of, now)
            if any(of.requests.values()):
                of.marked = True
            else:
                of.paused = True
                changed += of.requests
        return changed

    def _restore(self, now: float) -> list[str]:
        """Those whose request waits, then the others; the smallest first."""
        used, changed = self._used(now), list[str]()
        for of in sorted(self._workflows.values(), key=lambda of: (not of.requests, of.tokens)):
            if of.paused and used + of.tokens <= self._cache_tokens:
                of.paused = False
                used += of.tokens
                changed += of.requests
        return changed

    def _used(self, now: float) -> float:
        return sum(self._weight(of, now) for of in self._workflows.values() if not (of.paused or of.marked))

    def _weight(self, of: _Workflow, now: float) -> float:
        return of.tokens if of.requests else of.tokens * 2.0 ** ((of.since - now) / HALF_LIFE_S)

    def _forget(self) -> None:
        for name in [name for name, of in self._workflows.items() if not of.requests and not self._alive(name)]:
            del self._workflows[name]
