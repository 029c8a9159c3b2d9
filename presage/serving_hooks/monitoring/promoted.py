"""What a model was promoted with: figures of a workflow type that later workflows are held against.

Every figure is a mean over workflows of a number between 0 and 1 a workflow, so that its interval is that of workflows
and a sequential test can bet on it (`Detectors`). `figures_of` is the one definition, for the promoted figures and for
live ones. A mean of workflows' own shares is `accuracy_by_workflow` of an evaluation, not its `accuracy`, in which a
long workflow weighs more.

Accuracy is watched one step ahead: at 2 to K steps it is the same transitions seen again (`live_accuracy.py` tells it).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import sqrt
from typing import Any, Final, Literal, TypeVar

from presage.errors import ArtefactError, ConfigurationError
from presage.features.moment import MOMENTS
from presage.serving_hooks.monitoring.outcomes import COUNTS, END, Followed

PAIRS_KEPT: Final = 4096
PAIRS_WATCHED: Final = 64

Pair = tuple[str, str]
"""One agent and the one right after it; `END` as the first is the start of a workflow, as the second its end."""


class Transitions:
    """Counts of pairs. Bounded: of more than `PAIRS_KEPT` different ones the later are not counted."""

    def __init__(self, counts: Mapping[Pair, int] | None = None) -> None:
        self.counts: Counter[Pair] = Counter()
        self.agents: set[str] = set()
        self._watched: tuple[Pair, ...] | None = None
        self.add(counts or {})

    def add(self, transitions: Mapping[Pair, int]) -> None:
        """A workflow more."""
        self._watched = None
        for pair, count in transitions.items():
            if pair in self.counts or len(self.counts) < PAIRS_KEPT:
                self.counts[pair] += count
                self.agents.update(agent for agent in pair if agent != END)

    @property
    def watched(self) -> tuple[Pair, ...]:
        """The commonest pairs, `PAIRS_WATCHED` at most."""
        if self._watched is None:
            ranked = sorted(self.counts.items(), key=lambda item: (-item[1], item[0]))
            self._watched = tuple(pair for pair, _ in ranked[:PAIRS_WATCHED])
        return self._watched

    def to_dict(self) -> list[list[Any]]:
        """[before, after, count] of each pair, as JSON values."""
        return [[before, after, count] for (before, after), count in sorted(self.counts.items())]

    @classmethod
    def from_dict(cls, data: list[list[Any]]) -> Transitions:
        """Inverse of `to_dict`."""
        return cls({(str(before), str(after)): int(count) for before, after, count in data})


def name_of(pair: Pair) -> str:
    """For people, and the same for no other pair: clients choose the names of agents, so they are quoted."""
    before, after = pair
    return f"{repr(before) if before != END else 'start'} → {repr(after) if after != END else 'end'}"


NEVER_SEEN: Final = "agents never seen"
"""Share of the workflows that call one."""
NEVER_SEEN_PAIRS: Final = "transitions never seen"
"""Share of the workflows in which one known agent follows another as it never did."""
TRANSITION: Final = "transition "
"""Share of a workflow's transitions that lead from one agent to another: the call graph."""
ACCURACY: Final = "accuracy at "
COVERAGE: Final = "coverage at "

Of = TypeVar("Of")

Side = Literal["above", "below"]
"""Where a mean must not go."""

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


PROMOTED_FOLDER: Final = "truth"
"""Among the artifacts of the version's run."""
PROMOTED_FILE: Final = "promoted.json"

_FORMAT: Final = 1


def promoted_json(promoted: Mapping[str, Promoted]) -> str:
    """The content of the file: figures by workflow type."""
    types = {name: of.to_dict() for name, of in sorted(promoted.items())}
    return json.dumps({"format_version": _FORMAT, "workflow_types": types}, ensure_ascii=False)


def read_promoted(content: bytes) -> dict[str, Promoted]:
    """Inverse of `promoted_json`.

    Raises:
        ArtefactError: it is cut, of another version, or no such file.
    """
    try:
        data = json.loads(content)
        if data["format_version"] != _FORMAT:
            raise ValueError(f"format version {data['format_version']!r}")
        return {name: Promoted.from_dict(of) for name, of in data["workflow_types"].items()}
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise ArtefactError(
            f"{PROMOTED_FOLDER}/{PROMOTED_FILE} is none of format version {_FORMAT} ({type(error).__name__}): "
            "promote the version again"
        ) from error


def merged_promoted(next_agent: Mapping[str, Promoted], lengths: Mapping[str, Promoted]) -> dict[str, Promoted]:
    """What an engine with both kinds holds each workflow type against.

    Of a type in both the call graph, and the figures that go with it, are those of next agents: figures and graph must
    be of one trace. Of lengths its coverage is added.
    """
    found = {**lengths, **next_agent}
    for name in next_agent.keys() & lengths.keys():
        coverage = {figure: of for figure, of in lengths[name].figures.items() if figure.startswith(COVERAGE)}
        found[name] = replace(next_agent[name], figures={**next_agent[name].figures, **coverage})
    return found
