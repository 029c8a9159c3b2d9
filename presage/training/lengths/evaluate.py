"""Evaluate length predictors and baselines on held-out traces.

A predictor is a function from rows to quantiles, so one code path evaluates Presage's predictor, every baseline and the
oracle of a synthetic process. All are evaluated on the steps with a known length. Steps of truncated workflows are left
out and counted. If mostly long workflows are truncated, the remaining steps are biased towards short lengths, equally
for every model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from presage.errors import TraceError
from presage.features.input_profiles import TARGETS
from presage.features.lengths import LengthRows
from presage.predictors.common.bootstrap import pair_ratio_cis, ratio_cis
from presage.training.baselines import Behind, behind, worst
from presage.training.lengths.metrics import SCOPES, LengthFigures, Share, measure, median_column, number
from presage.training.lengths.queue import QueueFigures, compare, queued
from presage.training.metrics import RESAMPLES

KIND: Final = "remaining-length"

BINS: Final = 10
"""Number of equal-sized groups, by forecast, in which forecast and actual length are compared."""

Predict = Callable[[LengthRows], NDArray[np.float32]]
"""Rows to quantiles [n, Q], tokens."""


@dataclass(frozen=True)
class LengthDifference:
    """Figures of the first predictor minus those of the second on the same steps; below 0 the first is better.

    Attributes:
        tau_distance: by scope.
        pinball: tokens a step, Q of them.
    """

    tau_distance: Mapping[str, Share]
    pinball: tuple[Share, ...]

    def to_dict(self, quantiles: Sequence[float]) -> dict[str, Any]:
        """As JSON values, null where nothing was judged; quantiles are keys such as "0.9"."""
        names = [f"{q:g}" for q in quantiles]
        return {
            "tau_distance": _shares_to_dict(self.tau_distance),
            "pinball": _shares_to_dict(dict(zip(names, self.pinball, strict=True))),
        }


@dataclass(frozen=True)
class LengthProfile:
    """Figures under one input profile (`features/input_profiles.py`).

    Attributes:
        figures: on all steps judged.
        behind: comparisons that a baseline won under the same profile.
    """

    figures: LengthFigures
    behind: tuple[Behind, ...]

    def to_dict(self) -> dict[str, Any]:
        """The headline figures as JSON values."""
        found = self.figures.to_dict()
        kept = [f"{figure}{of}" for figure in ("tau_distance", "pinball", "coverage") for of in ("", "_ci95")]
        return {key: found[key] for key in kept} | {"behind": worst(self.behind)}


@dataclass(frozen=True)
class LengthEvaluation:
    """Figures of one predictor of lengths on W workflows.

    Attributes:
        figures: on all steps judged; their counts by workflow are what the registry's gates compare.
        by_workflow_type: the same within each type, `"unknown"` for those not in the vocabulary.
        type_of: workflow type of each of the W workflows.
        baselines: figures of each baseline, by name.
        differences: what was judged minus each baseline.
        behind: comparisons with a baseline that were lost.
        profiles: figures under each requested input profile.
        queue: what the ranking is worth; None where no workflow's steps are all known.
        bins: steps grouped by the forecast median: what was forecast and what came.
        target: what was forecast, the tokens "remaining" or of this "step".
        cut: steps left out because their workflow was cut.
        unknown: steps left out because a count is missing.
        model: name of what was judged, if it has one.
        version: its version in the registry, if it has one.
    """

    figures: LengthFigures
    by_workflow_type: Mapping[str, LengthFigures]
    type_of: tuple[str, ...]
    baselines: Mapping[str, LengthFigures]
    differences: Mapping[str, LengthDifference]
    behind: tuple[Behind, ...]
    profiles: Mapping[str, LengthProfile]
    queue: QueueFigures | None
    bins: tuple[Mapping[str, float], ...]
    target: str
    cut: int
    unknown: int
    model: str | None = None
    version: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """The object `train-predictor` and `presage evaluate` print (DESIGN.md, Command contracts), as JSON values."""
        return {
            "kind": KIND,
            "model": self.model,
            "version": self.version,
            "target": self.target,
            **self.figures.to_dict(),
            "left_out_steps": {"cut": self.cut, "count missing": self.unknown},
            "by_workflow_type": {name: of.to_dict() for name, of in self.by_workflow_type.items()},
            "baselines": {name: of.to_dict() for name, of in self.baselines.items()},
            "differences": {name: of.to_dict(self.figures.quantiles) for name, of in self.differences.items()},
            "behind": worst(self.behind),
            "profiles": {name: of.to_dict() for name, of in self.profiles.items()},
            "queue": self.queue.to_dict() if self.queue is not None else None,
            "bins": [dict(row) for row in self.bins],
        }


def evaluate(
    predict: Predict,
    rows: LengthRows,
    quantiles: tuple[float, ...],
    seed: int,
    *,
    baselines: Mapping[str, Predict] | None = None,
    profiles: Mapping[str, LengthRows] | None = None,
    model: str | None = None,
    version: int | None = None,
    resamples: int = RESAMPLES,
) -> LengthEvaluation:
    """Evaluate a predictor and baselines on rows that they were not trained on.

    Args:
        predict: what is judged.
        rows: n steps, those of a workflow one after the other.
        quantiles: Q, rising: what `predict` and the baselines forecast.
        seed: of the bootstrap and of the queue's arrivals; one draw of workflows serves all.
        baselines: judged on the same steps, by name.
        profiles: the same rows as each input profile shows them; what looks alike is one object.
        model: name of what is judged, for the record.
        version: its version, for the record.
        resamples: of the bootstrap.

    Raises:
        TraceError: there is no step whose length is known.
    """
    known = rows.labelled
    cut = int((rows.lower_bound & ~known).sum())
    if not known.any():
        raise TraceError(
            f"of {len(rows)} steps none has a known length ({cut} are of workflows that were cut): nothing can be "
            "judged; give traces with output_tokens and at least one complete workflow"
        )
    first = np.diff(rows.workflow, prepend=-1) != 0

    def judge(forecast: NDArray[np.float32], within: NDArray[np.bool_], workflow: NDArray[np.integer]) -> LengthFigures:
        return measure(
            forecast[within],
            rows.remaining[within],
            workflow,
            first[within],
            quantiles,
            np.random.default_rng(seed),
            resamples,
        )

    forecast = predict(rows)
    figures = judge(forecast, known, rows.workflow[known])
    names = (*rows.vocabulary.workflow_types, "unknown")
    by_type = {}
    for index in np.unique(rows.workflow_type[known]):
        within = known & (rows.workflow_type == index)
        workflow = np.unique(rows.workflow[within], return_inverse=True)[1]
        by_type[names[index]] = judge(forecast, within, workflow)
    others = {name: judge(baseline(rows), known, rows.workflow[known]) for name, baseline in (baselines or {}).items()}
    workflows = len(figures.positions)
    type_of = np.full(workflows, len(names) - 1)
    type_of[rows.workflow[known]] = rows.workflow_type[known]
    median = forecast[:, median_column(quantiles)]
    against = {name: difference(figures, of, seed, resamples) for name, of in others.items()}
    seen = {id(rows): LengthProfile(figures, _lost(against, others, quantiles))}
    for name, shown in sorted((profiles or {}).items(), key=lambda of: of[0] not in TARGETS.values()):
        if id(shown) not in seen:
            mine = judge(predict(shown), known, rows.workflow[known])
            # Baselines are judged only under the profiles of promotion targets.
            asked = (baselines or {}) if name in TARGETS.values() else {}
            theirs = {other: judge(ask(shown), known, rows.workflow[known]) for other, ask in asked.items()}
            gaps = {other: difference(mine, of, seed, resamples) for other, of in theirs.items()}
            seen[id(shown)] = LengthProfile(mine, _lost(gaps, theirs, quantiles))
    return LengthEvaluation(
        figures=figures,
        by_workflow_type=by_type,
        type_of=tuple(names[index] for index in type_of),
        baselines=others,
        differences=against,
        behind=seen[id(rows)].behind,
        profiles={name: seen[id(shown)] for name, shown in (profiles or {}).items()},
        queue=_queue(rows, median, seed),
        bins=_bins(median[known], rows.remaining[known]),
        target=rows.target,
        cut=cut,
        unknown=int((~known).sum()) - cut,
        model=model,
        version=version,
    )


def difference(ours: LengthFigures, theirs: LengthFigures, seed: int, resamples: int = RESAMPLES) -> LengthDifference:
    """First minus second, with paired intervals."""
    wrong, pairs = (np.stack([of[scope] for scope in SCOPES], axis=1) for of in (_minus(ours, theirs), ours.pairs))
    ranks = pair_ratio_cis(wrong, pairs, np.random.default_rng(seed), resamples)
    loss = ours.loss - theirs.loss
    positions = np.repeat(ours.positions[:, None], loss.shape[1], axis=1)
    ends = ratio_cis(loss, positions, np.random.default_rng(seed), resamples)
    return LengthDifference(
        tau_distance={
            scope: Share(ours.tau_distance[scope].value - theirs.tau_distance[scope].value, rank)
            for scope, rank in zip(SCOPES, ranks, strict=True)
        },
        pinball=tuple(
            Share(mine.value - its.value, end)
            for mine, its, end in zip(ours.pinball, theirs.pinball, ends, strict=True)
        ),
    )


def _lost(
    against: Mapping[str, LengthDifference], baselines: Mapping[str, LengthFigures], quantiles: Sequence[float]
) -> tuple[Behind, ...]:
    """The comparisons that a baseline won."""
    found = []
    for name, gap in against.items():
        own = baselines[name]
        named = [f"in pinball loss at {q:g}, tokens a step," for q in quantiles]
        named += [f"in tau distance of {'all' if scope == 'all' else 'first'} steps" for scope in SCOPES]
        gaps = *gap.pinball, *(gap.tau_distance[scope] for scope in SCOPES)
        figures = *own.pinball, *(own.tau_distance[scope] for scope in SCOPES)
        for at, by, figure in zip(named, gaps, figures, strict=True):
            found += behind(name, at, by.value, by.ci95, figure.value)
    return tuple(found)


def _minus(ours: LengthFigures, theirs: LengthFigures) -> dict[str, NDArray[np.float64]]:
    return {scope: ours.wrong[scope] - theirs.wrong[scope] for scope in SCOPES}


def _queue(rows: LengthRows, median: NDArray[np.float32], seed: int) -> QueueFigures | None:
    """The queue over workflows in which every step has a known length."""
    waiting = queued(rows)
    if waiting is None:
        return None
    policy = "shortest total, predicted" if rows.target == "remaining" else "shortest step, predicted"
    return compare(waiting.work, {policy: median[waiting.taken].astype(np.float64)}, waiting.offsets, seed)


def _bins(median: NDArray[np.float32], truth: NDArray[np.float32]) -> tuple[dict[str, float], ...]:
    groups = np.array_split(np.argsort(median, kind="stable"), min(BINS, len(median)))
    found = []
    for rows in groups:
        low, middle, high = np.quantile(truth[rows], [0.1, 0.5, 0.9]).tolist()
        found.append(
            {
                "steps": len(rows),
                "forecast": float(np.median(median[rows])),
                "truth_p10": low,
                "truth_p50": middle,
                "truth_p90": high,
            }
        )
    return tuple(found)


def _shares_to_dict(shares: Mapping[str, Share]) -> dict[str, Any]:
    return {
        name: {"difference": number(share.value), "ci95": [number(end) for end in share.ci95]}
        for name, share in shares.items()
    }
