"""The drift alarm: raised when a workflow type differs from the traces that its model was promoted on.

Each figure of `promoted.py` has a detector whose limit is the end of the promoted interval. A weighted mean of a type's
detectors raises the alarm, so one bound holds for all its figures: while every true mean lies inside its interval, the
chance of an alarm among n workflows is at most n / `workflows` · `false_alarms`, however often it is checked.

A workflow type without promoted figures is compared with its own first `learn_from` workflows: the first half gives the
call graph, the second half the figures. The same holds for workflows without an end (expired or aborted) where the
promoted figures are of finished ones.

An alarm ends when, in a block of `recovery` workflows, the mean of each figure that raised it is back inside its limit
(a figure without data in the block keeps the alarm); another version begins without alarms. Workflows are
counted as they end: right after a start these are the short ones, which may differ from the mean.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from presage.serving_hooks.counts import ModelKind
from presage.serving_hooks.monitoring.causes import CALLED, OTHER_TYPE, Cause, causes_of
from presage.serving_hooks.monitoring.outcomes import END, Followed
from presage.serving_hooks.monitoring.promoted import (
    ACCURACY,
    COVERAGE,
    TRANSITION,
    Figure,
    Promoted,
    PromotedLearner,
    Side,
    Sums,
    figures_of,
    sides,
)

SHARES: Final = (0.9, 0.5, 0.25, 0.125, 0.0625, 0.03125)
"""Bets, as shares of the largest bet that cannot lose everything."""

_NARROWEST: Final = 1e-3
"""A limit of 0 would allow unbounded bets; a wider limit raises fewer alarms."""
_MOST: Final = 1e200


class Detectors:
    """Sequential tests whether means of bounded numbers exceed their limits, with a bounded rate of false alarms.

    Betting (Waudby-Smith & Ramdas, 2024, §4): for numbers x in [0, 1] whose mean, given the past, is at most the limit
    m,

        e_t = 1 + λ (x_t − m),   0 ≤ λ < 1/m

    has a mean of at most 1 for any such distribution; for a mean of at least m the same holds with m − x and
    λ < 1/(1 − m). A change may come at any workflow, so R_t sums the bets that start at each workflow (the
    Shiryaev–Roberts e-detector of Shin, Ramdas & Rinaldo, 2022, §3):

        R_t = (R_{t−1} + 1) · e_t,   R_0 = 0

    Without a change, R_t grows by at most 1 a workflow on average, so R_t + (n − t) is a supermartingale that starts at
    n and is never negative: by Ville's inequality R reaches c among the first n workflows with a probability of at most
    n / c. The bound needs independent workflows: a run of hard or easy workflows looks like a change. The mean of R
    over a grid of λ, and any weighted mean over figures, keeps it.

    Args:
        limits: m of each, D numbers between 0 and 1.
        sides: the side of its limit that each mean must not be on, D of them.
    """

    def __init__(self, limits: Sequence[float], sides: Sequence[Side]) -> None:
        above = np.array([side == "above" for side in sides], bool)
        given = np.array(limits, np.float64)
        self._limits = np.where(above, np.maximum(given, _NARROWEST), np.minimum(given, 1.0 - _NARROWEST))
        self._signs = np.where(above, 1.0, -1.0)
        boldest = 1.0 / np.where(above, self._limits, 1.0 - self._limits)
        self._bets = boldest[:, None] * np.array(SHARES)
        self._sums = np.zeros_like(self._bets)

    @property
    def evidence(self) -> NDArray[np.float64]:
        """R of each, float64 [D]; without a change, its expectation is at most the number of workflows."""
        evidence: NDArray[np.float64] = self._sums.mean(axis=1)
        return evidence

    def add(self, values: NDArray[np.float64]) -> None:
        """Adds a workflow's numbers, float64 [D], between 0 and 1; a NaN makes no bet."""
        gains = self._signs * (values - self._limits)
        finite = np.isfinite(gains)
        sums = (self._sums[finite] + 1.0) * (1.0 + self._bets[finite] * gains[finite, None])
        self._sums[finite] = np.minimum(sums, _MOST)


RECENT: Final = 50
"""Workflows of which an alarm shows the mean."""
LATEST: Final = 200
"""Workflows whose figures are shown beside the promised ones."""
_JUDGED_FROM: Final = 20
"""Workflows from which a promise counts as kept or not."""
REASONS: Final = 8
"""Reasons shown at most."""


@dataclass(frozen=True)
class Reason:
    """A figure of `figures_of` that left its promoted interval on one side; `live` is its mean over the last `RECENT`
    workflows."""

    figure: str
    side: Side
    live: float
    promoted: Figure

    @property
    def text(self) -> str:
        """As part of a log message."""
        was = self.promoted
        return f"{self.figure}: {self.live:.3f}, promoted with {was.mean:.3f} [{was.low:.3f}, {was.high:.3f}]"

    def is_over(self, mean: float) -> bool:
        """Whether a mean is back inside the limit."""
        return mean <= self.promoted.high if self.side == "above" else mean >= self.promoted.low

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        was = self.promoted
        return {
            "figure": self.figure,
            "side": self.side,
            "live": self.live,
            "promoted": was.mean,
            "ci95": [was.low, was.high],
        }


@dataclass(frozen=True)
class Alarm:
    """A workflow type has changed.

    Attributes:
        workflows: watched until it was raised, from the last recovery.
        reasons: the strongest first.
    """

    workflow_type: str
    workflows: int
    reasons: tuple[Reason, ...]

    @property
    def text(self) -> str:
        """As a log message; quotes the name of the type, since clients choose it."""
        why = "; ".join(reason.text for reason in self.reasons)
        return f"workflow type {self.workflow_type!r} has changed, noticed after {self.workflows} workflows: {why}"

    def affects(self, kind: ModelKind) -> bool:
        """Whether it affects forecasts of this kind: coverage only those of lengths, accuracy only those of agents.

        A call graph that has changed affects all of them.
        """
        of_others = {"next-agent": (COVERAGE,), "remaining-length": (ACCURACY,)}.get(kind, (ACCURACY, COVERAGE))
        return any(not reason.figure.startswith(of_others) for reason in self.reasons)

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {"workflows": self.workflows, "reasons": [reason.to_dict() for reason in self.reasons]}


@dataclass(frozen=True)
class Recovered:
    """The alarm of a workflow type has ended because its figures recovered."""

    workflow_type: str


@dataclass(frozen=True)
class DriftConfig:
    """When an alarm is raised, and when it ends.

    Attributes:
        false_alarms: probability of a false alarm for a workflow type within `workflows` workflows.
        learn_from: first workflows that a type without promoted figures is compared with.
        recovery: workflows in a block that may end an alarm.
        types: workflow types watched without promoted figures; the least recently seen one is dropped.
    """

    false_alarms: float = 0.01
    workflows: int = 1000
    learn_from: int = 300
    recovery: int = 100
    types: int = 64

    @property
    def threshold(self) -> float:
        """Evidence at which the alarm is raised."""
        return self.workflows / self.false_alarms


class Watch:
    """Watches one workflow type; learns its figures and call graph if there are none of a promotion.

    Attributes:
        promoted: the figures it is compared with; None while they are being learnt.
        workflows: compared with `promoted` since the last recovery.
        called: the agents that each of the latest workflows has called.
    """

    def __init__(self, name: str, config: DriftConfig, promoted: Promoted | None) -> None:
        self.name, self.config = name, config
        self.promoted = promoted if promoted is not None and promoted.transitions.counts else None
        self.called: deque[frozenset[str]] = deque(maxlen=CALLED)
        self._learner = PromotedLearner(config.learn_from)
        self._begin()

    def followed(self, workflow: Followed) -> Alarm | Recovered | None:
        """Counts a workflow. Returns the alarm that it raises or ends."""
        promoted = self.promoted
        self.called.append(frozenset(agent for _, agent in workflow.transitions if agent != END))
        if promoted is None:
            if self._learner.add(workflow):
                self.promoted = self._learner.figures()
                self._begin()
            return None
        self.workflows += 1
        figures = figures_of(workflow, promoted.transitions)
        values = {name: value for name, value in figures.items() if name in promoted.figures}
        for name, value in values.items():
            self._recent.setdefault(name, deque(maxlen=LATEST)).append(value)
        return self._watch(promoted, values) if self.alarm is None else self._wait(self.alarm, values)

    def _begin(self) -> None:
        """Resets the detectors, one for each figure and side."""
        self.workflows = 0
        self.alarm: Alarm | None = None
        self._recent: dict[str, deque[float]] = {}
        self._block: dict[str, Sums] = {}
        self._in_block = 0
        figures = self.promoted.figures if self.promoted is not None else {}
        self._figures = [(name, side) for name in figures for side in sides(name)]
        limits = [figures[name].high if side == "above" else figures[name].low for name, side in self._figures]
        self._detectors = Detectors(limits, [side for _, side in self._figures])
        self._weights = _weights([name for name, _ in self._figures])

    def _watch(self, promoted: Promoted, values: Mapping[str, float]) -> Alarm | None:
        self._detectors.add(np.array([values.get(name, np.nan) for name, _ in self._figures]))
        evidence, enough = self._detectors.evidence, self.config.threshold
        if evidence @ self._weights < enough:
            return None
        order = np.argsort(-evidence, kind="stable")
        # The largest evidence is at least the weighted mean, except for rounding.
        strong = [self._figures[place] for place in order if evidence[place] >= min(enough, evidence.max())]
        reasons = tuple(
            Reason(name, side, fmean([*self._recent[name]][-RECENT:]), promoted.figures[name])
            for name, side in strong[:REASONS]
        )
        self.alarm = Alarm(self.name, self.workflows, reasons)
        return self.alarm

    def live(self) -> dict[str, tuple[Figure, int]]:
        """Accuracy and coverage of the latest `LATEST` workflows, each with how many have such a figure."""
        figures = {}
        for name, values in self._recent.items():
            if name.startswith((ACCURACY, COVERAGE)):
                numbers = np.array(values)
                sums = Sums(len(numbers), float(numbers.mean()), float(numbers.var()) * len(numbers))
                figures[name] = sums.figure(), sums.workflows
        return figures

    def _wait(self, alarm: Alarm, values: Mapping[str, float]) -> Recovered | None:
        """Checks whether the current block ends the alarm."""
        self._in_block += 1
        for reason in alarm.reasons:
            if reason.figure in values:
                self._block.setdefault(reason.figure, Sums()).add(values[reason.figure])
        if self._in_block < self.config.recovery:
            return None
        block, self._block, self._in_block = self._block, {}, 0
        if not all(reason.figure in block and reason.is_over(block[reason.figure].mean) for reason in alarm.reasons):
            return None
        self._begin()
        return Recovered(self.name)


def _weights(names: list[str]) -> NDArray[np.float64]:
    """The weight of each detector, summing to 1: half for all transitions together, half for the other figures."""
    of_graph = np.array([name.startswith(TRANSITION) for name in names], bool)
    weights = np.zeros(len(names))
    groups = [group for group in (of_graph, ~of_graph) if group.any()]
    for group in groups:
        weights[group] = 1.0 / len(groups) / group.sum()
    return weights


class Drift:
    """Watches every workflow type. Those with promoted figures are never dropped; others are, beyond `config.types`."""

    def __init__(self, promoted: Mapping[str, Promoted] | None = None, config: DriftConfig | None = None) -> None:
        self.config = config or DriftConfig()
        self.alarms: dict[str, Alarm] = {}
        self.raised = 0
        self._promoted = {name: Watch(name, self.config, figures) for name, figures in (promoted or {}).items()}
        self._others: OrderedDict[str, Watch] = OrderedDict()

    def followed(self, workflow: Followed) -> Alarm | Recovered | None:
        """Counts a workflow. Returns the alarm that it raises or ends."""
        name = workflow.workflow_type
        change = self._of(workflow).followed(workflow)
        if isinstance(change, Alarm):
            self.raised += 1
        if change is not None:
            self._set_alarm(name)
        return None if isinstance(change, Recovered) and name in self.alarms else change

    def falls_back(self, workflow_type: str, kind: ModelKind | None = None) -> bool:
        """Whether an alarm sends forecasts of this workflow type, and kind if given, to online counts."""
        alarm = self.alarms.get(workflow_type)
        return alarm is not None and (kind is None or alarm.affects(kind))

    def causes(self, workflow_type: str) -> tuple[Cause, ...]:
        """Likely causes why a workflow type differs from the traces of the promotion."""
        watch = self._promoted.get(workflow_type)
        if watch is None or watch.promoted is None:
            return (OTHER_TYPE,) if self._promoted else ()
        return causes_of(watch.promoted.transitions, watch.called)

    def promised(self) -> dict[str, dict[str, Any]]:
        """Promised figures beside live ones by workflow type, as JSON values.

        - `figures`: by name, `promised` and `live`, each [mean, low, high] of 95 %, and the latest `workflows` behind
          the live one;
        - `kept`: whether no live interval lies below the promised one; null for less than 20 workflows, and for a type
          that nothing was promised for;
        - `causes`: likely ones, where a promise is not kept, an alarm stands, or nothing was promised.
        """
        by_type = {}
        for name, watch in self._promoted.items():
            figures, kept = {}, None
            promised = watch.promoted.figures if watch.promoted is not None else {}
            for figure, (live, workflows) in watch.live().items():
                was = promised[figure]
                figures[figure] = {
                    "promised": [was.mean, was.low, was.high],
                    "live": [live.mean, live.low, live.high],
                    "workflows": workflows,
                }
                if workflows >= _JUDGED_FROM:
                    kept = kept is not False and live.high >= was.low
            broken = kept is False or name in self.alarms
            causes = [cause.to_dict() for cause in self.causes(name)] if broken else []
            if figures or causes:
                by_type[name] = {"figures": figures, "kept": kept, "causes": causes}
        for name, watch in self._others.items():
            if self._promoted and name not in self._promoted and len(watch.called) >= _JUDGED_FROM:
                by_type[name] = {"figures": {}, "kept": None, "causes": [OTHER_TYPE.to_dict()]}
        return by_type

    def watch(self, workflow_type: str) -> Watch | None:
        """What watches a type: by its promoted figures if there are any."""
        return self._promoted.get(workflow_type) or self._others.get(workflow_type)

    def _set_alarm(self, name: str) -> None:
        """Sets the alarm of a type. If both of its watches have one, that of the promoted figures counts."""
        watches = (self._promoted.get(name), self._others.get(name))
        current = [watch.alarm for watch in watches if watch is not None and watch.alarm is not None]
        self.alarms.pop(name, None)
        if current:
            self.alarms[name] = current[0]

    def _of(self, workflow: Followed) -> Watch:
        name = workflow.workflow_type
        watch = self._promoted.get(name)
        if watch is not None and (workflow.ended or watch.promoted is None or not watch.promoted.ended):
            return watch
        watch = self._others.get(name)
        if watch is None:
            watch = self._others[name] = Watch(name, self.config, None)
            if len(self._others) > self.config.types:
                self._set_alarm(self._others.popitem(last=False)[0])
        self._others.move_to_end(name)
        return watch
