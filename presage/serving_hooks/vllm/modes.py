"""How far each policy goes for each workflow type: off, shadow or on; said by the settings, and while the engine runs.

- off: nothing is computed for it;
- shadow: all is computed, counted and shown, and nothing is done;
- on: it acts.

A policy that acts for no workflow type leaves vLLM's own order alone: its own queues, its own free blocks. Where it
acts for some types, the others stand in the same order as requests nobody knows anything of: without a place of their
own they would starve, or starve others.

What is said of a policy or of a workflow type goes before what is said of everything; of both the lower; of the two
together before all. What is said of everything takes back all that was said before: so one word switches all off.

A workflow type whose forecasts have not shown enough (evidence.py) is in shadow at most.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Any, Final, get_args

from presage.errors import ConfigurationError
from presage.serving_hooks.forecasting.names import unscoped
from presage.serving_hooks.vllm.metadata import MAX_NAME
from presage.serving_hooks.vllm.mode_names import PolicyName

POLICIES: Final[tuple[str, ...]] = get_args(PolicyName)

MOST_RULES: Final = 1000


class Mode(IntEnum):
    """The higher goes further."""

    OFF = 0
    SHADOW = 1
    ON = 2

    @property
    def word(self) -> str:
        """As people write it."""
        return self.name.lower()


WORDS: Final[Mapping[str, Mode]] = {mode.word: mode for mode in Mode}


class Modes:
    """What holds now.

    Args:
        default: of everything.
        policies, workflow_types: of these, words by name.
        suffices: whether forecasts of a workflow type have shown enough to be acted on; None asks for nothing.

    Attributes:
        changes: rises whenever an answer may be another one.
        whole: how far each policy goes for the type for which it goes furthest.
    """

    def __init__(
        self,
        default: str = "on",
        policies: Mapping[str, str] | None = None,
        workflow_types: Mapping[str, str] | None = None,
        suffices: Callable[[str | None], bool] | None = None,
    ) -> None:
        self.changes = 0
        self.whole: dict[str, Mode] = {}
        self._rules: dict[tuple[str | None, str | None], Mode] = {}
        self._suffices = suffices
        self.say(default)
        for policy, mode in (policies or {}).items():
            self.say(mode, policy)
        for name, mode in (workflow_types or {}).items():
            self.say(mode, None, name)

    def of(self, policy: str, learnt_as: str) -> Mode:
        """How far a policy goes for a workflow type; a prefetch no further than the eviction it stands on.

        Args:
            policy: one of POLICIES.
            learnt_as: the type as its tenant's; what is said of a type is said of all tenants', what its forecasts have
                shown is each one's own.
        """
        mode = self._rules[None, None] if len(self._rules) == 1 else self._said(policy, unscoped(learnt_as))
        if mode is Mode.ON and self._suffices is not None and not self._suffices(learnt_as):
            mode = Mode.SHADOW
        return min(mode, self.of("eviction", learnt_as)) if policy == "prefetch" else mode

    def say(self, mode: str, policy: str | None = None, workflow_type: str | None = None) -> None:
        """From now on.

        Args:
            mode: off, shadow or on.
            policy: of this one; None for all.
            workflow_type: of this one; None for all.

        Raises:
            ConfigurationError: there is no such mode or policy, or more is said than is kept.
        """
        if mode not in WORDS:
            raise ConfigurationError(f"mode is {mode!r:.60}; give one of {', '.join(WORDS)}")
        if policy is not None and policy not in POLICIES:
            raise ConfigurationError(f"policy is {policy!r:.60}; give one of {', '.join(POLICIES)}")
        if workflow_type is not None and len(workflow_type) > MAX_NAME:
            raise ConfigurationError(
                f"a workflow type has at most {MAX_NAME} characters; this one {len(workflow_type)}"
            )
        if policy is None and workflow_type is None:
            self._rules.clear()
        elif (policy, workflow_type) not in self._rules and len(self._rules) >= MOST_RULES:
            raise ConfigurationError(
                f"modes of {MOST_RULES} policies and workflow types are kept; say one for everything first"
            )
        self._rules[policy, workflow_type] = WORDS[mode]
        self.changed()

    def changed(self) -> None:
        """What suffices, or what was said, is another."""
        types: list[str | None] = list({workflow_type for _, workflow_type in self._rules})
        for policy in POLICIES:
            mode = max(self._said(policy, name) for name in types)
            if mode is Mode.ON and self._suffices is not None and not self._suffices(None):
                mode = Mode.SHADOW
            self.whole[policy] = mode
        self.whole["prefetch"] = min(self.whole["prefetch"], self.whole["eviction"])
        self.changes += 1

    def shadows(self, policy: str) -> bool:
        """Whether a policy may be in shadow for some type."""
        waits = self._suffices is not None
        return any(
            mode is Mode.SHADOW or (waits and mode is Mode.ON)
            for (of, _), mode in self._rules.items()
            if of is None or of == policy
        )

    def status(self) -> dict[str, Any]:
        """What was said, and how far each policy goes."""
        return {
            "default": self._rules[None, None].word,
            "said": [
                {"policy": policy, "workflow_type": name, "mode": mode.word}
                for (policy, name), mode in self._rules.items()
                if policy is not None or name is not None
            ],
            "policies": {policy: mode.word for policy, mode in self.whole.items()},
        }

    def _said(self, policy: str, workflow_type: str | None) -> Mode:
        rules = self._rules
        both = rules.get((policy, workflow_type)) if workflow_type is not None else None
        if both is not None:
            return both
        one = rules.get((policy, None))
        other = rules.get((None, workflow_type)) if workflow_type is not None else None
        if one is None:
            return rules[None, None] if other is None else other
        return one if other is None else min(one, other)
