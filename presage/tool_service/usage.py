"""What is learnt of each tool: how long preparing takes, which agents' steps need it, and how long after they begin."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final

import msgspec

_LATEST: Final = 64
"""Latest steps and preparations that count."""
_MOST_ROLES: Final = 1024
"""Agents, by workflow type, that a tool is learnt of; beyond, the least recently seen one is forgotten."""
_SAMPLES: Final = 9


@dataclass(slots=True, eq=False)
class _Role:
    """The steps of one agent in workflows without the tool: which needed it, and the seconds until they did."""

    needed: deque[bool] = field(default_factory=lambda: deque(maxlen=_LATEST))
    after_s: deque[float] = field(default_factory=lambda: deque(maxlen=_LATEST))


class ToolUsage:
    """Of one tool.

    Args:
        setup_s: how long preparing takes until the first time is measured.
    """

    def __init__(self, setup_s: float) -> None:
        self._first = setup_s
        self._setups: deque[float] = deque(maxlen=_LATEST)
        self._roles: OrderedDict[tuple[str, str], _Role] = OrderedDict()

    @property
    def setup_s(self) -> float:
        """The median of the latest times of preparing."""
        return median(self._setups) if self._setups else self._first

    def prepared(self, seconds: float) -> None:
        """Preparing took so long."""
        self._setups.append(seconds)

    def stepped(self, workflow_type: str, agent: str, after_s: float | None) -> None:
        """A step of this agent needed the tool after so many seconds, or did not (None)."""
        role = self._roles.setdefault((workflow_type, agent), _Role())
        self._roles.move_to_end((workflow_type, agent))
        role.needed.append(after_s is not None)
        if after_s is not None:
            role.after_s.append(after_s)
        if len(self._roles) > _MOST_ROLES:
            self._roles.popitem(last=False)

    def probability(self, workflow_type: str, agent: str) -> float:
        """That a step of this agent needs the tool: n of N steps give n / (N + 1), so that what was never seen is not
        prepared for."""
        role = self._roles.get((workflow_type, agent))
        return sum(role.needed) / (len(role.needed) + 1) if role is not None else 0.0

    def after_s(self, workflow_type: str, agent: str) -> Sequence[float]:
        """Seconds from the beginning of such a step until it needs the tool, at evenly spaced quantiles."""
        role = self._roles.get((workflow_type, agent))
        if role is None or not role.after_s:
            return (0.0,)
        sorted_s = sorted(role.after_s)
        return [sorted_s[(2 * i + 1) * len(sorted_s) // (2 * _SAMPLES)] for i in range(_SAMPLES)]

    def to_json(self) -> bytes:
        """To keep over a restart."""
        roles = [
            [*key, {"needed": list(role.needed), "after_s": list(role.after_s)}] for key, role in self._roles.items()
        ]
        return msgspec.json.encode({"setups": list(self._setups), "roles": roles})

    def restore(self, kept: bytes) -> None:
        """Goes on from `to_json`."""
        restored = msgspec.json.decode(kept)
        self._setups.extend(restored["setups"])
        for workflow_type, agent, role in restored["roles"]:
            learnt = self._roles[workflow_type, agent] = _Role()
            learnt.needed.extend(role["needed"])
            learnt.after_s.extend(role["after_s"])
