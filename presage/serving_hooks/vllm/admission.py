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
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from statistics import fmean
from typing import Any, Final

import numpy as np

from presage.serving_hooks.counts import ADMISSION_CHANGES, ADMISSION_DECISIONS, DEADLINES, EventCounts
from presage.serving_hooks.listeners import Found, Listener
from presage.serving_hooks.modes import Mode, Modes, Switch
from presage.serving_hooks.policies.accounts import Account, AdmissionRequest, SharedPrefixes
from presage.serving_hooks.policies.admission import Admission, AdmissionConfig, Decision, WorkflowColumns
from presage.serving_hooks.policies.steady_state import Rates
from presage.serving_hooks.policies.wait_bounds import WaitBounds
from presage.serving_hooks.policies.workload import Earlier, WorkloadMeans
from presage.serving_hooks.status import AdmissionStatus, OutlookStatus
from presage.serving_hooks.vllm import engine
from presage.serving_hooks.vllm.engine import EnginePort, EngineRequest, Iteration
from presage.serving_hooks.vllm.iteration_times import IterationTimes, Seconds
from presage.serving_hooks.workflows import EndReason, RunningStep, Workflow
from presage.serving_hooks.workflows.choices import LeftStep

logger = logging.getLogger(__name__)

EVERY_S: Final = 0.25
AFTER_EVENT_S: Final = 0.05
_EACH_S: Final = 200e-6
"""Minimal pause between two decisions per workflow; a decision takes about one microsecond per workflow."""

_LOG_EVERY_S: Final = 60.0


class Columns:
    """Writes the `changed` accounts into the columns of the policy.

    Args:
        block_tokens: of one block hash.
    """

    def __init__(self, columns: WorkflowColumns, workload: WorkloadMeans, block_tokens: int) -> None:
        self._columns, self._workload, self._block_tokens = columns, workload, block_tokens
        self._changed: list[tuple[Workflow, Account]] = []

    def changes(self, workflow: Workflow, account: Account) -> None:
        """The account of a workflow has changed."""
        if not account.changed:
            account.changed = True
            self._changed.append((workflow, account))

    def refresh(self) -> None:
        """Writes all changed rows at once: one array assignment costs as much as a dozen elements."""
        if not self._changed:
            return
        rows, facts = [], []
        for workflow, account in self._changed:
            account.changed = False
            rows.append(self._columns.place(workflow, account.workflow_type))
            self._compare(workflow, account)
            own, context = account.own_tokens(self._block_tokens), self.context_tokens(workflow, account)
            needs_s = 0.0
            if account.deadline_at < math.inf:
                needs_s = self._workload.of_type(account.workflow_type).needs_s(account.steps)
            facts.append(
                (
                    *(account.phase, account.since, account.steps > 0, own, context, account.bound_s),
                    *(account.deadline_at, needs_s, self._silent(workflow, account.workflow_type)),
                )
            )
        self._changed.clear()
        self._columns.facts[rows] = np.array(facts, self._columns.facts.dtype)

    def _silent(self, workflow: Workflow, workflow_type: str) -> float:
        """The probability that nobody tells when it ends: without its names nobody can."""
        return self._workload.of_type(workflow_type).silent.mean if workflow.step.source == "explicit" else 1.0

    def drop(self, workflow: Workflow, account: Account) -> None:
        """A workflow has ended: what it was still expected to grow by never came."""
        if account.changed:
            self._changed = [one for one in self._changed if one[0] is not workflow]
        self._columns.drop(workflow)
        if account.foreseen is not None:
            self._workload.foresaw(account.workflow_type, 0.0, account.foreseen[1])

    def clear(self) -> None:
        """Drops all workflows; nothing is learnt from them."""
        self._changed.clear()
        self._columns.clear()

    def _compare(self, workflow: Workflow, account: Account) -> None:
        growth, before = _forecast_growth(workflow), account.foreseen
        if growth is None:
            account.foreseen = None
            return
        own = account.own_tokens(self._block_tokens)
        if before is not None:
            self._workload.foresaw(account.workflow_type, own - before[0], before[1] - growth)
        elif not account.steps:
            self._workload.foresees_growth(account.workflow_type, growth)
        account.foreseen = own, growth

    def context_tokens(self, workflow: Workflow, account: Account) -> float:
        """Its own tokens as it will have them in the mean: it grows evenly.

        With a forecast of its growth the mean is that over its life, or what it has now if that is more: open workflows
        are of every age. Without, it is that over what is left, since counts know too little at first.
        """
        own, growth = account.own_tokens(self._block_tokens), _forecast_growth(workflow)
        if growth is not None:
            ratio = self._workload.growth_ratio(account.workflow_type)
            return own + 0.5 * max(0.0, ratio * growth - (own - account.first_tokens))
        of = self._workload.of_type(account.workflow_type)
        left = max(0.0, of.expected_steps(account.steps) - account.steps)
        return own + 0.5 * left * max(0.0, of.growth.mean)


def _forecast_growth(workflow: Workflow) -> float | None:
    """The mean growth that a model forecasts; None without one."""
    forecast = workflow.forecasts.growth
    return forecast.mean if forecast is not None and forecast.source == "champion" else None


class AdmissionController(Listener[EngineRequest]):
    """Holds and admits the requests of workflows.

    Args:
        bounds: how long a request may be held.
        on_hold: called when a workflow is held, with the most seconds for which it will be, and with None when it is
            admitted.
        earlier: what the means of a workflow type begin with.

    Attributes:
        workflows: those that it follows, in the order of their arrival; ended ones until the next decision.
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
        on_hold: Callable[[Workflow, float | None], object],
        earlier: Earlier,
    ) -> None:
        self.switch = switch
        self._modes = modes
        self._let_run = 0
        self._again = False
        self.times = IterationTimes()
        self.counts = EventCounts(ADMISSION_DECISIONS, ADMISSION_CHANGES, DEADLINES)
        self.longest_held_s = 0.0
        self._admission = Admission(port.cache_tokens(), config, self.counts)
        self._held_at_most_s = held_at_most_s
        self._port, self._block_tokens, self._most_decoding = port, port.hash_tokens, port.most_running
        self._clock, self._bounds, self._on_hold = clock, bounds, on_hold
        self._workload = WorkloadMeans(earlier)
        self.workflows = self._admission.workflows
        self._columns = Columns(self.workflows, self._workload, port.hash_tokens)
        self._shared = SharedPrefixes()
        self._ended: list[Workflow] = []  # to drop once they have no request
        self._held: dict[Workflow, Account] = {}
        self._workflow_of: dict[str, Workflow] = {}
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

    def request_arrived(self, request: EngineRequest, step: RunningStep | None) -> None:
        """A step of a workflow arrives."""
        mode = Mode.OFF if step is None else self._modes.of("admission", step.step.stats_key)
        if step is not None and mode is not Mode.OFF:
            self._happens(partial(self._arrives, request, step, self._port.prompt_hashes(request), self._clock(), mode))

    def _arrives(
        self, request: EngineRequest, of: RunningStep, hashes: Sequence[bytes], now: float, mode: Mode
    ) -> None:
        step, workflow, prompt_tokens = of.step, of.workflow, request.num_prompt_tokens
        account = workflow.account
        if account is None:
            # While some are held a new workflow waits for the next decision, a moment from now.
            held = (self._holding or self._admission.is_full) and mode is Mode.ON
            account = workflow.account = Account(step.stats_key, now, held=held)
            account.deadline_at = now + self._bounds.deadline_s(step)
            self.workflows.place(workflow, account.workflow_type)
            if held:
                self._held[workflow] = account
        elif not account.requests:
            self._workload.pauses_s.append(now - account.since)
            self._workload.of_type(account.workflow_type).step_s.observe(now - account.began_at)
        bound_s = self._bounds.of(step)
        account.bound_s = self._held_at_most_s if bound_s is None else min(bound_s, self._held_at_most_s)
        reusable = min(prompt_tokens, account.blocks.known(hashes) * self._block_tokens)
        if not reusable or not account.steps:
            account.shared.add(self._shared.first_prompt(step.stats_key, step.agent, hashes))
        self._workflow_of[request.request_id] = workflow
        account.arrives(request.request_id, step.agent, prompt_tokens, reusable, now)
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
        self._changes(workflow, account)
        if account.held:  # retention takes a request that has arrived as due now
            self._report_hold(workflow, account)

    def request_scheduled(self, request: EngineRequest, step: RunningStep | None, found: Found) -> None:
        """A request is selected for the first time."""
        self._catch_up()
        workflow = self._workflow_of.get(request.request_id)
        account = workflow.account if workflow is not None else None
        if workflow is None or account is None:
            return
        asked = account.requests[request.request_id]
        if asked.begun:  # the next part of a streamed input
            return
        hashes, now = self._port.prompt_hashes(request), self._clock()
        account.begins(request.request_id, hashes, now)
        account.began_at = now
        self._count_held_time(account, asked, now)
        reusable, prompt = asked.reusable_tokens, asked.new_tokens + asked.reusable_tokens
        # Blocks that other workflows computed count neither as lost if they are not cached, nor as new if they are.
        lost = max(0, reusable - found.tokens)
        self._workload.new_tokens.observe(prompt - max(reusable, found.tokens))
        self.times.recomputing.loses(lost)
        own = max(0, reusable - account.shared.known(hashes) * self._block_tokens)
        self._workload.reuses(own, min(own, lost), self._admission.cache_tokens)
        self._changes(workflow, account)

    def iteration(self, output: Iteration, began_at: float) -> None:
        """An iteration was scheduled: its time is measured."""
        self.times.scheduled(output, self._port.iteration_tokens(output), began_at)

    def request_finished(self, request: EngineRequest, step: RunningStep | None, left: LeftStep | None) -> None:
        """A request leaves the engine."""
        output_tokens = request.num_output_tokens if engine.completed(request) else None
        hashes = self._port.computed_hashes(request)
        self._happens(partial(self._leaves, request.request_id, hashes, output_tokens, self._clock()))

    def _leaves(self, request_id: str, hashes: Sequence[bytes], output_tokens: int | None, now: float) -> None:
        workflow = self._workflow_of.pop(request_id, None)
        account = workflow.account if workflow is not None else None
        if workflow is None or account is None:
            return
        asked = account.requests.get(request_id)
        if asked is None:  # its id came again while its account was made anew
            return
        account.leaves(request_id, hashes, now)
        if not asked.begun:
            self._count_held_time(account, asked, now)
        if output_tokens is not None:
            self._workload.output_tokens.observe(output_tokens)
        self._changes(workflow, account)

    def workflow_ended(self, workflow: Workflow, reason: EndReason) -> None:
        """A workflow has ended."""
        self._happens(partial(self._ends, workflow, reason))

    def _ends(self, workflow: Workflow, reason: EndReason) -> None:
        if workflow.account is not None:
            workflow.account.aborted = reason is EndReason.ABORTED
            workflow.account.expired = reason is EndReason.EXPIRED
            self._ended.append(workflow)

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
        if not self.workflows or not self._due(idle, now):
            return []
        changed = self.switch.attempt(self._decide, now)
        return self.close() if changed is None else changed

    def let_one_in(self) -> list[str]:
        """Admits the workflow held longest; returns its requests."""
        if not self.switch.on:
            return self.close()
        now = self._clock()
        waiting = [workflow for workflow, account in self._held.items() if account.waits()]
        if not waiting:
            return []
        self.longest_held_s = self._longest(now)
        workflow = max(waiting, key=lambda workflow: self._held[workflow].waited_s(now))
        one = self._held.pop(workflow)
        self.switch.attempt(one.hold, False, now)
        self._report_hold(workflow, one)
        self.counts.add(ADMISSION_CHANGES, "let in")
        return list(one.requests) if self.switch.on else self.close()

    def status(self) -> AdmissionStatus:
        """Workflows that are held with a waiting request and during a tool call, for how long, and why."""
        self.switch.attempt(self._catch_up)
        now = self._clock()
        waits = [account.waits() for account in self._held.values()]
        last = self._last
        outlook = {"chosen": last.chosen, "everybody": last.everybody} if last else None
        return AdmissionStatus(
            held=sum(waits),
            would_hold=self._let_run,
            held_requests=sum(map(self.holds, self._workflow_of)),
            paused=len(waits) - sum(waits),
            held_s=self._held_s + sum(account.waited_s(now) for account in self._accounts()),
            longest_held_s=self._longest(now),
            held_times=self._held_times.status(),
            bound_s=self._bounds.default_s if math.isfinite(self._bounds.default_s) else None,
            decisions=self.counts.by_key(),
            reasons=Counter(last.held.values()) if last else {},
            outlook={name: OutlookStatus(**asdict(of)) for name, of in outlook.items()} if outlook else None,
            rates=self._rates.to_dict() if self._rates else None,
            shared_tokens=len(self._shared) * self._block_tokens,
            contexts_longer=self._admission.longer,
            growth_over_forecast=self._workload.forecast_growth(),
            recomputing_share=self._recomputing_share,
            overdue=last.overdue if last else 0,
            pressed=last.pressed if last else 0,
        )

    def debug_state(self) -> dict[str, int]:
        """Entries of each table, to find leaks."""
        self.switch.attempt(self._catch_up)
        return {
            "admission accounts": len(self.workflows) - len(self._ended),
            "admission accounts to drop": len(self._ended),  # at the next decision
            "admission held": len(self._held),
            "admission requests": len(self._workflow_of),
        }

    def explain(self, workflow: Workflow) -> dict[str, Any] | None:
        """The phase of a workflow, whether it is held, and why; None if it is unknown."""
        self.switch.attempt(self._catch_up)
        account, now = workflow.account, self._clock()
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
        for workflow in self._held:
            self._on_hold(workflow, None)
        for workflow in self.workflows:
            account, workflow.account = workflow.account, None
            if account is None:  # a failure has left it behind
                continue
            self._held_s += account.waited_s(now)
            for request in account.requests.values():
                if not request.begun:
                    self._count_held_time(account, request, now)
        self._columns.clear()
        for table in (self._held, self._ended, self._workflow_of, self._later):
            table.clear()
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
        if self.workflows and self._admission.is_due(now):
            of_type, accounts = self._workload.of_type, self._accounts()
            known = self._workload.foresees(one.workflow_type for one in accounts)
            steps = fmean([of_type(one.workflow_type).expected_steps(one.steps) for one in accounts])
            self._rates = self._workload.rates(self.times.costs(now), self._most_decoding, steps)
            self._recomputing_share = self.times.recomputing.share(self.times.costs(now))
            shared_tokens = len(self._shared) * self._block_tokens
            self._admission.choose(self._rates, self._recomputing_share, shared_tokens, now, known)
        self._last = decision = self._admission.decide(now)
        acts_on = self._acts_on(decision.held)
        self._let_run = len(decision.held) - len(acts_on)
        self._holding = bool(acts_on)
        for workflow in [one for one in self._held if one not in acts_on]:
            account = self._held.pop(workflow)
            self.longest_held_s = max(self.longest_held_s, account.waited_s(now))
            if account.hold(False, now):
                changed += account.requests
            self._report_hold(workflow, account)
        for workflow in [one for one in acts_on if one not in self._held]:  # the others do not change
            account = acts_on[workflow]
            if account.hold(True, now):
                changed += account.requests
            self._held[workflow] = account
            self._report_hold(workflow, account)
        self._log(decision, now)
        return changed

    def _acts_on(self, held: Mapping[Workflow, str]) -> dict[Workflow, Account]:
        """The held workflows for whose types the policy is on, in the same order."""
        accounts = {workflow: workflow.account for workflow in held if workflow.account is not None}
        types = {account.workflow_type for account in accounts.values()}
        on = {one for one in types if self._modes.of("admission", one) is Mode.ON}
        return {workflow: account for workflow, account in accounts.items() if account.workflow_type in on}

    def _forget(self, now: float) -> None:
        self._ended, ended = [], self._ended
        for workflow in ended:
            account = workflow.account
            if account is None or account.requests:
                self._ended.append(workflow)
                continue
            workflow.account = None
            self._held.pop(workflow, None)
            self._columns.drop(workflow, account)
            if account.deadline_at < math.inf and not account.aborted:
                self.counts.add(DEADLINES, "met" if account.since <= account.deadline_at else "missed")
            of = self._workload.of_type(account.workflow_type)
            of.steps.observe(account.steps)
            of.silent.observe(account.expired)
            waited_s = account.waited_s(now)
            self._held_s += waited_s
            self.longest_held_s = max(self.longest_held_s, waited_s)

    # Helpers.

    def _accounts(self) -> list[Account]:
        return [workflow.account for workflow in self.workflows if workflow.account is not None]

    def _report_hold(self, workflow: Workflow, account: Account) -> None:
        self._on_hold(workflow, account.bound_s if account.held else None)

    def _changes(self, workflow: Workflow, account: Account) -> None:
        self._columns.changes(workflow, account)
        self._news = True

    def _count_held_time(self, account: Account, request: AdmissionRequest, now: float) -> None:
        """A request begins, or leaves without having begun; one that was never held does not count."""
        held_s = account.waited_for_s(request, now)
        if held_s > 0:
            self._held_times.observe(held_s)

    def _account(self, request_id: str) -> Account | None:
        workflow = self._workflow_of.get(request_id)
        return workflow.account if workflow is not None else None

    def _due(self, idle: bool, now: float) -> bool:
        if self._again or (idle and any(account.waits() for account in self._held.values())):
            return True
        pause_s = max(AFTER_EVENT_S, _EACH_S * len(self.workflows)) if self._news else EVERY_S
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
