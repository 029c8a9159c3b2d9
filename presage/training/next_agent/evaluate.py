"""Evaluate next-agent predictors and baselines on held-out traces, at both moments.

One code path evaluates Presage's predictor, every baseline and the Bayes-optimal forecast of a synthetic process. All
are evaluated at the same positions: every step of a workflow, with END as an outcome, and nothing after END or after a
truncation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from presage.errors import TraceError
from presage.features.moment import MOMENTS, PREFILL, Moment, moment_name
from presage.features.prefixes import MASKED, Prefixes
from presage.training.baselines import Behind, behind, by_profile, worst
from presage.training.metrics import RESAMPLES, Difference, Figures, differences, json_values, measure

END: Final = "END"
PAIRS: Final = 10
"""Maximum number of (forecast, outcome) pairs listed, most frequent first."""

AGENTS: Final = 10
EXAMPLES: Final = 2
PREFIX: Final = 4
"""Number of last agents of the prefix shown in an example."""

_NO_AGENT: Final = -1


def confusions(probabilities: NDArray[np.float32], prefixes: Prefixes) -> dict[str, Any]:
    """Errors one step ahead, by the names of agents alone.

    Args:
        probabilities: [n, K, V+1], at one moment of every step.
        prefixes: the n steps and their outcomes.

    Returns:
        JSON values: the number of `positions` and of `errors`; `pairs`, the most frequent errors, each with `forecast`,
        `came` (the outcome), `positions`, the mean probability of the forecast (`confidence`) and `examples`
        {"prefix": the last agents, "earlier": whether other agents precede them, "positions"}; `by_agent`, the
        agents followed by most errors, with `positions` and `errors`. The name of an agent unknown to training is
        null.
    """
    agents: tuple[str | None, ...] = (*prefixes.vocabulary.agents, None)
    outcomes: tuple[str | None, ...] = (*prefixes.vocabulary.agents, END, None)
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
        confused = rows[kind == index]
        pairs.append(
            {
                "forecast": outcomes[kinds[index, 0]],
                "came": outcomes[kinds[index, 1]],
                "positions": len(confused),
                "confidence": float(sure[confused].mean(dtype=np.float64)),
                "examples": _examples(prefixes, confused, agents),
            }
        )
    positions, errors = (np.bincount(prefixes.agent[flags], minlength=len(agents)) for flags in (judged, wrong))
    by_agent = [
        {"agent": agents[a], "positions": int(positions[a]), "errors": int(errors[a])}
        for a in _most_frequent(errors, AGENTS)
    ]
    return {"positions": int(judged.sum()), "errors": len(rows), "pairs": pairs, "by_agent": by_agent}


def _examples(prefixes: Prefixes, rows: NDArray[np.int64], agents: tuple[str | None, ...]) -> list[dict[str, Any]]:
    position = prefixes.position[rows]
    ends = np.full((len(rows), PREFIX + 1), _NO_AGENT, np.int64)
    for back in range(PREFIX):
        there = position >= back
        ends[there, PREFIX - 1 - back] = prefixes.agent[rows[there] - back]
    ends[:, PREFIX] = position >= PREFIX
    distinct, counts = np.unique(ends, axis=0, return_counts=True)
    return [
        {
            "prefix": [agents[a] for a in distinct[index, :PREFIX] if a != _NO_AGENT],
            "earlier": bool(distinct[index, PREFIX]),
            "positions": int(counts[index]),
        }
        for index in _most_frequent(counts, EXAMPLES)
    ]


def _most_frequent(counts: NDArray[np.int64], most: int) -> NDArray[np.int64]:
    """Indices of the largest positive counts; ties keep their order."""
    order = np.argsort(-counts, kind="stable")[:most]
    return order[counts[order] > 0]


Predict = Callable[[Prefixes, Moment], NDArray[np.float32]]
"""Prefixes and moment to probabilities [n, K, V+1]: the `predict` of any `NextAgentEstimator`."""

ByMoment = Mapping[Moment, Figures]


@dataclass(frozen=True)
class ProfileFigures:
    """Figures under one input profile (`features/input_profiles.py`); `states`: whether any step has one, by moment."""

    moments: ByMoment
    states: Mapping[Moment, bool]
    behind: tuple[Behind, ...]

    def to_dict(self) -> dict[str, Any]:
        """The headline figures as JSON values."""
        kept = ("accuracy", "ci95", "nll", "ece")
        return json_values(
            {
                "moments": {
                    moment: {**{name: getattr(figures, name) for name in kept}, "states": self.states[moment]}
                    for moment, figures in self.moments.items()
                },
                "behind": worst(self.behind),
            }
        )


@dataclass(frozen=True)
class Evaluation:
    """Figures of one next-agent predictor on W workflows.

    Attributes:
        moments: figures by moment; the registry's gates compare their `correct` and `positions`.
        states: whether the traces have states, by moment; without them forecasts use ids and sizes only.
        by_workflow_type: figures by type and moment; `"unknown"` for types not in the vocabulary.
        differences: accuracy of the predictor minus that of each baseline, on all workflows.
        rivals: by workflow type, baseline and moment, the baseline's accuracy and the predictor's difference to it.
    """

    workflows: int
    steps: int
    moments: ByMoment
    states: Mapping[Moment, bool]
    by_workflow_type: Mapping[str, ByMoment]
    baselines: Mapping[str, ByMoment]
    differences: Mapping[str, Mapping[Moment, Difference]]
    rivals: Mapping[str, Mapping[str, Mapping[Moment, Mapping[str, Any]]]]
    confusions: Mapping[Moment, Mapping[str, Any]]
    behind: tuple[Behind, ...]
    profiles: Mapping[str, ProfileFigures]

    def to_dict(self) -> dict[str, Any]:
        """The object that `train-predictor` prints, as JSON values; the caller sets "model" and "version"."""
        return json_values(
            {
                "kind": "next-agent",
                "model": None,
                "version": None,
                "workflows": self.workflows,
                "steps": self.steps,
                "moments": {m: {**figures.to_dict(), "states": self.states[m]} for m, figures in self.moments.items()},
                "by_workflow_type": self.by_workflow_type,
                "baselines": {
                    name: {"accuracy": by_moment[PREFILL].accuracy, **by_moment}
                    for name, by_moment in self.baselines.items()
                },
                "differences": self.differences,
                "rivals": self.rivals,
                "confusions": self.confusions,
                "behind": worst(self.behind),
                "profiles": self.profiles,
            }
        )


def evaluate(
    predict: Predict,
    prefixes: Prefixes,
    rng: np.random.Generator,
    *,
    baselines: Mapping[str, Predict] | None = None,
    profiles: Mapping[str, Prefixes] | None = None,
    resamples: int = RESAMPLES,
) -> Evaluation:
    """Evaluate a predictor and baselines on `prefixes` that they were not trained on.

    Args:
        prefixes: W workflows with their outcomes.
        rng: for the bootstrap; all predictors share its resamples, so equal forecasts have equal intervals.
        baselines: evaluated at the same positions, by name.
        profiles: `prefixes` as seen under each input profile; profiles with equal inputs share one object.

    Raises:
        TraceError: there is no workflow.
    """
    if not prefixes.steps:
        raise TraceError("the test traces hold no step: nothing can be judged; name traces with at least one workflow")
    seed = int(rng.integers(2**63))
    baselines = baselines or {}
    everything, outcomes = np.arange(prefixes.steps), prefixes.named_outcomes

    def forecast(model: Predict, shown: Prefixes) -> dict[Moment, NDArray[np.float32]]:
        return {moment: model(shown, moment) for moment in MOMENTS}

    def judge(
        forecasts: Mapping[Moment, NDArray[np.float32]], rows: NDArray[np.int64] = everything
    ) -> dict[Moment, Figures]:
        workflow = np.unique(prefixes.workflow[rows], return_inverse=True)[1]
        return {
            moment: measure(chances[rows], outcomes[rows], workflow, np.random.default_rng(seed), resamples)
            for moment, chances in forecasts.items()
        }

    def profile(shown: Prefixes, rivals: Mapping[str, Predict]) -> ProfileFigures:
        ours = judge(forecast(predict, shown))
        theirs = {name: judge(forecast(rival, shown)) for name, rival in rivals.items()}
        return ProfileFigures(ours, _states(shown), _lost(_against(ours, theirs, seed, resamples), theirs))

    forecasts = forecast(predict, prefixes)
    moments = judge(forecasts)
    names = (*prefixes.vocabulary.workflow_types, "unknown")
    type_of = prefixes.workflow_type[prefixes.workflow]
    rows_of = {names[index]: np.flatnonzero(type_of == index) for index in np.unique(type_of)}
    by_type = {kind: judge(forecasts, rows) for kind, rows in rows_of.items()}
    overall: dict[str, ByMoment] = {}
    within: dict[str, dict[str, ByMoment]] = {kind: {} for kind in rows_of}
    for name, baseline in baselines.items():
        rival_forecasts = forecast(baseline, prefixes)
        overall[name] = judge(rival_forecasts)
        for kind, rows in rows_of.items():
            # With a single workflow type, its figures equal the overall ones.
            within[kind][name] = overall[name] if len(rows_of) == 1 else judge(rival_forecasts, rows)
    against = _against(moments, overall, seed, resamples)
    whole = ProfileFigures(moments, _states(prefixes), _lost(against, overall))
    return Evaluation(
        workflows=prefixes.workflows,
        steps=prefixes.steps,
        moments=moments,
        states=whole.states,
        by_workflow_type=by_type,
        baselines=overall,
        differences=against,
        rivals={kind: _rivals(by_type[kind], within[kind], seed, resamples) for kind in rows_of},
        confusions={
            moment: confusions(chances, replace(prefixes, outcomes=outcomes)) for moment, chances in forecasts.items()
        },
        behind=whole.behind,
        profiles=by_profile(profiles or {}, baselines, profile, {id(prefixes): whole}),
    )


def _states(prefixes: Prefixes) -> dict[Moment, bool]:
    return {moment: moment in prefixes.states for moment in MOMENTS}


def _lost(against: Mapping[str, Mapping[Moment, Difference]], baselines: Mapping[str, ByMoment]) -> tuple[Behind, ...]:
    lost = []
    for name, by_moment in against.items():
        for moment, gap in by_moment.items():
            own = baselines[name][moment].accuracy
            for k, (gain, (low, high)) in enumerate(zip(gap.difference, gap.ci95, strict=True)):
                where = f"{moment_name(moment)}, {k + 1} step{'s' * (k > 0)} ahead"
                lost += behind(name, where, -gain, (-high, -low), own[k])
    return tuple(lost)


def _against(
    ours: ByMoment, baselines: Mapping[str, ByMoment], seed: int, resamples: int
) -> dict[str, dict[Moment, Difference]]:
    """Differences predictor − baseline, by baseline and moment."""
    by_moment = {
        moment: differences({name: (figures, theirs[moment]) for name, theirs in baselines.items()}, seed, resamples)
        for moment, figures in ours.items()
    }
    return {name: {moment: by_name[name] for moment, by_name in by_moment.items()} for name in baselines}


def _rivals(
    ours: ByMoment, baselines: Mapping[str, ByMoment], seed: int, resamples: int
) -> dict[str, dict[Moment, dict[str, Any]]]:
    return {
        name: {
            moment: {
                "accuracy": baselines[name][moment].accuracy,
                "ci95": baselines[name][moment].ci95,
                "difference": gain.difference,
                "difference_ci95": gain.ci95,
            }
            for moment, gain in by_moment.items()
        }
        for name, by_moment in _against(ours, baselines, seed, resamples).items()
    }
