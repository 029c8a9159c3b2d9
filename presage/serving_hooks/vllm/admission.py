"""Admission in the engine: policies/admission.py is told what happens, and whom it holds is passed by in the queue.

Held are requests that wait and have had nothing of the engine yet; a workflow of which any request runs, or was
preempted, is not held, nor is a request that belongs to no workflow. Deciding is a matter of a few times a second: at
most every `AFTER_EVENT_S` when workflows come, go or change phase, and less often the more workflows there are, so that
it stays a small share of the engine's time.

Whatever the policy says, three things hold. A workflow is held for `held_at_most_s` over its life, then never again.
An engine in which nothing runs lets somebody in at once: it never stands still while a request waits. And once
something in here has failed, nobody is held any more.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import accumulate
from typing import Any, Final, NamedTuple

from presage.serving_hooks.counts import ADMISSION_CHANGES, ADMISSION_DECISIONS, EventCounts
from presage.serving_hooks.policies.admission import Admission, AdmissionConfig, Decision, Outlook
from presage.serving_hooks.policies.throughput import Rates
from presage.serving_hooks.policies.workload import IterationCost, IterationCosts, WorkloadMeans
from presage.serving_hooks.vllm.admission_accounts import Account, AdmissionRequest, Columns
from presage.serving_hooks.vllm.modes import Mode, Switch
from presage.serving_hooks.workflows.identity import Step
from presage.serving_hooks.workflows.table import EndReason, RunningWorkflow

logger = logging.getLogger(__name__)

UP_TO_S: Final = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
"""Upper bounds: from what a newcomer waits for the next decision to what `held_at_most_s` is if nothing is set."""

EVERY_S: Final = 0.25
AFTER_EVENT_S: Final = 0.05
_EACH_S: Final = 200e-6
"""Of a pause between two decisions for each workflow there is: deciding takes about one microsecond for each."""

_LOG_EVERY_S: Final = 60.0
_FIT_EVERY_S: Final = 2.0
_UNDER_WAY: Final = 64
"""Iterations: more than any pipeline is deep; one whose update never comes is forgotten."""


class HeldTimes:
    """Counts requests by the seconds they were held: each once, when it begins or its client gives it up.

    Requests that were never held are not counted. One that is held, let in, and held again before its turn came counts
    the seconds of both times, and none of those in between.
    """

    def __init__(self) -> None:
        self._counts = [0] * (len(UP_TO_S) + 1)
        self._sum_s = 0.0

    def observe(self, held_s: float) -> None:
        """One request was held so many seconds; 0, and it was not held."""
        if held_s > 0:
            self._counts[bisect_left(UP_TO_S, held_s)] += 1
            self._sum_s += held_s

    def status(self) -> dict[str, Any]:
        """Requests held for so many seconds or less, by Prometheus' names of the bounds, and all seconds together."""
        bounds = [*map(str, UP_TO_S), "+Inf"]
        return {"up_to_s": dict(zip(bounds, accumulate(self._counts), strict=True)), "sum_s": self._sum_s}


class IterationTimes:
    """Times of iterations, and what they cost.

    An iteration begins when it is scheduled and is over when the scheduler is updated with its output. An engine that
    schedules ahead has begun the next by then, so what counts is the time since the update before, where that came
    later: the beat at which a busy engine completes iterations, whatever it overlaps. The first iteration after an idle
    time counts from its own beginning. What vLLM does after an update is not seen where nothing overlaps it.
    """

    def __init__(self) -> None:
        self._times = IterationCost()
        self._under_way: deque[tuple[object, int, int, float]] = deque(maxlen=_UNDER_WAY)
        self._updated_at = -math.inf
        self._fit_at = -math.inf
        self._costs: IterationCosts | None = None

    def scheduled(self, output: object, decode_tokens: int, prefill_tokens: int, began_at: float) -> None:
        """An iteration is scheduled, which the engine will compute."""
        self._under_way.append((output, decode_tokens, prefill_tokens, began_at))

    def updated(self, output: object, now: float) -> None:
        """The output of an iteration has come. Iterations come in order."""
        while self._under_way:
            known, decode_tokens, prefill_tokens, began_at = self._under_way.popleft()
            if known is output:
                self._times.observe(decode_tokens, prefill_tokens, now - max(began_at, self._updated_at))
                break
        self._updated_at = now

    def costs(self, now: float) -> IterationCosts | None:
        """What iterations cost, fitted anew every few seconds; as last fitted, while too few prefill to say anew."""
        if now >= self._fit_at:
            self._fit_at, self._costs = now + _FIT_EVERY_S, self._times.fit() or self._costs
        return self._costs


class _Decided(NamedTuple):
    """What is said of the last decision, once it has been carried out."""

    reasons: Counter[str]
    chosen: Outlook
    everybody: Outlook


class AdmissionController:
    """Who is held.

    Args:
        config: of the policy.
        held_at_most_s: seconds a workflow may be held over its life.
        cache_tokens: what the cache holds.
        block_tokens: tokens of one block hash.
        most_decoding: requests that run at once.
        clock: seconds, rising.
        switch: off once it has failed.
        mode: how far it goes for a workflow type.

    Attributes:
        times: told of iterations.
        counts: of the policy's decisions, and exemptions.
        longest_held_s: of all workflows, over their lives.
    """

    def __init__(
        self,
        config: AdmissionConfig,
        held_at_most_s: float,
        cache_tokens: float,
        block_tokens: int,
        most_decoding: int,
        clock: Callable[[], float],
        switch: Switch,
        mode: Callable[[str], Mode] = lambda workflow_type: Mode.ON,
    ) -> None:
        self.switch = switch
        self._mode = mode
        self._let_run = 0
        self._why: Mapping[str, str] = {}
        self._again = False
        self.times = IterationTimes()
        self.counts = EventCounts(ADMISSION_DECISIONS, ADMISSION_CHANGES)
        self.longest_held_s = 0.0
        self._admission = Admission(cache_tokens, config, self.counts)
        self._held_at_most_s = held_at_most_s
        self._block_tokens = block_tokens
        self._most_decoding = most_decoding
        self._clock = clock
        self._workload = WorkloadMeans()
        self._columns = Columns(self._admission.crowd, self._workload, block_tokens)
        self._accounts: dict[str, Account] = {}
        self._ended: set[str] = set()  # whose accounts go once they have no request
        self._held: dict[str, Account] = {}
        self._workflow_of: dict[str, str] = {}
        self._later: list[Callable[[], None]] = []
        self._area = 0.0
        self._decided_at = self._logged_at = -math.inf
        self._news = False
        self._holding = False
        self._exempt_at = math.inf
        self._held_s = 0.0
        self._held_times = HeldTimes()
        self._last: _Decided | None = None
        self._rates: Rates | None = None

    # What happens.

    def arrives(
        self, request_id: str, step: Step, prompt_tokens: int, hashes: Sequence[bytes], remaining_tokens: float | None
    ) -> None:
        """A step of a workflow enters the engine."""
        mode = self._mode(step.stats_key)
        if mode is not Mode.OFF:
            asked = prompt_tokens, hashes, remaining_tokens
            self._happens(partial(self._arrives, request_id, step, mode, *asked, self._clock()))

    def begins(self, request_id: str, found_tokens: int, hashes: Sequence[bytes]) -> None:
        """A request is selected for the first time; so many tokens of its prompt were in a cache."""
        self._catch_up()
        account = self._account(request_id)
        if account is None or account.requests[request_id].begun:  # the next part of a streamed input
            return
        now = self._clock()
        asked = account.begins(request_id, hashes, now)
        self._held_times.observe(account.waited_for_s(asked, now))
        reusable, prompt = asked.reusable_tokens, asked.new_tokens + asked.reusable_tokens
        # What others computed is not lost when it is not there, and is no new token when it is.
        self._workload.begins(prompt - max(reusable, found_tokens), reusable)
        if account.kept and now > account.left_at:
            load = (self._load_area(now) - account.load_area) / (now - account.left_at)
            self._admission.observe(max(0, reusable - found_tokens), reusable, now, load)
        self._changes(self._workflow_of[request_id], account)

    def leaves(self, request_id: str, hashes: Sequence[bytes], completed: bool, output_tokens: int) -> None:
        """A request leaves the engine, with these blocks computed."""
        self._happens(partial(self._leaves, request_id, hashes, completed, output_tokens, self._clock()))

    def ended(self, workflow: RunningWorkflow, reason: EndReason) -> None:
        """A workflow has ended."""
        self.switch.attempt(self._happens, partial(self._end, workflow.step.workflow))

    # What the engine asks.

    def holds(self, request_id: str) -> bool:
        """Whether a request that has had nothing of the engine yet is to be passed by."""
        account = self._account(request_id) if self.switch.on else None
        return account is not None and account.waits()

    def decide(self, idle: bool) -> list[str]:
        """Before an iteration: the requests which `holds` may answer differently for now.

        Args:
            idle: nothing runs, and nothing waits that is not held.
        """
        self.switch.attempt(self._catch_up)
        if not self.switch.on:
            return self._open()
        now = self._clock()
        if not self._accounts or not self._due(idle, now):
            return []
        changed: list[str] = []
        self.switch.attempt(self._decide, now, changed)
        return changed if self.switch.on else self._open()

    def let_one_in(self) -> list[str]:
        """Nothing runs, and nothing waits that is not held: the requests of the workflow that was held longest."""
        if not self.switch.on:
            return self._open()
        now = self._clock()
        waiting = [name for name, account in self._held.items() if account.waits()]
        if not waiting:
            return []
        self.longest_held_s = self._longest(now)
        one = self._held.pop(max(waiting, key=lambda name: self._held[name].waited_s(now)))
        self.switch.attempt(one.hold, False, now)
        self.counts.add(ADMISSION_CHANGES, "let in")
        return list(one.requests) if self.switch.on else self._open()

    def status(self) -> dict[str, Any]:
        """How many workflows are held while a request of theirs waits and while their tool runs, how long, and why."""
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
            "decisions": self.counts.by_key(),
            "reasons": dict(last.reasons) if last else {},
            "outlook": {"chosen": asdict(last.chosen), "everybody": asdict(last.everybody)} if last else None,
            "rates": asdict(self._rates) if self._rates else None,
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
        """Where a workflow is, whether it is held, and why; None for one that is not known."""
        self.switch.attempt(self._catch_up)
        account, now = self._accounts.get(workflow), self._clock()
        if account is None:
            return None
        return {
            "phase": account.phase.name.lower(),
            "since_s": round(now - account.since, 3),
            "held": account.held,
            "held_s": round(account.waited_s(now), 3),
            "exempt": account.exempt,
            "reason": self._why.get(workflow),
            "known_tokens": len(account.blocks) * self._block_tokens,
        }

    def close(self) -> list[str]:
        """Nothing is decided any more: the requests that were known."""
        return self._open()

    def reconsider(self) -> None:
        """Whom it acts on may have changed: it decides at the next iteration."""
        self._again = True

    # What the switch guards.

    def _happens(self, event: Callable[[], None]) -> None:
        """While nobody is held no answer hangs on what happens, and it is looked at before the next decision."""
        self._later.append(event)
        if self._holding or self._held:
            self._catch_up()

    def _catch_up(self) -> None:
        if self._later:
            later, self._later = self._later, []
            for event in later:
                event()

    def _arrives(
        self,
        request_id: str,
        step: Step,
        mode: Mode,
        prompt_tokens: int,
        hashes: Sequence[bytes],
        remaining_tokens: float | None,
        now: float,
    ) -> None:
        account = self._accounts.get(step.workflow)
        self._ended.discard(step.workflow)
        if account is None:
            # Where some are held a newcomer waits for the next decision, a moment from now.
            held = self._holding and mode is Mode.ON
            account = self._accounts[step.workflow] = Account(step.stats_key, now, held=held, kept=not held)
            if held:
                self._held[step.workflow] = account
                self._exempt_at = min(self._exempt_at, now + self._held_at_most_s)
        elif not account.requests:
            self._workload.paused(account.workflow_type, account.agent, now - account.since)
        if remaining_tokens is None or not remaining_tokens >= 0:  # NaN is no forecast either
            remaining_tokens = math.inf
        reusable = min(prompt_tokens, account.blocks.known(hashes) * self._block_tokens)
        self._workflow_of[request_id] = step.workflow
        account.arrives(request_id, step.agent, prompt_tokens, reusable, remaining_tokens, now)
        self._changes(step.workflow, account)

    def _leaves(
        self, request_id: str, hashes: Sequence[bytes], completed: bool, output_tokens: int, now: float
    ) -> None:
        account = self._account(request_id)
        if account is None:
            return
        name, asked = self._workflow_of.pop(request_id), account.requests[request_id]
        account.leaves(request_id, hashes, output_tokens, now)
        self._given_up(account, asked, now)
        account.left_at, account.load_area = now, self._load_area(now)
        if completed:
            self._workload.completes(output_tokens)
        self._changes(name, account)

    def _end(self, name: str) -> None:
        if name in self._accounts:
            self._ended.add(name)

    def _decide(self, now: float, changed: list[str]) -> None:
        self._area, self._decided_at, self._news = self._load_area(now), now, False
        self._again = False
        self._forget(now)
        self._rates = self._workload.rates(self.times.costs(now), self._most_decoding)
        decision = self._admission.decide(self._columns.refresh(), self._rates, now)
        self._last = _Decided(Counter(decision.held.values()), decision.chosen, decision.everybody)
        acts_on = self._acts_on(decision.held)
        self._let_run, self._why = len(decision.held) - len(acts_on), decision.held
        if self._let_run:
            # Those that run all the same weigh on the cache as well, each taken as much as the others.
            share = self._let_run / len(decision.held)
            self._admission.load += (decision.everybody.load - self._admission.load) * share
        self._holding = bool(acts_on)
        self._exempt(now)
        before = self._held
        for name in [name for name, account in before.items() if name not in acts_on or account.exempt]:
            account = before.pop(name)
            self.longest_held_s = max(self.longest_held_s, account.waited_s(now))
            if account.hold(False, now):
                changed += account.requests
        for name in [name for name in acts_on if name not in before]:  # of the others nothing changes
            account = self._accounts[name]
            if account.hold(not account.exempt, now):
                changed += account.requests
            if account.held:
                before[name] = account
                self._exempt_at = min(self._exempt_at, now + self._held_at_most_s - account.waited_s(now))
        self._log(decision, now)

    def _acts_on(self, held: Mapping[str, str]) -> dict[str, None]:
        """Those of them that are held indeed, in their order."""
        types = {name: self._accounts[name].workflow_type for name in held}
        on = {one for one in set(types.values()) if self._mode(one) is Mode.ON}
        return {name: None for name, one in types.items() if one in on}

    def _exempt(self, now: float) -> None:
        """Who has been held for as long as may be. Before `_exempt_at` nobody can have been, so nobody is looked at."""
        if now < self._exempt_at:
            return
        waited_s = {name: account.waited_s(now) for name, account in self._held.items()}
        for name, seconds in waited_s.items():
            if seconds >= self._held_at_most_s:
                self._accounts[name].exempt = True
                self.counts.add(ADMISSION_CHANGES, "exempt")
        left = [self._held_at_most_s - seconds for seconds in waited_s.values() if seconds < self._held_at_most_s]
        self._exempt_at = now + min(left, default=math.inf)

    def _forget(self, now: float) -> None:
        for name in [name for name in self._ended if not self._accounts[name].requests]:
            self._ended.discard(name)
            self._held.pop(name, None)
            self._columns.ended(name)
            waited_s = self._accounts.pop(name).waited_s(now)
            self._held_s += waited_s
            self.longest_held_s = max(self.longest_held_s, waited_s)
            self._admission.end(name)

    # The rest.

    def _changes(self, name: str, account: Account) -> None:
        self._columns.changed(name, account)
        self._news = True

    def _given_up(self, account: Account, asked: AdmissionRequest, now: float) -> None:
        """A request will be held no more; one that has begun was counted when it did."""
        if not asked.begun:
            self._held_times.observe(account.waited_for_s(asked, now))

    def _account(self, request_id: str) -> Account | None:
        name = self._workflow_of.get(request_id)
        return self._accounts.get(name) if name is not None else None

    def _load_area(self, now: float) -> float:
        """∫ load dt: a step's losses come of the load between the step before and itself."""
        return self._area + self._admission.load * (now - self._decided_at) if self._last is not None else 0.0

    def _due(self, idle: bool, now: float) -> bool:
        if self._again or (idle and any(account.waits() for account in self._held.values())):
            return True
        pause_s = max(AFTER_EVENT_S, _EACH_S * len(self._accounts)) if self._news else EVERY_S
        return now - self._decided_at >= pause_s

    def _longest(self, now: float) -> float:
        return max([self.longest_held_s, *(account.waited_s(now) for account in self._held.values())])

    def _open(self) -> list[str]:
        """Nobody is held any more: all requests, once."""
        self.switch.attempt(self._catch_up)
        opened, now = list(self._workflow_of), self._clock()
        self._held_s += sum(account.waited_s(now) for account in self._accounts.values())
        for account in self._accounts.values():
            for asked in account.requests.values():
                self._given_up(account, asked, now)
        for table in (self._accounts, self._held, self._ended, self._workflow_of):
            table.clear()
        self._later.clear()
        return opened

    def _log(self, decision: Decision, now: float) -> None:
        if self._held and now - self._logged_at >= _LOG_EVERY_S:
            self._logged_at = now
            logger.info(
                "%d of %d workflows are held: %.2f steps/s expected with %d, %.2f with all, whose loads on the cache "
                "are %.2f and %.2f",
                len(self._held),
                len(decision.held) + len(decision.run),
                decision.chosen.steps_per_s,
                decision.chosen.workflows,
                decision.everybody.steps_per_s,
                decision.chosen.load,
                decision.everybody.load,
            )
