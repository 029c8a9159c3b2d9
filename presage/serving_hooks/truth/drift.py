"""The alarm: a workflow type is no longer what its model was promoted on, and why.

Of each workflow type the figures of `promoted.py` are watched: agents never seen in training, accuracy one step ahead
at both moments, coverage at every quantile, and the call graph. Each has its detector (`detector.py`), whose limit is
the end of the promoted interval; a weighted mean of a type's detectors is one as well, and raises the alarm. So one
bound holds for all figures of a type together: as long as every true mean lies inside its interval, the chance of an
alarm among n workflows is at most n / `workflows` · `false_alarms`, however often one looks.

A workflow type that came without promoted figures is held against its own beginning: the first half of `learn_from`
workflows give the call graph, the second half the figures. That finds what changes later, not what was wrong from the
start. Figures that came without a call graph (`promoted_of_metrics`) wait for one, and go before what was learnt.

An alarm ends when, in a whole block of `recovery` workflows after it, the mean of each figure that raised it lies back
on the right side of its limit; a figure without evidence in the block (a model that is no longer asked has none) keeps
it up. It also ends by `reset`, when another version takes over. Then the detectors begin anew.

Workflows are taken as they end. Right after a start those that end are the short ones, which may differ from the mean.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from presage.errors import ConfigurationError
from presage.serving_hooks.truth.detector import Detectors, Side
from presage.serving_hooks.truth.outcomes import Followed
from presage.serving_hooks.truth.promoted import (
    ACCURACY,
    COVERAGE,
    TRANSITION,
    Figure,
    Promoted,
    Sums,
    figures_of,
    reach_of,
    sides,
)
from presage.serving_hooks.truth.transitions import Transitions

Kind = Literal["next-agent", "remaining-length"]

RECENT: Final = 50
"""Workflows that an alarm tells the mean of."""
REASONS: Final = 8
"""Told at most."""


@dataclass(frozen=True)
class DriftConfig:
    """When to raise an alarm, and when to take it back.

    Attributes:
        false_alarms: how likely a false one may be for a workflow type within so many workflows:
        workflows: see above.
        learn_from: workflows that a type without promoted figures is held against.
        recovery: workflows in a block that may end an alarm.
        types: workflow types watched that came without promoted figures; the one longest unseen makes room.
    """

    false_alarms: float = 0.01
    workflows: int = 1000
    learn_from: int = 300
    recovery: int = 100
    types: int = 64

    def __post_init__(self) -> None:
        if not 0 < self.false_alarms < 1:
            raise ConfigurationError(f"false_alarms is {self.false_alarms}; give a share between 0 and 1")
        for name, least in (("workflows", 1), ("learn_from", 4), ("recovery", 1), ("types", 1)):
            if getattr(self, name) < least:
                raise ConfigurationError(f"{name} is {getattr(self, name)}; give {least} or more")

    @property
    def threshold(self) -> float:
        """Evidence at which the alarm is raised."""
        return self.workflows / self.false_alarms


@dataclass(frozen=True)
class Reason:
    """A figure that left its promoted interval.

    Attributes:
        figure: its name, as `figures_of` has it.
        side: to which it left.
        live: its mean over the last `RECENT` workflows.
        promoted: what it was.
    """

    figure: str
    side: Side
    live: float
    promoted: Figure

    @property
    def text(self) -> str:
        """For people."""
        was = self.promoted
        return f"{self.figure}: {self.live:.3f}, promoted with {was.mean:.3f} [{was.low:.3f}, {was.high:.3f}]"

    def is_over(self, mean: float) -> bool:
        """Whether a mean lies on the right side of the limit again."""
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
        workflow_type: which.
        workflows: watched until it was raised, from the last reset or recovery.
        reasons: the strongest first.
    """

    workflow_type: str
    workflows: int
    reasons: tuple[Reason, ...]

    @property
    def text(self) -> str:
        """For people; the name of the type is quoted, since clients choose it."""
        why = "; ".join(reason.text for reason in self.reasons)
        return f"workflow type {self.workflow_type!r} has changed, noticed after {self.workflows} workflows: {why}"

    def speaks_of(self, kind: Kind) -> bool:
        """Whether forecasts of this kind are to be doubted: lengths by their coverage, agents by their accuracy, both
        where agents or the call graph are others.
        """
        other = COVERAGE if kind == "next-agent" else ACCURACY
        return any(not reason.figure.startswith(other) for reason in self.reasons)

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {"workflows": self.workflows, "reasons": [reason.to_dict() for reason in self.reasons]}


@dataclass(frozen=True)
class Recovered:
    """An alarm has ended by itself."""

    workflow_type: str
    workflows: int


class Drift:
    """Watches every workflow type.

    Args:
        promoted: figures by workflow type. They are never forgotten; others are, where types are too many.
        config: rates of false alarms and sizes.

    Attributes:
        alarms: those that stand, by workflow type.
        raised: how many there have been.
    """

    def __init__(self, promoted: Mapping[str, Promoted] | None = None, config: DriftConfig | None = None) -> None:
        self.config = config or DriftConfig()
        self.alarms: dict[str, Alarm] = {}
        self.raised = 0
        self._promoted: dict[str, _OfType] = {}
        self._others: OrderedDict[str, _OfType] = OrderedDict()
        for name, figures in (promoted or {}).items():
            self.reset(name, figures)

    def followed(self, workflow: Followed) -> Alarm | Recovered | None:
        """A workflow is over: the alarm it raises, or the end of one."""
        name = workflow.workflow_type
        said = self._of(name).followed(workflow)
        if isinstance(said, Alarm):
            self.alarms[name] = said
            self.raised += 1
        elif said is not None:
            del self.alarms[name]
        return said

    def falls_back(self, workflow_type: str, kind: Kind | None = None) -> bool:
        """Whether forecasts for this workflow type are to come from back-off counts; of this kind, or of any."""
        alarm = self.alarms.get(workflow_type)
        return alarm is not None and (kind is None or alarm.speaks_of(kind))

    def promoted(self, workflow_type: str) -> Promoted | None:
        """What a type is held against; None as long as that is being learnt."""
        of = self._promoted.get(workflow_type) or self._others.get(workflow_type)
        return of.promoted if of is not None else None

    def watched(self, workflow_type: str) -> int:
        """Workflows of a type held against its figures, from the last reset or recovery."""
        of = self._promoted.get(workflow_type) or self._others.get(workflow_type)
        return of.workflows if of is not None else 0

    def reset(self, workflow_type: str, promoted: Promoted | None = None) -> None:
        """Another model answers for this type: its alarm ends, and what it is held against is this, or is learnt."""
        self.alarms.pop(workflow_type, None)
        self._promoted.pop(workflow_type, None)
        self._others.pop(workflow_type, None)
        if promoted is not None:
            self._promoted[workflow_type] = _OfType(workflow_type, self.config, promoted)

    def _of(self, name: str) -> _OfType:
        of = self._promoted.get(name)
        if of is not None:
            return of
        of = self._others.get(name)
        if of is None:
            of = self._others[name] = _OfType(name, self.config, None)
            if len(self._others) > self.config.types:
                self.alarms.pop(self._others.popitem(last=False)[0], None)
        self._others.move_to_end(name)
        return of


class _OfType:
    """One workflow type: what it is held against, or the learning of that."""

    def __init__(self, name: str, config: DriftConfig, promoted: Promoted | None) -> None:
        self.name, self.config = name, config
        self.promoted = promoted if promoted is not None and promoted.transitions.counts else None
        self._given = promoted.figures if promoted is not None else {}
        self._learning = _Learning(config.learn_from)
        self._begin()

    def followed(self, workflow: Followed) -> Alarm | Recovered | None:
        promoted = self.promoted
        if promoted is None:
            learnt = self._learning.followed(workflow)
            if learnt is not None:
                self.promoted = Promoted(learnt.transitions, {**learnt.figures, **self._given}, learnt.workflows)
                self._begin()
            return None
        self.workflows += 1
        found = figures_of(workflow, promoted.transitions)
        values = {name: value for name, value in found.items() if name in promoted.figures}
        for name, value in values.items():
            self._recent.setdefault(name, deque(maxlen=RECENT)).append(value)
        return self._watch(promoted, values) if self._alarm is None else self._wait(self._alarm, values)

    def _begin(self) -> None:
        """Detectors without any evidence, one a figure and side."""
        self.workflows = 0
        self._alarm: Alarm | None = None
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
        strong = [self._figures[place] for place in order if evidence[place] >= enough]
        reasons = tuple(
            Reason(name, side, sum(self._recent[name]) / len(self._recent[name]), promoted.figures[name])
            for name, side in strong[:REASONS]
        )
        self._alarm = Alarm(self.name, self.workflows, reasons)
        return self._alarm

    def _wait(self, alarm: Alarm, values: Mapping[str, float]) -> Recovered | None:
        """The alarm stands: does this block end it?"""
        self._in_block += 1
        for reason in alarm.reasons:
            if reason.figure in values:
                self._block.setdefault(reason.figure, Sums()).add(values[reason.figure])
        if self._in_block < self.config.recovery:
            return None
        block, self._block, self._in_block = self._block, {}, 0
        if not all(reason.figure in block and reason.is_over(block[reason.figure].mean) for reason in alarm.reasons):
            return None
        workflows = self.workflows
        self._begin()
        return Recovered(self.name, workflows)


class _Learning:
    """What a type without promoted figures is held against: its own beginning."""

    def __init__(self, workflows: int) -> None:
        self._for_graph = workflows // 2
        self._for_figures = workflows - self._for_graph
        self._transitions = Transitions()
        self._sums: dict[str, Sums] = {}
        self._seen = 0

    def followed(self, workflow: Followed) -> Promoted | None:
        self._seen += 1
        if self._seen <= self._for_graph:
            self._transitions.add(workflow.transitions)
            return None
        for name, value in figures_of(workflow, self._transitions).items():
            self._sums.setdefault(name, Sums()).add(value)
        if self._seen < self._for_graph + self._for_figures:
            return None
        return Promoted(
            self._transitions, {name: of.figure(reach_of(name)) for name, of in self._sums.items()}, self._for_figures
        )


def _weights(names: list[str]) -> NDArray[np.float64]:
    """What each detector counts, summing to 1: half for the transitions together, half for the other figures."""
    of_graph = np.array([name.startswith(TRANSITION) for name in names], bool)
    weights = np.zeros(len(names))
    groups = [group for group in (of_graph, ~of_graph) if group.any()]
    for group in groups:
        weights[group] = 1.0 / len(groups) / group.sum()
    return weights
