"""The mode of each policy for each workflow type (docs/serving_settings.md), and the switch of one that fails.

A policy that acts for no workflow type leaves vLLM's queues and free blocks in place. Where it acts for some types, the
others are ordered as if their remaining work were unknown; without a place in the order they would starve, or starve
others. A setting for a pair of policy and type overrides all others; setting the default clears them, so one request
switches everything off.
"""

from __future__ import annotations

import logging
import math
import traceback
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Final, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from presage.datasets.schema.names import MAX_NAME
from presage.errors import ConfigurationError
from presage.serving_hooks.counts import ERRORS, EventCounts, Part
from presage.serving_hooks.forecasting.circuit_breaker import LONGEST_RETRY_S, Budget
from presage.serving_hooks.forecasting.live import LiveForecast
from presage.serving_hooks.mode_names import PolicyName
from presage.serving_hooks.monitoring.drift import SHARES
from presage.serving_hooks.monitoring.outcomes import Followed, OutcomeTracker, Tally, model_of
from presage.serving_hooks.status import EvidenceStatus, ModeRule, ModesStatus
from presage.serving_hooks.workflows.identity import unscoped

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

POLICIES: Final[tuple[str, ...]] = get_args(PolicyName)

MOST_RULES: Final = 1000

TOLERANCE: Final = 0.1
RISK: Final = 0.05
MOST: Final = 1000
"""Pairs of workflow type and model."""

_LIMIT: Final = (1 - TOLERANCE) / 2
_BETS: Final[NDArray[np.float64]] = np.array(SHARES) / _LIMIT


@dataclass(frozen=True)
class Retry:
    """When a part that has failed is tried again: after `retry_s`, twice as long each time in a row, up to an hour."""

    clock: Callable[[], float]
    retry_s: float = Budget.retry_s


class Switch:
    """Switches a policy off when it fails; the engine continues without it.

    A policy that failed may be in an inconsistent state, so it is on again only once that was made anew (`revive`). The
    log names the kind and place of the error, never its message, which might repeat a prompt.

    Args:
        takes: switches of policies that depend on it.
        retry: None where nobody makes its state anew.

    Attributes:
        reason: the kind of error for which it is off; None before any.
        retry_at: when it is tried again, seconds of the retry's clock.
    """

    __slots__ = ("_counts", "_on_since", "_pause_s", "name", "on", "reason", "retry", "retry_at", "takes")

    def __init__(
        self, name: Part, counts: EventCounts, takes: tuple[Switch, ...] = (), retry: Retry | None = None
    ) -> None:
        self.name = name
        self.on = True
        self.takes, self.retry = takes, retry
        self.reason: str | None = None
        self.retry_at = math.inf
        self._counts = counts
        self._pause_s, self._on_since = (retry.retry_s if retry is not None else 0.0), 0.0

    def attempt(self, do: Callable[..., Result], *args: Any) -> Result | None:
        """The result of `do` if it is on; else None. An exception switches it off and is not raised."""
        if self.on:
            try:
                return do(*args)
            except Exception as error:
                self.off(error)
        return None

    def off(self, error: Exception) -> None:
        """Switches it off after an error."""
        reason = type(error).__name__
        self._counts.add(ERRORS, self.name, reason)
        if not self.on:
            return
        self.on, self.reason = False, reason
        frames = traceback.extract_tb(error.__traceback__)
        where = f"{frames[-1].name}, line {frames[-1].lineno}" if frames else "unknown place"
        then = "" if (again := self._wait()) is None else f"; it is tried again in {again:g} s"
        logger.error("%s is switched off: %s in %s; requests are served without it%s", self.name, reason, where, then)
        for other in self.takes:
            other.off(error)

    def revive(self, renew: Callable[[], bool]) -> bool:
        """Switches it on again; returns whether it did.

        Args:
            renew: makes its state anew; called while it is on, and again later if it returns False: not done yet.
        """
        self.on = True
        if self.retry is not None:
            self._on_since = self.retry.clock()
        try:
            self.on = renew()
        except Exception as error:
            self.off(error)
        if self.on:
            self.retry_at = math.inf
            logger.warning("%s is switched on again, after %s", self.name, self.reason)
        return self.on

    def why_off(self) -> str:
        """The reason, and when it is tried again, for people."""
        if self.retry is None or math.isinf(self.retry_at):
            return f"{self.reason}; it stays off until a restart"
        return f"{self.reason}; tried again in {max(0.0, self.retry_at - self.retry.clock()):.0f} s"

    def _wait(self) -> float | None:
        """Begins the pause until it is tried again; returns its seconds, None if it is not."""
        if self.retry is None:
            return None
        now, pause_s = self.retry.clock(), self._pause_s
        if now - self._on_since > pause_s:  # it has been on for longer than it was off
            pause_s = self.retry.retry_s
        self._pause_s, self.retry_at = min(2 * pause_s, LONGEST_RETRY_S), now + pause_s
        return pause_s


def nothing_to_renew() -> bool:
    """Of a part that keeps nothing, or that begins anew with each workflow."""
    return True


class Parts:
    """Parts that may fail, each with what makes it anew: that returns False if it has to be called again."""

    def __init__(self, renewals: Mapping[Switch, Callable[[], bool]]) -> None:
        self._renewals = renewals

    @property
    def off(self) -> list[Switch]:
        """Those that have failed."""
        return [switch for switch in self._renewals if not switch.on]

    def retry(self, now: float) -> bool:
        """Makes those anew whose pause is over, and that no failed part takes with it; returns whether any is on again.

        Args:
            now: seconds of the clock of their `Retry`.
        """
        returned = False
        for switch in self.off:
            if now >= switch.retry_at and not any(switch in failed.takes for failed in self.off):
                returned |= switch.revive(self._renewals[switch])
        return returned

    def end_pauses(self, name: str | None) -> None:
        """The next `retry` does not wait: for the parts of a name and those that take them along; for all, if None."""
        wanted = {switch for switch in self._renewals if name in (None, switch.name)}
        while needed := {switch for switch in self._renewals if wanted.intersection(switch.takes)} - wanted:
            wanted |= needed
        for switch in wanted.intersection(self.off):
            switch.retry_at = -math.inf


class Mode(IntEnum):
    """Modes in rising order."""

    OFF = 0
    SHADOW = 1
    ON = 2

    @property
    def word(self) -> str:
        """The name in settings and status."""
        return self.name.lower()


WORDS: Final[Mapping[str, Mode]] = {mode.word: mode for mode in Mode}


class Modes:
    """The modes in force.

    Args:
        suffices: whether there is enough evidence to act on a workflow type's forecasts; None needs no evidence.
        known: names of the policies.

    Attributes:
        changes: increases whenever a mode may have changed.
        whole: the highest mode of each policy over all workflow types.
    """

    def __init__(
        self,
        default: str = "on",
        policies: Mapping[Any, str] | None = None,
        workflow_types: Mapping[str, str] | None = None,
        suffices: Callable[[str | None], bool] | None = None,
        known: tuple[str, ...] = POLICIES,
    ) -> None:
        self.changes = 0
        self._known = known
        self.whole: dict[str, Mode] = {}
        self._rules: dict[tuple[str | None, str | None], Mode] = {}
        self._suffices = suffices
        self.set(default)
        for policy, mode in (policies or {}).items():
            self.set(mode, policy)
        for name, mode in (workflow_types or {}).items():
            self.set(mode, None, name)

    def of(self, policy: str, stats_key: str) -> Mode:
        """The mode of a policy for the workflow type of a tenant; that of prefetch is at most that of eviction.

        Settings hold for all tenants; evidence is per tenant.
        """
        mode = self._rules[None, None] if len(self._rules) == 1 else self._set_for(policy, unscoped(stats_key))
        mode = self._as_evidence_allows(mode, stats_key)
        return min(mode, self.of("eviction", stats_key)) if policy == "prefetch" else mode

    def set(self, mode: str, policy: str | None = None, workflow_type: str | None = None) -> None:
        """Sets a mode, for all policies or workflow types where None is given.

        Raises:
            ConfigurationError: the mode or policy is unknown, or there are more than `MOST_RULES` settings.
        """
        if mode not in WORDS:
            raise ConfigurationError(f"mode is {mode!r:.60}; give one of {', '.join(WORDS)}")
        if policy is not None and policy not in self._known:
            raise ConfigurationError(f"policy is {policy!r:.60}; give one of {', '.join(self._known)}")
        if workflow_type is not None and len(workflow_type) > MAX_NAME:
            raise ConfigurationError(
                f"a workflow type has at most {MAX_NAME} characters; this one {len(workflow_type)}"
            )
        if policy is None and workflow_type is None:
            self._rules.clear()
        elif (policy, workflow_type) not in self._rules and len(self._rules) >= MOST_RULES:
            raise ConfigurationError(
                f"there are {MOST_RULES} modes of policies and workflow types already; set one for everything first"
            )
        self._rules[policy, workflow_type] = WORDS[mode]
        self.changed()

    def changed(self) -> None:
        """Computes `whole` again after a setting or the evidence has changed."""
        types: list[str | None] = list({workflow_type for _, workflow_type in self._rules})
        for policy in self._known:
            self.whole[policy] = self._as_evidence_allows(max(self._set_for(policy, name) for name in types), None)
        if "prefetch" in self.whole:
            self.whole["prefetch"] = min(self.whole["prefetch"], self.whole["eviction"])
        self.changes += 1

    def shadows(self, policy: str) -> bool:
        """Whether a policy may be in shadow for some workflow type."""
        waits = self._suffices is not None
        return any(
            mode is Mode.SHADOW or (waits and mode is Mode.ON)
            for (of, _), mode in self._rules.items()
            if of is None or of == policy
        )

    def status(self) -> ModesStatus:
        """The settings, and the highest mode of each policy."""
        return ModesStatus(
            default=self._rules[None, None].word,
            rules=[
                ModeRule(policy, name, mode.word)
                for (policy, name), mode in self._rules.items()
                if policy is not None or name is not None
            ],
            policies={policy: mode.word for policy, mode in self.whole.items()},
        )

    def _as_evidence_allows(self, mode: Mode, stats_key: str | None) -> Mode:
        lacking = mode is Mode.ON and self._suffices is not None and not self._suffices(stats_key)
        return Mode.SHADOW if lacking else mode

    def _set_for(self, policy: str, workflow_type: str | None) -> Mode:
        rules = self._rules
        if workflow_type is None:
            return rules.get((policy, None), rules[None, None])
        if (policy, workflow_type) in rules:
            return rules[policy, workflow_type]
        either = [rules[key] for key in ((policy, None), (None, workflow_type)) if key in rules]
        return min(either, default=rules[None, None])


@dataclass(slots=True)
class _TypeEvidence:
    """For one type and model; `wealth` holds the logarithm of each bet's."""

    workflows: int = 0
    suffices: bool = False
    wealth: NDArray[np.float64] = field(default_factory=lambda: np.zeros(len(_BETS)))

    def add(self, surplus: float) -> None:
        self.workflows += 1
        self.wealth += np.log1p(_BETS * ((1 + surplus) / 2 - _LIMIT))

    def odds(self) -> float:
        """W_n."""
        return float(np.exp(np.minimum(self.wealth, 600.0)).mean())


class Evidence:
    """Whether there is enough evidence to act on the forecasts of a workflow type; a new type begins in shadow.

    Pythia (§5) requires "safe statistical confidence intervals" without specifying them. The rule here: act after at
    least `least` workflows of a type, once a test shows that the accuracy of one model's forecasts, one step ahead, is
    at most `TOLERANCE` below their stated probability; the test errs with a probability of at most `RISK`. It tests
    calibration, not accuracy: an unsure forecast changes few decisions, a sure and wrong one evicts needed blocks.

    Each workflow gives one number, the mean over its forecasts of (right − probability of the likeliest outcome), since
    steps of one workflow depend on each other. With x = (1 + that) / 2 in [0, 1] and m = (1 − TOLERANCE) / 2, a bet
    that the mean of x is above m,

        W_n = mean over λ of Π_t (1 + λ (x_t − m)),   0 ≤ λ < 1/m

    has a mean of at most 1 as long as it is not (Waudby-Smith & Ramdas, 2024, §4), so it ever reaches 1 / RISK with a
    probability of at most RISK (Ville), however often it is checked. This assumes independent workflows. The bets are
    those of `monitoring/drift.py`.

    Evidence is for a type and a model ("version 3", or the counts), so another version begins in shadow again. Later
    changes of a type are the drift alarm's task. Beyond `MOST` pairs some without enough evidence are dropped.

    Args:
        least: workflows that a type and model need.
        changed: called when a type begins to suffice.

    Attributes:
        tracker: receives forecasts and calls `followed`.
    """

    def __init__(self, least: int, changed: Callable[[], None]) -> None:
        self.tracker = OutcomeTracker(self.followed, horizon=1)
        self._least, self._changed = least, changed
        self._found: OrderedDict[tuple[str, str], _TypeEvidence] = OrderedDict()
        self._model_of: OrderedDict[str, str] = OrderedDict()

    def suffices(self, workflow_type: str | None) -> bool:
        """Whether the latest model for a type has enough evidence; None asks for any model of any type."""
        if workflow_type is None:
            return any(found.suffices for found in self._found.values())
        found = self._found.get((workflow_type, self._model_of.get(workflow_type, "")))
        return found is not None and found.suffices

    def forecast(self, workflow_type: str, forecast: LiveForecast) -> None:
        """A forecast was made: the type is now judged by its model. An empty forecast is ignored."""
        if len(forecast.probabilities):
            self._model_of[workflow_type] = model_of(forecast.source, forecast.version, forecast.reason)
            self._model_of.move_to_end(workflow_type)
            if len(self._model_of) > MOST:
                self._model_of.popitem(last=False)

    def followed(self, workflow: Followed) -> None:
        """A workflow has ended."""
        for model, tally in workflow.next_agent.items():
            surplus = _surplus(tally)
            if surplus is None:
                continue
            key = (workflow.workflow_type, model)
            found = self._found.setdefault(key, _TypeEvidence())
            self._found.move_to_end(key)
            found.add(surplus)
            if not found.suffices and found.workflows >= self._least and found.odds() >= 1 / RISK:
                found.suffices = True
                self._changed()
        while len(self._found) > MOST:
            least = next((key for key, found in self._found.items() if not found.suffices), next(iter(self._found)))
            del self._found[least]

    def status(self) -> dict[str, dict[str, EvidenceStatus]]:
        """For each type and model: workflows, odds (they suffice at 1 / RISK), and whether it suffices."""
        status: dict[str, dict[str, EvidenceStatus]] = {}
        for (name, model), of in self._found.items():
            status.setdefault(name, {})[model] = EvidenceStatus(of.workflows, round(of.odds(), 3), of.suffices)
        return status


def _surplus(tally: Tally) -> float | None:
    """Mean of (right − forecast probability) over a workflow's forecasts of the next step; None without any."""
    positions, sure, right = (float(of) for of in tally.sums[:3, :, 0].sum(axis=(1, 2), dtype=np.float64))
    surplus = (right - sure) / positions if positions else math.nan
    return min(1.0, max(-1.0, surplus)) if math.isfinite(surplus) else None
