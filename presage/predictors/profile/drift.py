"""Do two sets of workflows come from one application, and if not, what has changed?

Every test compares whole workflows, because the steps of one are not independent: Welch's test of the mean number of
steps of an agent, and a test of two proportions for the share of workflows that have an agent, or one agent calling
another. The application has changed if the least p, times the number of tests (Bonferroni), is below LEVEL. The
distance is that between the agents' shares of all steps (total variation): 0 for the same, 1 for no agent in common.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Final

from presage.predictors.profile.agents import AgentShare, AgentUsage
from presage.predictors.profile.automaton import wilson

LEVEL: Final = 0.01
_NONE: Final = AgentShare(0.0, 0.0, 0)
_Z95: Final = 1.959964


@dataclass(frozen=True)
class AgentChange:
    """How an agent's use changed: mean steps a workflow, shares of workflows that have it, and p, corrected.

    `ratio` is the second mean over the first, with its 95 % interval (delta method); None if one of them is 0.
    """

    agent: str
    means: tuple[float, float]
    shares: tuple[float, float]
    ratio: tuple[float, float, float] | None
    p: float


@dataclass(frozen=True)
class CallChange:
    """How the share of workflows with a call changed, with both 95 % intervals (Wilson), and p, corrected."""

    agent: str
    called: str
    shares: tuple[float, float]
    intervals: tuple[tuple[float, float], tuple[float, float]]
    p: float


@dataclass(frozen=True)
class ProfileDrift:
    """The changes from the first to the second, the surest first; `changed` if any is below LEVEL."""

    workflows: tuple[int, int]
    distance: float
    p: float
    agents: tuple[AgentChange, ...]
    calls: tuple[CallChange, ...]

    @property
    def changed(self) -> bool:
        """Whether the two differ."""
        return self.p < LEVEL

    def sentences(self) -> list[str]:
        """The significant changes in words: agents first, then calls between agents of both."""
        sentences, named = [], set()
        come = [agent for agent in self.agents if agent.p < LEVEL and not agent.means[0]]
        gone = [agent for agent in self.agents if agent.p < LEVEL and not agent.means[1]]
        for old in gone:
            twins = [new for new in come if abs(new.means[1] - old.means[0]) <= 0.1 * old.means[0]]
            if len(twins) == 1 and twins[0].agent not in named:
                sentences.append(
                    f"{old.agent} no longer runs and {twins[0].agent} runs as often: it may have been renamed."
                )
                named |= {old.agent, twins[0].agent}
        for change in self.agents:
            if change.p >= LEVEL or change.agent in named:
                continue
            named.add(change.agent)
            means = f"{change.means[0]:.2f} to {change.means[1]:.2f} steps a workflow"
            if change.ratio is None:
                was, share = (
                    ("is new", change.shares[1]) if not change.means[0] else ("no longer runs", change.shares[0])
                )
                sentences.append(
                    f"{change.agent} {was}: {share:.0%} of the workflows {'have' if was == 'is new' else 'had'} it."
                )
            elif change.ratio[0] >= 1:
                sentences.append(f"{change.agent} now runs {_times(change.ratio)} as often: {means}.")
            else:
                sentences.append(f"{change.agent} now runs less often, {_times(change.ratio)} as often: {means}.")
        for call in self.calls:
            if call.p < LEVEL and not {call.agent, call.called} & named:
                ends = [f"[{low:.0%}, {high:.0%}]" for low, high in call.intervals]
                now, before = (f"{share:.0%} {end}" for share, end in zip(call.shares[::-1], ends[::-1], strict=True))
                sentences.append(
                    f"{call.agent} is followed by {call.called} in {now} of the workflows, before in {before}."
                )
        return sentences

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "workflows": list(self.workflows),
            "distance": self.distance,
            "p": self.p,
            "changed": self.changed,
            "sentences": self.sentences(),
            "agents": [vars(change) for change in self.agents],
            "calls": [vars(change) for change in self.calls],
        }


def _times(ratio: tuple[float, float, float]) -> str:
    middle, low, high = ratio
    word = "twice" if 1.95 <= middle < 2.05 else f"{middle:.2g} times"
    return f"{word} [{low:.2g}, {high:.2g}]"


def drift(first: AgentUsage, second: AgentUsage) -> ProfileDrift:
    """What changed from the first workflows to the second."""
    n, m = first.workflows, second.workflows
    names = sorted(first.agents.keys() | second.agents.keys())
    pairs = sorted({(a, b) for usage in (first, second) for a, called in usage.calls.items() for b in called})
    tests = max(2 * len(names) + len(pairs), 1)
    agents = []
    for name in names:
        a, b = first.agents.get(name, _NONE), second.agents.get(name, _NONE)
        p = min(_welch(a, n, b, m), _proportions(a.workflows, n, b.workflows, m))
        shares = a.workflows / n, b.workflows / m
        agents.append(AgentChange(name, (a.mean, b.mean), shares, _ratio(a, n, b, m), min(1.0, p * tests)))
    calls = []
    for a_name, b_name in pairs:
        x, y = (usage.calls.get(a_name, {}).get(b_name, 0) for usage in (first, second))
        p = min(1.0, _proportions(x, n, y, m) * tests)
        calls.append(CallChange(a_name, b_name, (x / n, y / m), (wilson(x, n), wilson(y, m)), p))
    apart = sum(
        abs(first.agents.get(name, _NONE).mean / first.steps - second.agents.get(name, _NONE).mean / second.steps)
        for name in names
    )
    least = min([1.0, *(change.p for change in agents), *(change.p for change in calls)])
    return ProfileDrift(
        (n, m),
        apart / 2,
        least,
        tuple(sorted(agents, key=lambda change: (change.p, change.agent))),
        tuple(sorted(calls, key=lambda change: (change.p, change.agent, change.called))),
    )


def _variance(share: AgentShare, workflows: int) -> float:
    """Of the mean; a quarter of a step a workflow keeps it above 0 where all workflows have the same number."""
    return (share.deviation**2 + 0.25) / workflows


def _welch(a: AgentShare, n: int, b: AgentShare, m: int) -> float:
    z = abs(a.mean - b.mean) / math.sqrt(_variance(a, n) + _variance(b, m))
    return 2 * NormalDist().cdf(-z)


def _proportions(x: int, n: int, y: int, m: int) -> float:
    pooled = (x + y) / (n + m)
    if pooled in (0.0, 1.0):
        return 1.0
    each = 1 / n + 1 / m
    z = max(abs(x / n - y / m) - each / 2, 0.0) / math.sqrt(pooled * (1 - pooled) * each)
    return 2 * NormalDist().cdf(-z)


def _ratio(a: AgentShare, n: int, b: AgentShare, m: int) -> tuple[float, float, float] | None:
    if not a.mean or not b.mean:
        return None
    spread = math.sqrt(a.deviation**2 / (n * a.mean**2) + b.deviation**2 / (m * b.mean**2))
    middle = b.mean / a.mean
    return middle, middle * math.exp(-_Z95 * spread), middle * math.exp(_Z95 * spread)
