"""One workflow type under watch: detectors of its figures, the alarm, the way back. The rules stand in `drift.py`."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from presage.errors import ConfigurationError
from presage.serving_hooks.truth.alarm import REASONS, RECENT, Alarm, Reason, Recovered
from presage.serving_hooks.truth.detector import Detectors
from presage.serving_hooks.truth.outcomes import Followed
from presage.serving_hooks.truth.promoted import TRANSITION, Promoted, Sums, figures_of, reach_of, sides
from presage.serving_hooks.truth.transitions import Transitions


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


class Watch:
    """What one workflow type is held against, or the learning of that.

    Args:
        name: of the type.
        config: of the alarm.
        promoted: figures; without a call graph they wait for one, and go before what is learnt.

    Attributes:
        promoted: what it is held against; None as long as that is being learnt.
        alarm: the one that stands, if any.
        workflows: held against it, from the last reset or recovery.
    """

    def __init__(self, name: str, config: DriftConfig, promoted: Promoted | None) -> None:
        self.name, self.config = name, config
        self.promoted = promoted if promoted is not None and promoted.transitions.counts else None
        self._given = promoted.figures if promoted is not None else {}
        self._learning = _Learning(config.learn_from)
        self._begin()

    def followed(self, workflow: Followed) -> Alarm | Recovered | None:
        """A workflow is over."""
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
        return self._watch(promoted, values) if self.alarm is None else self._wait(self.alarm, values)

    def _begin(self) -> None:
        """Detectors without any evidence, one a figure and side."""
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
        # The largest is no smaller than the mean, but for rounding.
        strong = [self._figures[place] for place in order if evidence[place] >= min(enough, evidence.max())]
        reasons = tuple(
            Reason(name, side, sum(self._recent[name]) / len(self._recent[name]), promoted.figures[name])
            for name, side in strong[:REASONS]
        )
        self.alarm = Alarm(self.name, self.workflows, reasons)
        return self.alarm

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
