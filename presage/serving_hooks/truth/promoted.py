"""What a model was promoted with: figures of a workflow type that later workflows are held against.

Every figure is a mean over workflows of a number between 0 and 1 a workflow, so that its interval is that of workflows
and a sequential test can bet on it (`detector.py`). `figures_of` is the one definition, for the promoted figures and
for live ones. A mean of workflows' own shares is `accuracy_by_workflow` of an evaluation, not its `accuracy`, in which
a long workflow weighs more.

Accuracy is watched one step ahead: at 2 to K steps it is the same transitions seen again (`live_accuracy.py` tells it).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import sqrt
from typing import Any, Final, Literal, TypeVar

from presage.errors import ConfigurationError
from presage.features.moment import MOMENTS
from presage.serving_hooks.truth.outcomes import COUNTS, Followed
from presage.serving_hooks.truth.transitions import Transitions

NEVER_SEEN: Final = "agents never seen"
"""Share of the workflows that call one."""
CALL_GRAPH: Final = "surprise of the call graph"
"""See `transitions.py`."""
ACCURACY: Final = "accuracy at "
COVERAGE: Final = "coverage at "

Of = TypeVar("Of")

Side = Literal["above", "below"]
"""Where a figure has to go to be worth an alarm."""

_Z95: Final = 1.959964
_RULE_OF_THREE: Final = 3.0
"""Of n workflows that show something never, up to 3/n may show it: 95 %."""


@dataclass(frozen=True)
class Figure:
    """A mean over workflows and its 95 % interval, between 0 and 1."""

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

    def figure(self) -> Figure:
        """With an interval that is never without width: the normal one, and 3/n for what n workflows cannot show."""
        n = self.workflows
        reach = _RULE_OF_THREE / n + (_Z95 * sqrt(self.squares / (n - 1) / n) if n > 1 else 1.0)
        mean = min(max(self.mean, 0.0), 1.0)
        return Figure(mean, max(0.0, mean - reach), min(1.0, mean + reach))


@dataclass(frozen=True)
class Promoted:
    """Figures of one workflow type, and the call graph they go with.

    Attributes:
        transitions: of the traces a model learnt from: what is known there is not new.
        figures: by name, as `figures_of` has them, on workflows that neither the model nor `transitions` knows.
        workflows: how many stand behind them.
    """

    transitions: Transitions
    figures: Mapping[str, Figure] = field(default_factory=dict)
    workflows: int = 0

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "workflows": self.workflows,
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
        return cls(Transitions.from_dict(data["transitions"]), figures, int(data["workflows"]))


def promoted_of(workflows: Iterable[Followed], transitions: Transitions) -> Promoted:
    """Figures of workflows of one type beside these transitions, which must not be counted on the same workflows."""
    sums: dict[str, Sums] = {}
    count = 0
    for followed in workflows:
        count += 1
        for name, value in figures_of(followed, transitions).items():
            sums.setdefault(name, Sums()).add(value)
    return Promoted(transitions, {name: of.figure() for name, of in sums.items()}, count)


def figures_of(followed: Followed, transitions: Transitions) -> dict[str, float]:
    """Numbers between 0 and 1 of one workflow by name; what it does not show is left out.

    Of the predictor's forecasts, not of those that counts gave in its place; of the model that forecast last, where a
    reload came between.
    """
    found: dict[str, float] = {}
    surprise = transitions.surprise(followed.transitions)
    if surprise is not None:
        known = transitions.agents
        found[NEVER_SEEN] = float(any(after and after not in known for _, after in followed.transitions))
        found[CALL_GRAPH] = surprise
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
    if name == CALL_GRAPH:
        return ("above", "below")
    return ("above",) if name == NEVER_SEEN else ("below",)


def _latest(tallies: Mapping[str, Of]) -> Of | None:
    """That of the predictor which forecast last."""
    names = [name for name in tallies if name != COUNTS]
    return tallies[names[-1]] if names else None
