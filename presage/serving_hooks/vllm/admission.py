"""Admission in the engine: passes events to policies/admission.py, and holds the requests of the workflows it chooses.

Only waiting requests of workflows that have no blocks yet are held, and none while its workflow has a running or
preempted one. The more workflows there are, the rarer the decisions, so that they take a small share of the time.

Three limits hold whatever the policy decides: no workflow is held over its life for longer than its objective
(policies/wait_bounds.py) and `held_at_most_s`, except while much time goes into lost contexts; an engine in which
nothing runs admits a workflow at once; and after a failure no request is held.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import accumulate
from statistics import fmean
from typing import Any, Final, Generic, TypeVar

from presage.serving_hooks.counts import ADMISSION_CHANGES, ADMISSION_DECISIONS, EventCounts
from presage.serving_hooks.modes import Mode, Modes, Switch
from presage.serving_hooks.policies.admission import Admission, AdmissionConfig, Decision
from presage.serving_hooks.policies.steady_state import Rates
from presage.serving_hooks.policies.wait_bounds import WaitBounds
from presage.serving_hooks.policies.workload import (
    Earlier,
    IterationCost,
    IterationCosts,
    RecomputingShare,
    WorkloadMeans,
)
from presage.serving_hooks.vllm.admission_accounts import Account, AdmissionRequest, Columns, Growth, SharedPrefixes
from presage.serving_hooks.vllm.engine import EnginePort
from presage.serving_hooks.workflows import EndReason, Workflow
from presage.serving_hooks.workflows.identity import Step

logger = logging.getLogger(__name__)

UP_TO_S: Final = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
"""Upper bounds: from the wait of a new workflow for the next decision to thrice the default of `held_at_most_s`."""

EVERY_S: Final = 0.25
AFTER_EVENT_S: Final = 0.05
_EACH_S: Final = 200e-6
"""Minimal pause between two decisions per workflow; a decision takes about one microsecond per workflow."""

_LOG_EVERY_S: Final = 60.0
_FIT_EVERY_S: Final = 2.0
_UNDER_WAY: Final = 64
"""Iterations in flight, more than any pipeline has; those without an update are dropped."""

Facts = TypeVar("Facts")


class Seconds:
    """A histogram of seconds."""

    def __init__(self) -> None:
        self._counts = [0] * (len(UP_TO_S) + 1)
        self._sum_s = 0.0

    def observe(self, seconds: float) -> None:
        """Counts a duration."""
        self._counts[bisect_left(UP_TO_S, seconds)] += 1
        self._sum_s += seconds

    def status(self) -> dict[str, Any]:
        """Cumulative counts by Prometheus' names of the bounds, and the sum of seconds."""
        bounds = [*map(str, UP_TO_S), "+Inf"]
        return {"up_to_s": dict(zip(bounds, accumulate(self._counts), strict=True)), "sum_s": self._sum_s}


class IterationTimer(Generic[Facts]):
    """Durations of iterations, each with some facts about it.

    An iteration lasts from its scheduling, or from the previous update if that is later, to the update with its output:
    this is the rate at which a busy engine completes iterations, whatever overlaps. The first iteration after an idle
    time counts from its own start. Work of vLLM after an update is not measured unless it overlaps.
    """

    def __init__(self) -> None:
        self._under_way: deque[tuple[object, Facts, float]] = deque(maxlen=_UNDER_WAY)
        self._updated_at = -math.inf

    def scheduled(self, output: object, facts: Facts, began_at: float) -> None:
        """Records the start of an iteration."""
        self._under_way.append((output, facts, began_at))

    def updated(self, output: object, now: float) -> tuple[Facts, float] | None:
        """Facts and seconds of the iteration with this output; None if it is unknown. Outputs arrive in order."""
        before, self._updated_at = self._updated_at, now
        while self._under_way:
            known, facts, began_at = self._under_way.popleft()
            if known is output:
                return facts, now - max(began_at, before)
        return None


class IterationTimes(IterationTimer[tuple[int, int]]):
    """The cost model of iterations, from their decoded and prefilled tokens and their durations.

    Attributes:
        recomputing: share of the time that is spent on lost contexts.
    """

    def __init__(self) -> None:
        super().__init__()
        self.recomputing = RecomputingShare()
        self._times = IterationCost()
        self._fit_at = -math.inf
        self._costs: IterationCosts | None = None

    def updated(self, output: object, now: float) -> tuple[tuple[int, int], float] | None:
        """See `IterationTimer.updated`."""
        timed = super().updated(output, now)
        if timed is not None:
            self._times.observe(*timed[0], timed[1])
            self.recomputing.computes(timed[1])
        return timed

    def costs(self, now: float) -> IterationCosts | None:
        """The cost model, fitted every few seconds; the last fit while too few iterations prefill."""
        if now >= self._fit_at:
            self._fit_at, self._costs = now + _FIT_EVERY_S, self._times.fit() or self._costs
        return self._costs


class AdmissionController:
    """Holds and admits the requests of workflows.

    Args:
        bounds: how long a request may be held.
        tell: called when a workflow is held, with the most seconds for which it will be, and with None when it is
            admitted.
        growth, earlier: forecasts of the growth of a workflow's context, and what the means of a type begin with.

    Attributes:
        counts: decisions of the policy.
        longest_held_s: maximum over workflows of the time held over their lives.
    """

    def __init__(
        self,
        config: AdmissionConfig,
        held_at_most_s: float,
        port: EnginePort,
        clock: Callable[[], float],
        switch: Switch,
        modes: Modes,
        bounds: WaitBounds,
        tell: Callable[[str, float | None], object],
        growth: Growth,
        earlier: Earlier,
    ) -> None:
        self.switch = switch
        self._modes = modes
        self._let_run = 0
        self._again = False
        self.times = IterationTimes()
        self.counts = EventCounts(ADMISSION_DECISIONS, ADMISSION_CHANGES)
        self.longest_held_s = 0.0
        self._admission = Admission(port.cache_tokens(), config, self.counts)
        self._held_at_most_s = held_at_most_s
        self._block_tokens, self._most_decoding = port.hash_tokens, port.most_running
        self._clock, self._bounds, self._tell = clock, bounds, tell
        self._workload = WorkloadMeans(earlier)
        self._columns = Columns(self._admission.crowd, self._workload, growth, port.hash_tokens)
        self._shared = SharedPrefixes()
        self._accounts: dict[str, Account] = {}
        self._ended: set[str] = set()  # accounts to delete once they have no request
        self._held: dict[str, Account] = {}
        self._workflow_of: dict[str, str] = {}
        self._later: list[Callable[[], None]] = []
        self._decided_at = self._logged_at = -math.inf
        self._news = False
        self._holding = False
        self._held_s = 0.0
        self._held_times = Seconds()
        self._last: Decision | None = None
        self._rates: Rates | None = None
        self._recomputing_share = 0.0

    # Events.

    def arrives(self, request_id: str, step: Step, prompt_tokens: int, hashes: Sequence[bytes]) -> None:
        """A step of a workflow arrives."""
        mode = self._modes.of("admission", step.stats_key)
        if mode is Mode.OFF:
            return
        now = self._clock()

        def arrives() -> None:
            account = self._accounts.get(step.workflow)
            self._ended.discard(step.workflow)
            if account is None:
                # While some are held a new workflow waits for the next decision, a moment from now.
                held = (self._holding or self._admission.is_full) and mode is Mode.ON
                account = self._accounts[step.workflow] = Account(step.stats_key, now, held=held)
                if held:
                    self._held[step.workflow] = account
            elif not account.requests:
                self._workload.pauses_s.append(now - account.since)
            bound_s = self._bounds.of(step)
            account.bound_s = self._held_at_most_s if bound_s is None else min(bound_s, self._held_at_most_s)
            reusable = min(prompt_tokens, account.blocks.known(hashes) * self._block_tokens)
            if not reusable or not account.steps:
                account.shared.add(self._shared.first_prompt(step.stats_key, step.agent, hashes))
            self._workflow_of[request_id] = step.workflow
            account.arrives(request_id, step.agent, prompt_tokens, reusable, now)
            own, before = account.own_tokens(self._block_tokens), account.context_tokens
            account.context_tokens = own
            if not account.steps:
                account.first_tokens = own
            else:
                self._workload.of_type(account.workflow_type).growth.observe(own - before)
            shared = account.shared.known(hashes) * self._block_tokens
            apart = account.apart(step.agent, reusable // self._block_tokens)
            self._workload.returns(max(0, reusable - shared), apart)
            self._workload.read_tokens.observe(max(0, prompt_tokens - shared))
            self._workload.own_tokens.observe(own)
            self._changes(step.workflow, account)
            if account.held:  # retention takes a request that has arrived as due now
                self._tell_of(step.workflow, account)

        self._happens(arrives)

    def begins(self, request_id: str, found_tokens: int, hashes: Sequence[bytes]) -> None:
        """A request is selected for the first time, with so many cached prompt tokens."""
        self._catch_up()
        account = self._account(request_id)
        if account is None or account.requests[request_id].begun:  # the next part of a streamed input
            return
        now = self._clock()
        request = account.begins(request_id, hashes, now)
        self._count_held_time(account, request, now)
        reusable, prompt = request.reusable_tokens, request.new_tokens + request.reusable_tokens
        # Blocks that other workflows computed count neither as lost if they are not cached, nor as new if they are.
        self._workload.new_tokens.observe(prompt - max(reusable, found_tokens))
        self.times.recomputing.loses(max(0, reusable - found_tokens))
        own = max(0, reusable - account.shared.known(hashes) * self._block_tokens)
        self._workload.reuses(own, min(own, max(0, reusable - found_tokens)), self._admission.cache_tokens)
        self._changes(self._workflow_of[request_id], account)

    def leaves(self, request_id: str, hashes: Sequence[bytes], completed: bool, output_tokens: int) -> None:
        """A request leaves the engine with these blocks computed."""
        now = self._clock()

        def leaves() -> None:
            account = self._account(request_id)
            if account is None:
                return
            name, request = self._workflow_of.pop(request_id), account.requests[request_id]
            account.leaves(request_id, hashes, now)
            if not request.begun:
                self._count_held_time(account, request, now)
            if completed:
                self._workload.output_tokens.observe(output_tokens)
            self._changes(name, account)

        self._happens(leaves)

    def ended(self, workflow: Workflow, reason: EndReason) -> None:
        """A workflow has ended."""
        name = workflow.step.workflow

        def ends() -> None:
            if name in self._accounts:
                self._ended.add(name)

        self.switch.attempt(self._happens, ends)

    # Queries.

    def holds(self, request_id: str) -> bool:
        """Whether a request without blocks is held."""
        account = self._account(request_id) if self.switch.on else None
        return account is not None and account.waits()

    def decide(self, idle: bool) -> list[str]:
        """Decides before an iteration; returns the ids of requests for which `holds` may have changed.

        `idle` means that nothing runs and all waiting requests are held.
        """
        self.switch.attempt(self._catch_up)
        if not self.switch.on:
            return self.close()
        now = self._clock()
        if not self._accounts or not self._due(idle, now):
            return []
        changed = self.switch.attempt(self._decide, now)
        return self.close() if changed is None else changed

    def let_one_in(self) -> list[str]:
        """Admits the workflow held longest; returns its requests."""
        if not self.switch.on:
            return self.close()
        now = self._clock()
        waiting = [name for name, account in self._held.items() if account.waits()]
        if not waiting:
            return []
        self.longest_held_s = self._longest(now)
        name = max(waiting, key=lambda name: self._held[name].waited_s(now))
        one = self._held.pop(name)
        self.switch.attempt(one.hold, False, now)
        self._tell_of(name, one)
        self.counts.add(ADMISSION_CHANGES, "let in")
        return list(one.requests) if self.switch.on else self.close()

    def status(self) -> dict[str, Any]:
        """Workflows that are held with a waiting request and during a tool call, for how long, and why."""
        self.switch.attempt(self._catch_up)
        now = self._clock()
        waits = [account.waits() for account in self._held.values()]
        last = self._last
        return {
            "held": sum(waits),
            "would_hold": self._let_run,
            "held_requests": sum(map(self.holds, self._workflow_of)),
            "paused": len(waits) - sum(waits),
            "held_s": self._held_s + sum(account.waited_s(now) for account in self._accounts.values()),
            "longest_held_s": self._longest(now),
            "held_times": self._held_times.status(),
            "bound_s": self._bounds.default_s if math.isfinite(self._bounds.default_s) else None,
            "decisions": self.counts.by_key(),
            "reasons": dict(Counter(last.held.values())) if last else {},
            "outlook": {"chosen": asdict(last.chosen), "everybody": asdict(last.everybody)} if last else None,
            "rates": self._rates.to_dict() if self._rates else None,
            "shared_tokens": len(self._shared) * self._block_tokens,
            "contexts_longer": self._admission.longer,
            "growth_over_forecast": self._workload.forecast_growth(),
            "recomputing_share": self._recomputing_share,
            "overdue": last.overdue if last else 0,
        }

    def debug_state(self) -> dict[str, int]:
        """Entries of each table, to find leaks."""
        self.switch.attempt(self._catch_up)
        return {
            "admission accounts": len(self._accounts) - len(self._ended),
            "admission accounts to drop": len(self._ended),  # at the next decision
            "admission held": len(self._held),
            "admission requests": len(self._workflow_of),
        }

    def explain(self, workflow: str) -> dict[str, Any] | None:
        """The phase of a workflow, whether it is held, and why; None if it is unknown."""
        self.switch.attempt(self._catch_up)
        account, now = self._accounts.get(workflow), self._clock()
        if account is None:
            return None
        return {
            "phase": account.phase.name.lower(),
            "since_s": round(now - account.since, 3),
            "held": account.held,
            "held_s": round(account.waited_s(now), 3),
            "reason": self._last.held.get(workflow) if self._last else None,
            "known_tokens": len(account.blocks) * self._block_tokens,
            "own_tokens": account.own_tokens(self._block_tokens),
            "context_tokens": round(self._columns.context_tokens(workflow, account)),
        }

    def close(self) -> list[str]:
        """Admits all workflows and forgets them; returns their requests."""
        self.switch.attempt(self._catch_up)
        opened, now = list(self._workflow_of), self._clock()
        for name in self._held:
            self._tell(name, None)
        self._held_s += sum(account.waited_s(now) for account in self._accounts.values())
        for account in self._accounts.values():
            for request in account.requests.values():
                if not request.begun:
                    self._count_held_time(account, request, now)
        for table in (self._accounts, self._held, self._ended, self._workflow_of):
            table.clear()
        self._later.clear()
        return opened

    def reconsider(self) -> None:
        """Decides again at the next iteration; called when modes may have changed."""
        self._again = True

    # Guarded by the switch.

    def _happens(self, event: Callable[[], None]) -> None:
        """Handles an event; while no workflow is held, defers it to the next decision, as no result depends on it."""
        self._later.append(event)
        if self._holding or self._held:
            self._catch_up()

    def _catch_up(self) -> None:
        if self._later:
            later, self._later = self._later, []
            for event in later:
                event()

    def _decide(self, now: float) -> list[str]:
        changed: list[str] = []
        self._decided_at, self._news = now, False
        self._again = False
        self._forget(now)
        self._columns.refresh()
        if self._accounts and self._admission.is_due(now):
            of_type = self._workload.of_type
            known = self._workload.foresees(one.workflow_type for one in self._accounts.values())
            steps = fmean([of_type(one.workflow_type).expected_steps(one.steps) for one in self._accounts.values()])
            self._rates = self._workload.rates(self.times.costs(now), self._most_decoding, steps)
            self._recomputing_share = self.times.recomputing.share(self.times.costs(now))
            shared_tokens = len(self._shared) * self._block_tokens
            self._admission.choose(self._rates, self._recomputing_share, shared_tokens, now, known)
        self._last = decision = self._admission.decide(now)
        acts_on = self._acts_on(decision.held)
        self._let_run = len(decision.held) - len(acts_on)
        self._holding = bool(acts_on)
        before = self._held
        for name in [name for name in before if name not in acts_on]:
            account = before.pop(name)
            self.longest_held_s = max(self.longest_held_s, account.waited_s(now))
            if account.hold(False, now):
                changed += account.requests
            self._tell_of(name, account)
        for name in [name for name in acts_on if name not in before]:  # the others do not change
            account = self._accounts[name]
            if account.hold(True, now):
                changed += account.requests
            before[name] = account
            self._tell_of(name, account)
        self._log(decision, now)
        return changed

    def _acts_on(self, held: Mapping[str, str]) -> dict[str, None]:
        """The held workflows for whose types the policy is on, in the same order."""
        types = {name: self._accounts[name].workflow_type for name in held}
        on = {one for one in set(types.values()) if self._modes.of("admission", one) is Mode.ON}
        return {name: None for name, one in types.items() if one in on}

    def _forget(self, now: float) -> None:
        for name in [name for name in self._ended if not self._accounts[name].requests]:
            self._ended.discard(name)
            self._held.pop(name, None)
            self._columns.changed.pop(name, None)
            account = self._accounts.pop(name)
            self._columns.ends(account)
            self._workload.of_type(account.workflow_type).steps.observe(account.steps)
            waited_s = account.waited_s(now)
            self._held_s += waited_s
            self.longest_held_s = max(self.longest_held_s, waited_s)
            self._admission.crowd.drop(name)

    # Helpers.

    def _tell_of(self, name: str, account: Account) -> None:
        self._tell(name, account.bound_s if account.held else None)

    def _changes(self, name: str, account: Account) -> None:
        self._columns.changed[name] = account
        self._news = True

    def _count_held_time(self, account: Account, request: AdmissionRequest, now: float) -> None:
        """A request begins, or leaves without having begun; one that was never held does not count."""
        held_s = account.waited_for_s(request, now)
        if held_s > 0:
            self._held_times.observe(held_s)

    def _account(self, request_id: str) -> Account | None:
        name = self._workflow_of.get(request_id)
        return self._accounts.get(name) if name is not None else None

    def _due(self, idle: bool, now: float) -> bool:
        if self._again or (idle and any(account.waits() for account in self._held.values())):
            return True
        pause_s = max(AFTER_EVENT_S, _EACH_S * len(self._accounts)) if self._news else EVERY_S
        return now - self._decided_at >= pause_s

    def _longest(self, now: float) -> float:
        return max([self.longest_held_s, *(account.waited_s(now) for account in self._held.values())])

    def _log(self, decision: Decision, now: float) -> None:
        if self._held and now - self._logged_at >= _LOG_EVERY_S:
            self._logged_at = now
            logger.info(
                "%d of %d workflows are held: %.2f steps/s expected with %d, %.2f with all, at cache loads of %.2f and "
                "%.2f",
                len(self._held),
                len(decision.held) + len(decision.run),
                decision.chosen.steps_per_s,
                decision.chosen.workflows,
                decision.everybody.steps_per_s,
                decision.chosen.load,
                decision.everybody.load,
            )
