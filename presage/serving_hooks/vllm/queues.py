"""Priority and admission in the engine: they order and hold waiting requests, in one pair of queues.

While a policy is off its tables are dropped, and vLLM's own queues replace ours if no policy acts; when it is switched
on again it starts from the requests in the engine. Nothing is lost between shadow and on.
"""

from __future__ import annotations

import heapq
import math
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import islice
from typing import Any, Final

from presage.serving_hooks.listeners import Found, Listener, Listeners
from presage.serving_hooks.modes import Mode, Modes, Switch
from presage.serving_hooks.policies.priority import ShortestTotalJobFirst, vllm_priority
from presage.serving_hooks.policies.wait_bounds import WaitBounds
from presage.serving_hooks.status import AgeingStatus
from presage.serving_hooks.vllm import engine
from presage.serving_hooks.vllm.admission import AdmissionController
from presage.serving_hooks.vllm.engine import EnginePort, EngineRequest, Iteration
from presage.serving_hooks.vllm.iteration_times import Seconds
from presage.serving_hooks.vllm.waiting import Order, ShadowOrder, WaitingQueue, holds_none
from presage.serving_hooks.workflows import EndReason, RunningStep, Workflow, WorkflowTable
from presage.serving_hooks.workflows.choices import LeftStep
from presage.serving_hooks.workflows.identity import Step

_CLASS: Final = 2**64
_MOST_LOOKED_AT: Final = 1000
"""Waiting requests among which `explain` looks for some in vLLM's own queue."""
_FEW: Final = 1000
"""More than any level and number of tokens, so that a key never leaves its class."""


class Priorities:
    """Keys of all requests in the engine: shortest total job first within the classes of vLLM's `priority`.

    With vLLM's `priority` scheduling a client's number is a class, lower first, and our key orders requests within it.
    vLLM also preempts by that number: class and key are folded into it, and the client's number is restored when the
    policy ends. With `fcfs` vLLM ignores that number, and so do we.

    Args:
        policy: the keys, or what has its methods.
        medians: remaining output tokens at the start, the median of each workflow type.
        classes: whether vLLM schedules by `priority`.

    Attributes:
        acts: whether vLLM schedules by the keys; in shadow they are only computed.
    """

    def __init__(
        self, policy: ShortestTotalJobFirst, medians: Mapping[str, float], classes: bool, switch: Switch
    ) -> None:
        self.switch = switch
        self.acts = True
        self._policy = policy
        self._classes = classes
        self._given: dict[str, int] = {}
        self._unranked: set[str] = set()
        self._middle = statistics.median(medians.values()) if medians else math.inf

    def add(
        self,
        request: EngineRequest,
        iteration: int,
        workflow_type: str,
        remaining_tokens: float | None,
        ranked: bool = True,
    ) -> None:
        """Adds a request; one that is not `ranked` is queued as if its remaining work were unknown."""
        self.rank(request.request_id, ranked)
        if self._classes:
            self._given[request.request_id] = request.priority
        arrival = request.arrival_time
        self.switch.attempt(self._policy.add, request.request_id, iteration, arrival, workflow_type, remaining_tokens)
        self.fold(request)

    def rank(self, request_id: str, ranked: bool) -> None:
        """Sets whether a request is ordered by its own remaining work; this may change its key."""
        (self._unranked.discard if ranked else self._unranked.add)(request_id)

    def unranked(self, request_id: str) -> bool:
        """Whether a request is queued as if its remaining work were unknown."""
        return request_id in self._unranked

    def key(self, request: EngineRequest) -> Order:
        """The key of a request; its arrival after the policy has failed."""
        given, level, remaining, arrival = self.wanted(request)
        return given, level, self._middle if request.request_id in self._unranked else remaining, arrival

    def wanted(self, request: EngineRequest) -> tuple[int, int, float, float]:
        """The key a request would have if it were ranked."""
        given = self._given.get(request.request_id, 0)
        key = self.switch.attempt(self._policy.key, request.request_id)
        if key is None:
            return given, 0, math.inf, request.arrival_time
        return given, key.level, key.remaining_tokens, key.arrival

    def aged(self) -> AgeingStatus:
        """How often ageing promoted and demoted a request."""
        return AgeingStatus(self._policy.promoted, self._policy.demoted)

    def age(self, iteration: int) -> list[str]:
        """Before an iteration: ids of the requests whose keys fell."""
        return self.switch.attempt(self._policy.age, iteration) or []

    def overdue(self, request: EngineRequest) -> None:
        """A request has waited for as long as it may: it precedes all others of its class."""
        if self.switch.attempt(self._policy.overdue, request.request_id) is not None:
            self.fold(request)

    def selected(self, request_ids: Collection[str], iteration: int) -> list[str]:
        """After an iteration: ids of the requests whose keys rose."""
        return self.switch.attempt(self._policy.selected, request_ids, iteration) or []

    def fold(self, request: EngineRequest) -> None:
        """Writes the key into vLLM's `priority`, where vLLM uses it."""
        if self._classes and self.acts:
            self.switch.attempt(self._fold, request)

    def give_back(self, request: EngineRequest) -> None:
        """Restores the client's `priority`."""
        request.priority = self._given.get(request.request_id, request.priority)

    def debug_state(self) -> dict[str, int]:
        """Entries of each table, to find leaks."""
        return {"priorities": len(self._given) + len(self._unranked), **self._policy.debug_state()}

    def left(self, request_id: str) -> None:
        """A request has left the engine."""
        self._given.pop(request_id, None)
        self._unranked.discard(request_id)
        self._policy.remove(request_id)

    def _fold(self, request: EngineRequest) -> None:
        key, unranked = self._policy.key(request.request_id), request.request_id in self._unranked
        remaining_tokens = self._middle if unranked else key.remaining_tokens
        request.priority = self._given[request.request_id] * _CLASS + vllm_priority(key.level, remaining_tokens)


class QueuePolicies(Listener[EngineRequest]):
    """The policies over waiting requests.

    Args:
        switch: its own.
        listeners: admission hears of events while it is not off.
        priority, admission: their switches; None where a policy is not configured.
        bounds: how long a request may be delayed; measured here.
        make_priorities, make_admission: construct a policy with its switch when its mode is first not off.

    Attributes:
        priorities, admission: None while they are off.
        tails: seconds from a workflow's arrival to the selection of its first step, from the arrival of later steps to
            their first tokens, and from a workflow's arrival to its last answer.
        shadow: what priority would do for workflow types for which it is in shadow; None if there are none.
    """

    def __init__(
        self,
        port: EnginePort,
        switch: Switch,
        modes: Modes,
        workflows: WorkflowTable,
        listeners: Listeners[EngineRequest],
        priority: Switch | None,
        admission: Switch | None,
        bounds: WaitBounds,
        clock: Callable[[], float],
        make_priorities: Callable[[Switch], Priorities],
        make_admission: Callable[[Switch], AdmissionController],
    ) -> None:
        self.switch = switch
        self.priorities: Priorities | None = None
        self.admission: AdmissionController | None = None
        self.tails = {"start_delay": Seconds(), "later_first_token": Seconds(), "completion": Seconds()}
        self.shadow: ShadowOrder | None = None
        self.switches = {"priority": priority, "admission": admission}
        self._port, self._modes, self._workflows, self._listeners = port, modes, workflows, listeners
        self._make_priorities, self._make_admission = make_priorities, make_admission
        self._iteration = 0
        self._bounds, self._clock = bounds, clock
        self._arrived_at: dict[str, float] = {}  # of requests that have not been selected
        self._selected: list[EngineRequest] = []  # by the latest iteration, for the first time
        self._prefilling: list[tuple[EngineRequest, float, float]] = []  # arrival, selection
        self._starts: set[str] = set()  # first steps of workflows that have not been selected
        self._deadlines: list[tuple[float, str]] = []

    @property
    def active(self) -> bool:
        """Whether any of the policies is on or in shadow."""
        return self.priorities is not None or self.admission is not None

    # Requests.

    def request_arrived(self, request: EngineRequest, step: RunningStep | None) -> None:
        """A request is about to be queued."""
        now = self._arrived_at[request.request_id] = self._clock()
        if step is not None and step.workflow.steps == 1:
            self._starts.add(request.request_id)
        if self.priorities is not None:
            named = step.step if step is not None else None
            bound_s = self._bounds.of(named)
            deadline = now + (self._bounds.default_s if bound_s is None else bound_s)
            if math.isfinite(deadline):
                heapq.heappush(self._deadlines, (deadline, request.request_id))
                if len(self._deadlines) > _FEW + 4 * len(self._arrived_at):  # entries of selected requests
                    self._deadlines = [entry for entry in self._deadlines if entry[1] in self._arrived_at]
                    heapq.heapify(self._deadlines)
            remaining_tokens = step.remaining_tokens if step is not None else None
            workflow_type = named.workflow_type if named is not None else ""
            self.priorities.add(request, self._iteration, workflow_type, remaining_tokens, self._ranks(named))

    def queue_last(self, request: EngineRequest) -> None:
        """A request of Presage's own is about to be queued, behind all others."""
        if self.priorities is not None:
            self.priorities.add(request, self._iteration, "", math.inf)

    def queued(self, request: EngineRequest) -> None:
        """vLLM has queued a request that arrived."""
        if self.holds(request):
            self._port.defer(request, True)
        if self.shadow is not None:
            self.shadow.add_request(request)

    def request_finished(self, request: EngineRequest, step: RunningStep | None, left: LeftStep | None) -> None:
        """A request has left the engine."""
        self._arrived_at.pop(request.request_id, None)
        self._starts.discard(request.request_id)
        if self.priorities is not None:
            self.priorities.left(request.request_id)
        if self.shadow is not None:
            self.shadow.left(request.request_id)

    def holds(self, request: EngineRequest) -> bool:
        """Whether admission holds a request. Does not raise."""
        return self.admission is not None and bool(self.admission.switch.attempt(self._holds, self.admission, request))

    # Iterations.

    def prepare(self) -> None:
        """Ages requests and decides about admission for the next iteration."""
        priorities = self.priorities
        if priorities is not None:
            for request_id in priorities.age(self._iteration + 1):
                priorities.switch.attempt(self._moved, request_id)
            self._hurry(priorities)
            if not priorities.switch.on:  # it has failed: vLLM's order is restored
                self.drop_priorities()
                self._replace_queues()
        if self.admission is not None:
            self._refile(self.admission.decide(idle=False))

    def before(self) -> None:
        """Called before an iteration is scheduled; admits a workflow if the engine would otherwise stall."""
        self._iteration += 1
        if self.admission is not None and self._port.stalled():
            self._refile(self.admission.decide(idle=True))
            if self._port.stalled():
                self._refile(self.admission.let_one_in())

    def request_scheduled(self, request: EngineRequest, step: RunningStep | None, found: Found) -> None:
        """A request is selected for the first time."""
        self._selected.append(request)

    def iteration(self, output: Iteration, began_at: float) -> None:
        """An iteration was scheduled: waits are measured, and ageing counts its requests."""
        selected, self._selected = self._selected, []
        self._measure(selected, began_at)
        if self.shadow is not None:
            self.shadow.begun([request.request_id for request in selected])
        if self.priorities is not None:
            for request_id in self.priorities.selected(output.num_scheduled_tokens, self._iteration):
                self.priorities.switch.attempt(self._moved, request_id)

    def updated(self, output: object, now: float) -> None:
        """The output of an iteration has arrived."""
        if self.admission is not None:
            self.admission.switch.attempt(self.admission.times.updated, output, now)

    def workflow_ended(self, workflow: Workflow, reason: EndReason) -> None:
        """A workflow has ended; one that expired had its last answer when it was active last."""
        self.tails["completion"].observe(workflow.active_at - workflow.arrived_at)

    # Modes and status.

    def apply_modes(self) -> None:
        """Applies changed modes. Between two iterations only."""
        self._apply_to_admission(self._modes.whole["admission"])
        self._apply_to_priority(self._modes.whole["priority"])
        self._replace_queues()

    def places(self, request_ids: Collection[str]) -> dict[str, int]:
        """The places, from 1, of those of these requests that wait and are not held.

        Where vLLM's own queue is in use, only of the first `_MOST_LOOKED_AT`.
        """
        waiting = self._port.waiting
        if isinstance(waiting, WaitingQueue):
            return {request_id: place for request_id in request_ids if (place := waiting.place(request_id)) is not None}
        first = enumerate(islice(waiting, _MOST_LOOKED_AT), 1)
        return {request.request_id: place for place, request in first if request.request_id in request_ids}

    def explain(self, request: EngineRequest) -> dict[str, Any]:
        """Whether a request is held, and its key."""
        shown: dict[str, Any] = {"held": self.holds(request), "waiting": len(self._port.waiting), "key": None}
        if self.priorities is not None:
            given, level, remaining, _ = self.priorities.wanted(request)
            tokens = remaining if math.isfinite(remaining) else None
            shown["key"] = {"class": given, "level": level, "remaining_tokens": tokens}
        return shown

    def withdraw(self) -> None:
        """Gives the waiting requests back to vLLM, in its order and none held, and each client its own `priority`."""
        self.drop_priorities()
        self.shadow = None
        if self.admission is not None:  # nothing is told any more
            self._listeners.remove(self.admission)
            self.admission = None
        self._replace_queues()

    def drop_priorities(self) -> bool:
        """Forgets priority, which begins anew at the next change of modes; gives each client its own `priority`."""
        dropped, self.priorities = self.priorities, None
        if dropped is not None:
            for request in self._port.requests.values():
                dropped.give_back(request)
        return True

    def drop_admission(self) -> bool:
        """Admits all workflows and forgets admission, which begins anew at the next change of modes."""
        dropped, self.admission = self.admission, None
        for workflow in self._workflows:
            workflow.account = None
        if dropped is not None:
            self._listeners.remove(dropped)
            self._refile(dropped.close())
        return True

    def _holds(self, admission: AdmissionController, request: EngineRequest) -> bool:
        return admission.holds(request.request_id) and engine.untouched(request)

    def _apply_to_admission(self, mode: Mode) -> None:
        switch = self.switches["admission"]
        if self.admission is not None and mode is Mode.OFF:
            self.drop_admission()
        elif self.admission is not None:
            self.admission.reconsider()
        elif switch is not None and switch.on and mode is not Mode.OFF:
            self.admission = self._make_admission(switch)
            self._listeners.add(self.admission)

    def _apply_to_priority(self, mode: Mode) -> None:
        switch = self.switches["priority"]
        if switch is None or not switch.on:
            return
        fresh = self.priorities is None
        if fresh and mode is Mode.OFF:
            return
        priorities = self.priorities or self._make_priorities(switch)
        priorities.acts = mode is Mode.ON
        for name, request in self._port.requests.items():
            running = self._workflows.step(name)
            step = running.step if running is not None else None
            if fresh:
                priorities.add(request, self._iteration, step.workflow_type if step else "", None)
            priorities.rank(name, self._ranks(step))
            (priorities.fold if priorities.acts else priorities.give_back)(request)
        self.priorities = priorities if mode is not Mode.OFF else None

    def _ranks(self, step: Step | None) -> bool:
        return self._modes.of("priority", step.stats_key if step else "") is Mode.ON

    def _replace_queues(self) -> None:
        if not any(self.switches.values()):
            return  # vLLM's own were never touched
        self._port.restore_waiting()
        if self.admission is not None or (self.priorities is not None and self.priorities.acts):
            self._port.hook_waiting(self._queue)
        self.shadow, shadow = None, self.shadow
        if self.priorities is not None and self._modes.shadows("priority"):
            self.shadow = ShadowOrder(self.priorities.wanted, self.holds, self.priorities.unranked)
            self.shadow.counts = shadow.counts if shadow is not None else self.shadow.counts
            for request in self._port.requests.values():
                if not request.num_computed_tokens:
                    self.shadow.add_request(request)

    def _queue(self) -> WaitingQueue:
        held = self.holds if self.admission is not None else holds_none
        if self.priorities is None or not self.priorities.acts:
            return self._port.vllm_order(held)
        return WaitingQueue(self.priorities.key, held)

    def _measure(self, selected: Iterable[EngineRequest], now: float) -> None:
        """Measures waits until selection and until the iteration that completes the prompt."""
        for request in selected:
            arrived_at = self._arrived_at.pop(request.request_id, None)
            if arrived_at is not None:
                if request.request_id in self._starts:
                    self.tails["start_delay"].observe(now - arrived_at)
                self._prefilling.append((request, arrived_at, now))
        if self._prefilling:
            still = []
            for request, arrived_at, selected_at in self._prefilling:
                if request.num_computed_tokens >= request.num_prompt_tokens:
                    self._bounds.observe(selected_at - arrived_at, now - selected_at)
                    if request.request_id in self._starts:
                        self._starts.discard(request.request_id)
                    elif self._workflows.step(request.request_id) is not None:
                        self.tails["later_first_token"].observe(now - arrived_at)
                elif request.request_id in self._port.requests:
                    still.append((request, arrived_at, selected_at))
            self._prefilling = still

    def _hurry(self, priorities: Priorities) -> None:
        """Puts the requests that have waited for as long as they may before all others; forgets selected ones."""
        now, waiting = self._clock(), self._arrived_at
        while self._deadlines and (self._deadlines[0][0] <= now or self._deadlines[0][1] not in waiting):
            request_id = heapq.heappop(self._deadlines)[1]
            request = self._port.requests.get(request_id)
            if request is not None and request_id in waiting:
                priorities.overdue(request)
                priorities.switch.attempt(self._moved, request_id)

    def _moved(self, request_id: str) -> None:
        request = self._port.requests.get(request_id)
        if request is None:
            return
        if self.priorities is not None:
            self.priorities.fold(request)
            if self.shadow is not None:
                self.shadow.moved(request_id)
            if not self.priorities.acts:
                return
        for queue in self._port.waiting_queues:
            queue.moved(request_id)

    def _refile(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            request = self._port.requests.get(request_id)
            if request is not None:
                self._port.waiting.refile(request_id)
                if self.shadow is not None:
                    self.shadow.refile(request_id)
                self._port.defer(request, self.holds(request) and request in self._port.waiting)
