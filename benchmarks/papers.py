"""Published policies as plug-ins of `presage replay`, for comparison with the policies of the hooks.

    THUNDERAGENT   workflows paused where they do not fit, no forecasts, vLLM's order of free blocks (ThunderAgent)
    static_graph   blocks by steps to execution over learnt transitions of their workflow type (KVFlow, after PBKV)

The rules are the published ones as far as they are published; the classes say what had to be filled in.

    PYTHONPATH=benchmarks presage replay traces --policy stock,full,papers:THUNDERAGENT
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from presage.features.moment import COMPLETION, PREFILL, Moment
from presage.replay.policies import Policy
from presage.replay.workload import ReplayJob
from presage.serving_hooks.counts import EventCounts
from presage.serving_hooks.listeners import Found, Listener
from presage.serving_hooks.workflows import Workflow
from presage.serving_hooks.workflows.live import LiveForecast

if TYPE_CHECKING:
    from presage.serving_hooks.modes import Switch
    from presage.serving_hooks.workflows import EndReason, RunningStep, Workflow

CHECK_S: Final = 5.0
"""Δt."""
HALF_LIFE_S: Final = 10.0


class _NoTimes:
    """The iteration times that the hooks report to admission; this policy ignores them."""

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


class PauseRestore(Listener[Any]):
    """Who is held: workflows are paused where their contexts do not fit, and restored where they do; no forecasts.

    Source: ThunderAgent, section 4.3. Every Δt the contexts of the workflows that may run are summed, those in a tool
    call with a weight that decays (eq. 6 and 7). While they are more than the cache, workflows are paused: those in a
    tool call first, the smallest first (eq. 10). While there is room they are restored: those whose request waits
    first, the smallest first (eq. 11). One whose request is being computed is not interrupted: it is paused once that
    has ended. A new workflow runs at once if no workflow waits and it fits.

    The figures of Δt and of the decay are the program's own, not the paper's: every 5 s, and a half-life of 10 s, which
    is what the hooks' own admission takes for a tool call of unknown length. Where nothing runs the smallest is
    restored at once, so the engine never stands still.

    It has the methods of `vllm/admission.py` and stands in its place.

    Args:
        cache_tokens: what the cache holds.
        clock: seconds, rising.
        switch: off once it has failed.
    """

    def __init__(self, cache_tokens: float, clock: Callable[[], float], switch: Switch) -> None:
        self.switch, self.times, self.counts = switch, _NoTimes(), EventCounts()
        self._cache_tokens, self._clock = cache_tokens, clock
        self._workflows: dict[str, _Workflow] = {}
        self._of: dict[str, str] = {}
        self._ended: set[str] = set()
        self._checked_at = -math.inf

    def request_arrived(self, request: Any, running: RunningStep | None) -> None:
        """A step of a workflow enters the engine."""
        if running is None:
            return
        request_id, prompt_tokens, step = request.request_id, request.num_prompt_tokens, running.step
        workflow = self._workflows.get(step.workflow)
        if workflow is None:
            self._forget()
            waits = any(of.paused for of in self._workflows.values())
            fits = self._used(self._clock()) + prompt_tokens <= self._cache_tokens
            workflow = self._workflows[step.workflow] = _Workflow(prompt_tokens, paused=waits or not fits)
        self._ended.discard(step.workflow)
        workflow.tokens = max(workflow.tokens, prompt_tokens) if workflow.requests else prompt_tokens
        workflow.requests[request_id] = False
        self._of[request_id] = step.workflow

    def request_scheduled(self, request: Any, running: RunningStep | None, found: Found) -> None:
        """A request is selected for the first time."""
        request_id = request.request_id
        if request_id in self._of:
            self._workflows[self._of[request_id]].requests[request_id] = True

    def request_finished(self, request: Any, running: RunningStep | None, left: Any) -> None:
        """A request leaves the engine."""
        request_id, output_tokens = request.request_id, request.num_output_tokens
        name = self._of.pop(request_id, None)
        if name is None:
            return
        workflow = self._workflows[name]
        del workflow.requests[request_id]
        workflow.tokens += output_tokens
        if not workflow.requests:
            workflow.since = self._clock()
            workflow.paused, workflow.marked = workflow.paused or workflow.marked, False

    def workflow_ended(self, workflow: Workflow, reason: EndReason) -> None:
        """A workflow has ended."""
        if workflow.step.workflow in self._workflows:
            self._ended.add(workflow.step.workflow)

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
        for name in [name for name in self._ended if not self._workflows[name].requests]:
            self._ended.discard(name)
            del self._workflows[name]


def pausing(hooked: type[Any]) -> type[Any]:
    """A scheduler with pause and restore in the place of the hooks' admission."""

    class PausingScheduler(hooked):  # type: ignore[misc]
        def make_admission(self, config: Any, switch: Switch) -> Any:
            return PauseRestore(self.engine_port.cache_tokens(), type(self).clock, switch)

    return PausingScheduler


THUNDERAGENT: Final = Policy("thunderagent", frozenset({"admission"}), scheduler=pausing)


DEEPEST: Final = 6
"""Steps looked ahead: γ^(DEEPEST − 1) is still a few units of the score's whole numbers."""

SETTINGS: Final[Mapping[str, Any]] = {"horizon": DEEPEST, "gamma": 1 / 8, "eviction_rule": "pbkv"}
"""Of the hooks: only the distance counts, and an agent stands for the blocks it has touched."""

Transitions = Mapping[str, Mapping[str, frozenset[str]]]
"""Of each workflow type, of each agent: those that ever came right after it."""


def distances(transitions: Mapping[str, frozenset[str]], agent: str, deepest: int = DEEPEST) -> dict[str, int]:
    """Steps until each agent may run, after `agent`; itself included, if it can come again. Further ones are left out.

    Args:
        transitions: of one workflow type.
        agent: that runs now.
        deepest: the most steps looked ahead.
    """
    found: dict[str, int] = {}
    front = {agent}
    for steps in range(1, deepest + 1):
        front = {after for one in front for after in transitions.get(one, frozenset())} - found.keys()
        found.update(dict.fromkeys(front, steps))
    return found


class StaticGraph:
    """A source of forecasts that are the same for all workflows of a type: steps to execution on a static graph.

    Source: KVFlow (Pan et al., 2025), as PBKV describes it (section 6.1): every agent of a predefined graph has a
    distance, the least number of steps until it may run, and the blocks of the agent furthest away are evicted first.

    Where we depart. The workflows replayed have no predefined graph, so it is learnt: the transitions seen in a
    training part. An agent that other workflows of the type reach in two steps is two steps away in all of them. The
    order is made by the hooks' own score: row k of a forecast is 1 for every agent k steps away, and γ is so small that
    one nearer agent outweighs seven further ones, so it is the order of distances for up to seven agents a block. What
    is more than `DEEPEST` steps away counts as never. Blocks of ended workflows go first, as they do in every policy of
    the hooks.

    Args:
        transitions: that were learnt.
    """

    def __init__(self, transitions: Transitions) -> None:
        self._transitions = transitions
        names = {name for of in transitions.values() for agent, after in of.items() for name in (agent, *after)}
        self._agents = tuple(sorted(names))
        self._at: dict[str, str] = {}
        self._said: dict[tuple[str, str], NDArray[np.float32]] = {}

    def on_prefill(
        self,
        workflow: Workflow,
        agent: str,
        *,
        step: int | None = None,
        input_tokens: int | None = None,
    ) -> LiveForecast:
        """How far away each agent is from this one."""
        self._at[workflow.key] = agent
        return self._after(workflow.step.workflow_type, agent, PREFILL)

    def on_completion(self, workflow: Workflow, **_: Any) -> LiveForecast:
        """The same, once it has completed."""
        return self._after(workflow.step.workflow_type, self._at[workflow.key], COMPLETION)

    def close(self, workflow: Workflow) -> None:
        """The workflow has ended."""
        self._at.pop(workflow.key, None)

    def remaining_tokens(self, workflow: Workflow, step: Any, input_tokens: int) -> float | None:
        """A graph of agents knows nothing of tokens."""
        return None

    def _after(self, workflow_type: str, agent: str, moment: Moment) -> LiveForecast:
        rows = self._said.get((workflow_type, agent))
        if rows is None:
            rows = np.zeros((DEEPEST, len(self._agents) + 1), np.float32)
            for name, steps in distances(self._transitions.get(workflow_type, {}), agent).items():
                rows[steps - 1, self._agents.index(name)] = 1.0
            self._said[workflow_type, agent] = rows
        return LiveForecast("back-off", 0, moment, rows, self._agents, None)


def transitions_of(jobs: Sequence[ReplayJob]) -> Transitions:
    """What ever came right after what in these jobs."""
    found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for job in jobs:
        for step in job.steps:
            for parent in step.parents:
                found[job.workflow_type][job.steps[parent].agent].add(step.agent)
    return {kind: {agent: frozenset(after) for agent, after in of.items()} for kind, of in found.items()}


@dataclass(frozen=True, eq=False)
class _Learnt:
    """Makes a static graph for each run; goes to other processes."""

    transitions: Transitions

    def __call__(self, jobs: Sequence[ReplayJob], clock: Callable[[], float]) -> StaticGraph:
        return StaticGraph(self.transitions)


def static_graph(jobs: Sequence[ReplayJob]) -> Policy:
    """The policy that has learnt from these jobs; they should be of other tasks than those that are replayed."""
    return Policy("static-graph", frozenset({"eviction"}), _Learnt(transitions_of(jobs)), more=SETTINGS)
