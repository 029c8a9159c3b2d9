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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, TypeVar, get_args

from presage.datasets.schema.names import MAX_NAME
from presage.errors import ConfigurationError
from presage.serving_hooks.counts import ERRORS, EventCounts, Part
from presage.serving_hooks.forecasting.circuit_breaker import LONGEST_RETRY_S, Budget
from presage.serving_hooks.mode_names import PolicyName
from presage.serving_hooks.status import ModeRule, ModesStatus
from presage.serving_hooks.workflows.identity import unscoped

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

POLICIES: Final[tuple[str, ...]] = get_args(PolicyName)

MOST_RULES: Final = 1000


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
        self._renewals = dict(renewals)

    def add(self, switch: Switch, renew: Callable[[], bool]) -> None:
        """Adds a part."""
        self._renewals[switch] = renew

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
        known: tuple[str, ...] = POLICIES,
    ) -> None:
        self.changes = 0
        self._known = known
        self.whole: dict[str, Mode] = {}
        self._rules: dict[tuple[str | None, str | None], Mode] = {}
        self.set(default)
        for policy, mode in (policies or {}).items():
            self.set(mode, policy)
        for name, mode in (workflow_types or {}).items():
            self.set(mode, None, name)

    def of(self, policy: str, stats_key: str) -> Mode:
        """The mode of a policy for a workflow type, of any tenant; that of prefetch is at most that of eviction."""
        mode = self._rules[None, None] if len(self._rules) == 1 else self._set_for(policy, unscoped(stats_key))
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
        """Computes `whole` again after a setting has changed."""
        types: list[str | None] = list({workflow_type for _, workflow_type in self._rules})
        for policy in self._known:
            self.whole[policy] = max(self._set_for(policy, name) for name in types)
        if "prefetch" in self.whole:
            self.whole["prefetch"] = min(self.whole["prefetch"], self.whole["eviction"])
        self.changes += 1

    def shadows(self, policy: str) -> bool:
        """Whether a policy may be in shadow for some workflow type."""
        return any(mode is Mode.SHADOW for (of, _), mode in self._rules.items() if of in (None, policy))

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

    def _set_for(self, policy: str, workflow_type: str | None) -> Mode:
        rules = self._rules
        if workflow_type is None:
            return rules.get((policy, None), rules[None, None])
        if (policy, workflow_type) in rules:
            return rules[policy, workflow_type]
        either = [rules[key] for key in ((policy, None), (None, workflow_type)) if key in rules]
        return min(either, default=rules[None, None])
