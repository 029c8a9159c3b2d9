"""What a model was promoted with: figures of a workflow type that later workflows are held against.

Every figure is a mean over workflows of a number between 0 and 1 a workflow, so that its interval is that of workflows
and a sequential test can bet on it (`detector.py`).
`figures_of` is the one definition, for the promoted figures and
for live ones. A mean of workflows' own shares is `accuracy_by_workflow` of an evaluation, not its `accuracy`, in which
a long workflow weighs more.

Accuracy is watched one step ahead: at 2 to K steps it is the same transitions seen again (`live_accuracy.py` tells it).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import sqrt
from typing import Any, Final, TypeVar

from presage.errors import ConfigurationError
from presage.features.moment import MOMENTS
from presage.serving_hooks.truth.detector import Side
from presage.serving_hooks.truth.outcomes import COUNTS, END, Followed
from presage.serving_hooks.truth.transitions import Transitions, name_of

NEVER_SEEN: Final = "agents never seen"
"""Share of the workflows that call one."""
NEVER_SEEN_PAIRS: Final = "transitions never seen"
"""Share of the workflows in which one known agent follows another as it never did."""
TRANSITION: Final = "transition "
"""Share of a workflow's transitions that lead from one agent to another: the call graph."""
ACCURACY: Final = "accuracy at "
COVERAGE: Final = "coverage at "

Of = TypeVar("Of")

_Z95: Final = 1.959964
_Z999: Final = 3.290527
_RULE_OF_THREE: Final = 3.0
"""Of n workflows that show something never, up to 3/n may show it: 95 %."""


@dataclass(frozen=True)
class Figure:
    """A mean over workflows and its interval, between 0 and 1."""

    mean: float
    low: float
    high: float

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.mean <= self.high <= 1:
            raise ConfigurationError(
                f"a figure of {self.mean} within [{self.low}, {self.high}]; "
                "numbers between 0 and 1 are wanted, the mean inside its interval"
            )


@dataclass(slots=True)
class Sums:
    """A mean and its spread, one number a workflow at a time (Welford, 1962)."""

    workflows: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def add(self, value: float) -> None:
        """One workflow more."""
        self.workflows += 1
        step = value - self.mean
        self.mean += step / self.workflows
        self.squares += step * (value - self.mean)

    def figure(self, errors: float = _Z95) -> Figure:
        """With an interval that is never without width: the normal one of so many standard errors to either side, and
        3/n more for what n workflows cannot show.
        """
        n = self.workflows
        reach = _RULE_OF_THREE / n + (errors * sqrt(self.squares / (n - 1) / n) if n > 1 else 1.0)
        mean = min(max(self.mean, 0.0), 1.0)
        return Figure(mean, max(0.0, mean - reach), min(1.0, mean + reach))


@dataclass(frozen=True)
class Promoted:
    """Figures of one workflow type, and the call graph they go with.

    Attributes:
        transitions: of the traces a model learnt from: what is known there is not new.
        figures: by name, as `figures_of` has them, on workflows that neither the model nor `transitions` knows.
        workflows: how many stand behind them.
        ended: whether all of these have ended, none was cut: then only such are held against them.
    """

    transitions: Transitions
    figures: Mapping[str, Figure] = field(default_factory=dict)
    workflows: int = 0
    ended: bool = False

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "workflows": self.workflows,
            "ended": self.ended,
            "figures": {name: [of.mean, of.low, of.high] for name, of in self.figures.items()},
            "transitions": self.transitions.to_dict(),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Promoted:
        """Inverse of `to_dict`.

        Raises:
            ConfigurationError: a figure is not one.
            LookupError, TypeError, ValueError: it is no such object.
        """
        figures = {str(name): Figure(*map(float, of)) for name, of in data["figures"].items()}
        return cls(Transitions.from_dict(data["transitions"]), figures, int(data["workflows"]), bool(data["ended"]))


def promoted_of(workflows: Iterable[Followed], transitions: Transitions) -> Promoted:
    """Figures of workflows of one type beside these transitions, which must not be counted on the same workflows."""
    sums: dict[str, Sums] = {}
    count = 0
    for followed in workflows:
        count += 1
        for name, value in figures_of(followed, transitions).items():
            sums.setdefault(name, Sums()).add(value)
    return Promoted(transitions, {name: of.figure(reach_of(name)) for name, of in sums.items()}, count)


def promoted_by_type(workflows: Iterable[Followed], at_least: int = 20) -> dict[str, Promoted]:
    """What each workflow type is held against, from workflows that the model was not trained on, oldest first.

    The first half of a type's workflows give its call graph, the second half its figures; of fewer than `at_least`
    workflows none are made.
    """
    by_type: dict[str, list[Followed]] = {}
    for workflow in workflows:
        by_type.setdefault(workflow.workflow_type, []).append(workflow)
    found = {}
    for name, of in by_type.items():
        if len(of) >= at_least:
            transitions = Transitions()
            for workflow in of[: len(of) // 2]:
                transitions.add(workflow.transitions)
            figures = promoted_of(of[len(of) // 2 :], transitions)
            found[name] = replace(figures, ended=all(workflow.ended for workflow in of))
    return found


def promoted_of_metrics(metrics: Mapping[str, Any]) -> dict[str, Promoted]:
    """Accuracy by workflow type from the evaluation of a next-agent predictor, as `metrics.json` has it.

    The interval is that of `accuracy` moved to `accuracy_by_workflow`, which has none of its own there. Coverage of
    lengths is not taken over: an evaluation weighs it by steps, and call graphs are not in it. `Drift` learns the
    others from the workflows that come.

    Args:
        metrics: the object of the command contract, of kind "next-agent".
    """
    found = {}
    for name, moments in metrics["by_workflow_type"].items():
        figures = {}
        for moment, of in moments.items():
            mean, (low, high), whole = of["accuracy_by_workflow"][0], of["ci95"][0], of["accuracy"][0]
            if None not in (mean, low, high, whole):
                ends = max(0.0, mean - (whole - low)), min(1.0, mean + (high - whole))
                figures[f"{ACCURACY}{moment}"] = Figure(mean, *ends)
        found[name] = Promoted(Transitions(), figures, max((of["workflows"] for of in moments.values()), default=0))
    return found


def figures_of(followed: Followed, transitions: Transitions) -> dict[str, float]:
    """Numbers between 0 and 1 of one workflow by name; what it does not show is left out.

    Of the predictor's forecasts, not of those that counts gave in its place; of the model that forecast last, where a
    reload came between.
    """
    found: dict[str, float] = {}
    total = sum(followed.transitions.values())
    if total:
        new = [pair for pair in followed.transitions if pair not in transitions.counts]
        strange = {agent for pair in new for agent in pair if agent != END and agent not in transitions.agents}
        found[NEVER_SEEN] = float(bool(strange))
        found[NEVER_SEEN_PAIRS] = float(any(strange.isdisjoint(pair) for pair in new))
        for pair in transitions.watched:
            found[f"{TRANSITION}{name_of(pair)}"] = followed.transitions.get(pair, 0) / total
    tally = _latest(followed.next_agent)
    if tally is not None:
        judged, right = (tally.sums[plane, :, 0].sum(axis=-1) for plane in (0, 2))
        for at, moment in enumerate(MOMENTS):
            if judged[at]:
                found[f"{ACCURACY}{moment}"] = float(right[at] / judged[at])
    lengths = _latest(followed.lengths)
    if lengths is not None and lengths.judged:
        for quantile, within in zip(lengths.quantiles, lengths.within.tolist(), strict=True):
            found[f"{COVERAGE}{quantile:g}"] = within / lengths.judged
    return found


def sides(name: str) -> tuple[Side, ...]:
    """Where this figure has to go to be worth an alarm: a call graph may change to either side."""
    if name.startswith(TRANSITION):
        return ("above", "below")
    return ("above",) if name in (NEVER_SEEN, NEVER_SEEN_PAIRS) else ("below",)


def reach_of(name: str) -> float:
    """Standard errors from a figure's mean to the ends of its interval: that of 95 %, and of 99.9 % for each of the
    many transitions.
    """
    return _Z999 if name.startswith(TRANSITION) else _Z95


def _latest(tallies: Mapping[str, Of]) -> Of | None:
    """That of the predictor which forecast last."""
    names = [name for name in tallies if name != COUNTS]
    return tallies[names[-1]] if names else None
