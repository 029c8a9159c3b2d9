"""Evaluate next-agent predictors and baselines on held-out traces, at both moments.

A predictor is a function from prefixes and moment to probabilities, so one code path evaluates Presage's predictor,
every baseline and the Bayes-optimal forecast of a synthetic process. All are evaluated at the same positions: every
step of a workflow, with END as an outcome, and nothing after END or after a truncation.

`confusions` lists errors one step ahead: forecast, outcome, and the preceding agents. It contains agent names only, no
text of a trace.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from presage.errors import TraceError
from presage.features.input_profiles import TARGETS
from presage.features.moment import MOMENTS, PREFILL, Moment
from presage.features.prefixes import MASKED, Prefixes
from presage.features.vocabulary import Vocabulary
from presage.training.baselines import Behind, behind, moment_name, worst
from presage.training.metrics import RESAMPLES, Difference, Figures, differences, measure

END: Final = "END"
PAIRS: Final = 10
"""Maximum number of (forecast, outcome) pairs listed, most frequent first."""

AGENTS: Final = 10
EXAMPLES: Final = 2
PREFIX: Final = 4
"""Number of last agents of the prefix shown in an example."""

_NO_AGENT: Final = -1


def confusions(probabilities: NDArray[np.float32], prefixes: Prefixes) -> dict[str, Any]:
    """Errors one step ahead.

    Args:
        probabilities: [n, K, V+1], at one moment of every step.
        prefixes: the n steps and their outcomes.

    Returns:
        JSON values: the number of `positions` and of `errors`; `pairs`, the most frequent errors, each with
        `forecast`, `came` (the outcome), `positions`, the mean probability of the forecast (`confidence`) and
        `examples` {"prefix": the last agents, "earlier": whether other agents precede them, "positions"}; `by_agent`,
        the agents followed by most errors, with `positions` and `errors`. The name of an agent unknown to training is
        null.
    """
    vocabulary = prefixes.vocabulary
    came, sure = prefixes.outcomes[:, 0], probabilities[:, 0].max(axis=1)
    forecast = probabilities[:, 0].argmax(axis=1)
    judged = came != MASKED
    wrong = judged & (forecast != came)
    rows = np.flatnonzero(wrong)
    kinds, kind = np.unique(np.stack([forecast[rows], came[rows]], axis=1), axis=0, return_inverse=True)
    kind = kind.reshape(-1)
    counts = np.bincount(kind, minlength=len(kinds))
    pairs = []
    for index in _most_frequent(counts, PAIRS):
        of = rows[kind == index]
        pairs.append(
            {
                "forecast": _outcome(vocabulary, int(kinds[index, 0])),
                "came": _outcome(vocabulary, int(kinds[index, 1])),
                "positions": len(of),
                "confidence": float(sure[of].mean(dtype=np.float64)),
                "examples": _examples(prefixes, of),
            }
        )
    size = vocabulary.unknown + 1
    positions, errors = (np.bincount(prefixes.agent[flags], minlength=size) for flags in (judged, wrong))
    by_agent = [
        {"agent": _agent(vocabulary, int(a)), "positions": int(positions[a]), "errors": int(errors[a])}
        for a in _most_frequent(errors, AGENTS)
    ]
    return {"positions": int(judged.sum()), "errors": len(rows), "pairs": pairs, "by_agent": by_agent}


def _examples(prefixes: Prefixes, rows: NDArray[np.int64]) -> list[dict[str, Any]]:
    """The most frequent sequences of last agents at these rows."""
    position = prefixes.position[rows]
    ends = np.full((len(rows), PREFIX + 1), _NO_AGENT, np.int64)
    for back in range(PREFIX):
        there = position >= back
        ends[there, PREFIX - 1 - back] = prefixes.agent[rows[there] - back]
    ends[:, PREFIX] = position >= PREFIX
    found, counts = np.unique(ends, axis=0, return_counts=True)
    return [
        {
            "prefix": [_agent(prefixes.vocabulary, int(a)) for a in found[index, :PREFIX] if a != _NO_AGENT],
            "earlier": bool(found[index, PREFIX]),
            "positions": int(counts[index]),
        }
        for index in _most_frequent(counts, EXAMPLES)
    ]


def _most_frequent(counts: NDArray[np.int64], most: int) -> NDArray[np.int64]:
    """Indices of the largest positive counts; ties keep their order."""
    order = np.argsort(-counts, kind="stable")[:most]
    return order[counts[order] > 0]


def _outcome(vocabulary: Vocabulary, index: int) -> str | None:
    return END if index == vocabulary.end else _agent(vocabulary, index)


def _agent(vocabulary: Vocabulary, index: int) -> str | None:
    return vocabulary.agents[index] if index < len(vocabulary.agents) else None


Predict = Callable[[Prefixes, Moment], NDArray[np.float32]]
"""Prefixes and moment to probabilities [n, K, V+1]: the `predict` of any `NextAgentEstimator`."""

ByMoment = Mapping[Moment, Figures]


@dataclass(frozen=True)
class Rival:
    """Figures of a baseline on a subset of workflows, and the predictor's difference to it."""

    figures: Figures
    difference: Difference

    def to_dict(self) -> dict[str, Any]:
        """Accuracy and difference with their intervals, as JSON values."""
        figures, difference = self.figures.to_dict(), self.difference.to_dict()
        return {
            "accuracy": figures["accuracy"],
            "ci95": figures["ci95"],
            "difference": difference["difference"],
            "difference_ci95": difference["ci95"],
        }


@dataclass(frozen=True)
class ProfileFigures:
    """Figures under one input profile (`features/input_profiles.py`).

    Attributes:
        moments: figures by moment.
        states: whether any step has a state, by moment.
        behind: comparisons that a baseline won under this profile.
    """

    moments: ByMoment
    states: Mapping[Moment, bool]
    behind: tuple[Behind, ...]

    def to_dict(self) -> dict[str, Any]:
        """The headline figures as JSON values."""
        kept = ("accuracy", "ci95", "nll", "ece")
        found = {moment: figures.to_dict() for moment, figures in self.moments.items()}
        return {
            "moments": {m: {key: of[key] for key in kept} | {"states": self.states[m]} for m, of in found.items()},
            "behind": worst(self.behind),
        }


@dataclass(frozen=True)
class Evaluation:
    """Figures of one next-agent predictor on W workflows.

    Attributes:
        workflows: W.
        steps: n, over all workflows.
        moments: figures by moment; the registry's gates compare their `correct` and `positions`.
        states: whether the traces have states, by moment; without them forecasts use ids and sizes only.
        by_workflow_type: figures by type and moment; `"unknown"` for types not in the vocabulary.
        baselines: figures of each baseline on all workflows, by name and moment.
        differences: accuracy of the predictor minus that of each baseline, on all workflows.
        rivals: figures of each baseline within each workflow type, and the difference to it.
        confusions: errors one step ahead, by moment.
        behind: comparisons that a baseline won.
        profiles: figures by input profile.
        model: name of the predictor, if registered.
        version: its version in the registry, if registered.
    """

    workflows: int
    steps: int
    moments: ByMoment
    states: Mapping[Moment, bool]
    by_workflow_type: Mapping[str, ByMoment]
    baselines: Mapping[str, ByMoment] = field(default_factory=dict)
    differences: Mapping[str, Mapping[Moment, Difference]] = field(default_factory=dict)
    rivals: Mapping[str, Mapping[str, Mapping[Moment, Rival]]] = field(default_factory=dict)
    confusions: Mapping[Moment, Mapping[str, Any]] = field(default_factory=dict)
    behind: tuple[Behind, ...] = ()
    profiles: Mapping[str, ProfileFigures] = field(default_factory=dict)
    model: str | None = None
    version: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """The object `train-predictor` and `presage evaluate` print (DESIGN.md, Command contracts), as JSON values.

        Beyond the contract, for the report: "differences" {baseline: {moment: {"difference", "ci95"}}},
        "rivals" {workflow type: {baseline: {moment: {"accuracy", "ci95", "difference", "difference_ci95"}}}}, and
        "confusions" {moment: see `confusions`}.
        """
        return {
            "kind": "next-agent",
            "model": self.model,
            "version": self.version,
            "workflows": self.workflows,
            "steps": self.steps,
            "moments": {
                moment: {**figures.to_dict(), "states": self.states[moment]} for moment, figures in self.moments.items()
            },
            "by_workflow_type": {name: _to_dict(figures) for name, figures in self.by_workflow_type.items()},
            "baselines": {
                name: {"accuracy": _to_dict(figures)[PREFILL]["accuracy"], **_to_dict(figures)}
                for name, figures in self.baselines.items()
            },
            "differences": {
                name: {moment: found.to_dict() for moment, found in by_moment.items()}
                for name, by_moment in self.differences.items()
            },
            "rivals": {
                kind: {
                    name: {moment: rival.to_dict() for moment, rival in by_moment.items()}
                    for name, by_moment in rivals.items()
                }
                for kind, rivals in self.rivals.items()
            },
            "confusions": dict(self.confusions),
            "behind": worst(self.behind),
            "profiles": {name: figures.to_dict() for name, figures in self.profiles.items()},
        }


def evaluate(
    predict: Predict,
    prefixes: Prefixes,
    rng: np.random.Generator,
    *,
    baselines: Mapping[str, Predict] | None = None,
    profiles: Mapping[str, Prefixes] | None = None,
    model: str | None = None,
    version: int | None = None,
    resamples: int = RESAMPLES,
) -> Evaluation:
    """Evaluate a predictor and baselines on `prefixes` that they were not trained on.

    Args:
        predict: the predictor.
        prefixes: W workflows with their outcomes.
        rng: for the bootstrap; all predictors share its resamples, so equal forecasts have equal intervals.
        baselines: evaluated at the same positions, by name.
        profiles: `prefixes` as seen under each input profile; profiles with equal inputs share one object.
        model: name of the predictor, copied to the result.
        version: its version, copied to the result.
        resamples: of the bootstrap.

    Raises:
        TraceError: there is no workflow.
    """
    if not prefixes.steps:
        raise TraceError("the test traces hold no step: nothing can be judged; name traces with at least one workflow")
    seed = int(rng.integers(2**63))
    forecasts = {moment: predict(prefixes, moment) for moment in MOMENTS}
    everything = np.arange(prefixes.steps)
    moments = _by_moment(forecasts, prefixes, everything, seed, resamples)
    names = (*prefixes.vocabulary.workflow_types, "unknown")
    type_of = prefixes.workflow_type[prefixes.workflow]
    rows_of = {names[index]: np.flatnonzero(type_of == index) for index in np.unique(type_of)}
    by_type = {kind: _by_moment(forecasts, prefixes, rows, seed, resamples) for kind, rows in rows_of.items()}
    overall: dict[str, ByMoment] = {}
    within: dict[str, dict[str, ByMoment]] = {kind: {} for kind in rows_of}
    for name, baseline in (baselines or {}).items():
        found = {moment: baseline(prefixes, moment) for moment in MOMENTS}
        overall[name] = _by_moment(found, prefixes, everything, seed, resamples)
        for kind, rows in rows_of.items():
            # With a single workflow type, its figures equal the overall ones.
            within[kind][name] = (
                overall[name] if len(rows_of) == 1 else _by_moment(found, prefixes, rows, seed, resamples)
            )
    against = _against(moments, overall, seed, resamples)
    seen = {id(prefixes): ProfileFigures(moments, _states(prefixes), _lost(against, overall))}
    # Baselines take longer than Presage's predictor: evaluate them only under the profiles of promotion targets.
    for name, shown in sorted((profiles or {}).items(), key=lambda of: of[0] not in TARGETS.values()):
        if id(shown) not in seen:
            rivals = baselines if name in TARGETS.values() else None
            seen[id(shown)] = _profile(predict, shown, rivals or {}, seed, resamples)
    return Evaluation(
        workflows=prefixes.workflows,
        steps=prefixes.steps,
        moments=moments,
        states=_states(prefixes),
        by_workflow_type=by_type,
        baselines=overall,
        differences=against,
        rivals={kind: _rivals(by_type[kind], within[kind], seed, resamples) for kind in rows_of},
        confusions={moment: confusions(forecast, prefixes) for moment, forecast in forecasts.items()},
        behind=_lost(against, overall),
        profiles={name: seen[id(shown)] for name, shown in (profiles or {}).items()},
        model=model,
        version=version,
    )


def _profile(
    predict: Predict, prefixes: Prefixes, baselines: Mapping[str, Predict], seed: int, resamples: int
) -> ProfileFigures:
    """Figures of the predictor and of the baselines under one input profile."""
    everything = np.arange(prefixes.steps)

    def judged(of: Predict) -> ByMoment:
        forecasts = {moment: of(prefixes, moment) for moment in MOMENTS}
        return _by_moment(forecasts, prefixes, everything, seed, resamples)

    moments = judged(predict)
    rivals = {name: judged(baseline) for name, baseline in baselines.items()}
    return ProfileFigures(moments, _states(prefixes), _lost(_against(moments, rivals, seed, resamples), rivals))


def _states(prefixes: Prefixes) -> dict[Moment, bool]:
    return {moment: moment in prefixes.states for moment in MOMENTS}


def _lost(against: Mapping[str, Mapping[Moment, Difference]], baselines: Mapping[str, ByMoment]) -> tuple[Behind, ...]:
    """The comparisons that a baseline won."""
    found = []
    for name, by_moment in against.items():
        for moment, of in by_moment.items():
            own = baselines[name][moment].accuracy
            for k, (gain, (low, high)) in enumerate(zip(of.difference, of.ci95, strict=True)):
                at = f"{moment_name(moment)}, {k + 1} step{'s' * (k > 0)} ahead"
                found += behind(name, at, -gain, (-high, -low), own[k])
    return tuple(found)


def _against(
    ours: ByMoment, baselines: Mapping[str, ByMoment], seed: int, resamples: int
) -> dict[str, dict[Moment, Difference]]:
    """Differences predictor − baseline, by baseline and moment."""
    by_moment = {
        moment: differences({name: (figures, theirs[moment]) for name, theirs in baselines.items()}, seed, resamples)
        for moment, figures in ours.items()
    }
    return {name: {moment: found[name] for moment, found in by_moment.items()} for name in baselines}


def _rivals(
    ours: ByMoment, baselines: Mapping[str, ByMoment], seed: int, resamples: int
) -> dict[str, dict[Moment, Rival]]:
    against = _against(ours, baselines, seed, resamples)
    return {
        name: {moment: Rival(figures, against[name][moment]) for moment, figures in theirs.items()}
        for name, theirs in baselines.items()
    }


def _by_moment(
    forecasts: Mapping[Moment, NDArray[np.float32]],
    prefixes: Prefixes,
    rows: NDArray[np.int64],
    seed: int,
    resamples: int,
) -> dict[Moment, Figures]:
    """Figures of the steps `rows`; their workflows are renumbered from 0."""
    workflow = np.unique(prefixes.workflow[rows], return_inverse=True)[1]
    return {
        moment: measure(forecast[rows], prefixes.outcomes[rows], workflow, np.random.default_rng(seed), resamples)
        for moment, forecast in forecasts.items()
    }


def _to_dict(figures: ByMoment) -> dict[str, dict[str, Any]]:
    return {moment: found.to_dict() for moment, found in figures.items()}
