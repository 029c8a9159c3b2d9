"""Promoted figures: the reference values of a workflow type for drift detection.

Each figure is a mean over workflows of one number between 0 and 1 per workflow, so that its interval is over workflows
and a sequential test can bet on it (`Detectors`). Accuracy is `accuracy_by_workflow` of an evaluation, not `accuracy`,
in which a long workflow weighs more, and one step ahead only: further ahead it depends on the same transitions.
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
from presage.serving_hooks.monitoring.outcomes import END, Followed, is_predictor

PAIRS_KEPT: Final = 4096
PAIRS_WATCHED: Final = 64

Pair = tuple[str, str]
"""One agent and the one right after it; `END` as the first is the start of a workflow, as the second its end."""


class Transitions:
    """Counts of pairs. Beyond `PAIRS_KEPT` different pairs, new ones are not counted."""

    def __init__(self, counts: Mapping[Pair, int] | None = None) -> None:
        self.counts: Counter[Pair] = Counter()
        self.agents: set[str] = set()
        self._watched: tuple[Pair, ...] | None = None
        self.add(counts or {})

    def add(self, transitions: Mapping[Pair, int]) -> None:
        """Adds the transitions of a workflow."""
        self._watched = None
        for pair, count in transitions.items():
            if pair in self.counts or len(self.counts) < PAIRS_KEPT:
                self.counts[pair] += count
                self.agents.update(agent for agent in pair if agent != END)

    @property
    def watched(self) -> tuple[Pair, ...]:
        """The most frequent pairs, `PAIRS_WATCHED` at most."""
        if self._watched is None:
            ranked = sorted(self.counts.items(), key=lambda item: (-item[1], item[0]))
            self._watched = tuple(pair for pair, _ in ranked[:PAIRS_WATCHED])
        return self._watched


def name_of(pair: Pair) -> str:
    """A unique readable name of a pair; quotes agents, since clients choose their names."""
    before, after = pair
    return f"{repr(before) if before != END else 'start'} → {repr(after) if after != END else 'end'}"


NEVER_SEEN: Final = "agents never seen"
"""Share of the workflows that call an agent absent from the promoted call graph."""
NEVER_SEEN_PAIRS: Final = "transitions never seen"
"""Share of the workflows with a transition between known agents that is absent from the promoted call graph."""
TRANSITION: Final = "transition "
"""Prefix of the call graph's figures: the share of a workflow's transitions that are this pair."""
ACCURACY: Final = "accuracy at "
COVERAGE: Final = "coverage at "

Of = TypeVar("Of")

Side = Literal["above", "below"]
"""The side of its interval on which a mean raises the alarm."""

_Z95: Final = 1.959964
_Z999: Final = 3.290527
_RULE_OF_THREE: Final = 3.0
"""If none of n workflows shows something, its 95 % upper bound is 3/n."""


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
                "give numbers between 0 and 1, the mean inside its interval"
            )


@dataclass(slots=True)
class Sums:
    """Running mean and variance of one number per workflow (Welford, 1962)."""

    workflows: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def add(self, value: float) -> None:
        """Adds a workflow's number."""
        self.workflows += 1
        step = value - self.mean
        self.mean += step / self.workflows
        self.squares += step * (value - self.mean)

    def figure(self, errors: float = _Z95) -> Figure:
        """The mean within `errors` standard errors to either side, and 3/n more for what n workflows cannot show."""
        n = self.workflows
        margin = _RULE_OF_THREE / n + (errors * sqrt(self.squares / (n - 1) / n) if n > 1 else 1.0)
        mean = min(max(self.mean, 0.0), 1.0)
        return Figure(mean, max(0.0, mean - margin), min(1.0, mean + margin))


@dataclass(frozen=True)
class Promoted:
    """Figures of one workflow type, with their call graph.

    Attributes:
        figures: by the names of `figures_of`, on workflows used neither for training nor for `transitions`.
        workflows: number of workflows that the figures are means of.
        ended: whether all of them finished; if so, only finished workflows are compared with the figures.
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
            "figures": {name: [figure.mean, figure.low, figure.high] for name, figure in self.figures.items()},
            "transitions": [[*pair, count] for pair, count in sorted(self.transitions.counts.items())],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Promoted:
        """Inverse of `to_dict`.

        Raises:
            ConfigurationError: a figure is invalid.
            LookupError, TypeError, ValueError: the object is malformed.
        """
        figures = {str(name): Figure(*map(float, mean_and_ends)) for name, mean_and_ends in data["figures"].items()}
        counts = {(str(before), str(after)): int(count) for before, after, count in data["transitions"]}
        return cls(Transitions(counts), figures, int(data["workflows"]), bool(data["ended"]))


class PromotedLearner:
    """Learns the figures of a workflow type: the first half of so many workflows gives the call graph."""

    def __init__(self, workflows: int) -> None:
        self._missing, self._for_figures = workflows, workflows - workflows // 2
        self._transitions = Transitions()
        self._sums: dict[str, Sums] = {}

    def add(self, workflow: Followed) -> bool:
        """Counts a workflow; returns whether this was the last one."""
        if self._missing > self._for_figures:
            self._transitions.add(workflow.transitions)
        else:
            for name, value in figures_of(workflow, self._transitions).items():
                self._sums.setdefault(name, Sums()).add(value)
        self._missing -= 1
        return self._missing == 0

    def figures(self) -> Promoted:
        """The figures, once all workflows are counted."""
        figures = {name: sums.figure(reach_of(name)) for name, sums in self._sums.items()}
        return Promoted(self._transitions, figures, self._for_figures)


def promoted_by_type(workflows: Iterable[Followed], at_least: int = 20) -> dict[str, Promoted]:
    """Promoted figures by workflow type, from workflows outside the training data, oldest first.

    A type with fewer than `at_least` workflows gets none.
    """
    by_type: dict[str, list[Followed]] = {}
    for workflow in workflows:
        by_type.setdefault(workflow.workflow_type, []).append(workflow)
    promoted = {}
    for name, of_type in by_type.items():
        if len(of_type) >= at_least:
            learner = PromotedLearner(len(of_type))
            for workflow in of_type:
                learner.add(workflow)
            promoted[name] = replace(learner.figures(), ended=all(workflow.ended for workflow in of_type))
    return promoted


def figures_of(followed: Followed, transitions: Transitions) -> dict[str, float]:
    """The figures of one workflow by name, between 0 and 1; figures without data are omitted.

    Only the predictor's forecasts count, not those of online counts; after a reload, those of the latest model.
    """
    figures: dict[str, float] = {}
    total = sum(followed.transitions.values())
    if total:
        new = [pair for pair in followed.transitions if pair not in transitions.counts]
        unseen = {agent for pair in new for agent in pair if agent != END and agent not in transitions.agents}
        figures[NEVER_SEEN] = float(bool(unseen))
        figures[NEVER_SEEN_PAIRS] = float(any(unseen.isdisjoint(pair) for pair in new))
        for pair in transitions.watched:
            figures[f"{TRANSITION}{name_of(pair)}"] = followed.transitions.get(pair, 0) / total
    tally = _latest(followed.next_agent)
    if tally is not None:
        judged, right = (tally.sums[plane, :, 0].sum(axis=-1) for plane in (0, 2))
        for index, moment in enumerate(MOMENTS):
            if judged[index]:
                figures[f"{ACCURACY}{moment}"] = float(right[index] / judged[index])
    lengths = _latest(followed.lengths)
    if lengths is not None and lengths.judged:
        for quantile, within in zip(lengths.quantiles, lengths.within.tolist(), strict=True):
            figures[f"{COVERAGE}{quantile:g}"] = within / lengths.judged
    return figures


def sides(name: str) -> tuple[Side, ...]:
    """The sides on which this figure raises an alarm: both for the call graph."""
    if name.startswith(TRANSITION):
        return ("above", "below")
    return ("above",) if name in (NEVER_SEEN, NEVER_SEEN_PAIRS) else ("below",)


def reach_of(name: str) -> float:
    """Standard errors from a mean to the ends of its interval: 95 %, or 99.9 % for each of the many transitions."""
    return _Z999 if name.startswith(TRANSITION) else _Z95


def _latest(tallies: Mapping[str, Of]) -> Of | None:
    """The tally of the predictor that forecast last."""
    names = [name for name in tallies if is_predictor(name)]
    return tallies[names[-1]] if names else None


PROMOTED_FOLDER: Final = "truth"
"""A folder in the artifacts of the version's run."""
PROMOTED_FILE: Final = "promoted.json"

_FORMAT: Final = 1


def promoted_json(promoted: Mapping[str, Promoted]) -> str:
    """The content of the file: figures by workflow type."""
    types = {name: figures.to_dict() for name, figures in sorted(promoted.items())}
    return json.dumps({"format_version": _FORMAT, "workflow_types": types}, ensure_ascii=False)


def read_promoted(content: bytes) -> dict[str, Promoted]:
    """Inverse of `promoted_json`.

    Raises:
        ArtefactError: the file is truncated, malformed, or of another format version.
    """
    try:
        data = json.loads(content)
        if data["format_version"] != _FORMAT:
            raise ValueError(f"format version {data['format_version']!r}")
        return {name: Promoted.from_dict(figures) for name, figures in data["workflow_types"].items()}
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise ArtefactError(
            f"{PROMOTED_FOLDER}/{PROMOTED_FILE} is not valid for format version {_FORMAT} ({type(error).__name__}): "
            "promote the version again"
        ) from error


def merged_promoted(next_agent: Mapping[str, Promoted], lengths: Mapping[str, Promoted]) -> dict[str, Promoted]:
    """Promoted figures for an engine with both predictors.

    For a type in both, call graph and figures come from `next_agent`, since both must be of one trace; only coverage is
    added from `lengths`.
    """
    merged = {**lengths, **next_agent}
    for name in next_agent.keys() & lengths.keys():
        coverage = {
            figure: interval for figure, interval in lengths[name].figures.items() if figure.startswith(COVERAGE)
        }
        merged[name] = replace(next_agent[name], figures={**next_agent[name].figures, **coverage})
    return merged
