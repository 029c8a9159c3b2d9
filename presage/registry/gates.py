"""Whether a next-agent version may take an alias: figures in, a verdict out.

Knows nothing of MLflow, of traces or of how the figures came about; the caller measures candidate and champion on the
same held-out traces. Every gate is always judged, so that a refusal names everything that is wrong at once.

Why not `mlflow.models.MetricThreshold`: it asks for a minimal *improvement* over a baseline by a fixed amount, and
"not worse than the champion beyond a paired interval over workflows" has no spelling in it; using it for the plain
budgets alone would put two vocabularies into one verdict, and load MLflow to compare two numbers.

The accuracy gates are up to 2 moments × K horizons, each refusing an equally good candidate in at most 2.5 % of cases.
They are not corrected for being many: they are strongly correlated, and a false refusal costs one more look.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from presage.predictors.bootstrap import paired_difference_ci
from presage.registry.verdict import (
    Gate,
    Verdict,
    budget_gate,
    evidence_gate,
    forgotten_types,
    pickle_gate,
    schema_gate,
)


@dataclass(frozen=True)
class Budget:
    """The limits of the gates; the defaults are those of `docs/registry.md`.

    Attributes:
        latency_us: median of one warm forecast with its state, microseconds. Several times the design's 30 µs: it
            shall catch a model of the wrong kind, not a busy machine.
        size_bytes: the artefact's own files.
        ece: expected calibration error at any moment and horizon, on top of what sampling alone explains.
        ece_loss: how much more calibration error than the champion's, again on top of sampling.
        nll_loss: how much more negative log-likelihood than the champion's, nats a position.
        workflows: how many workflows must stand behind the figures.
    """

    latency_us: float = 200.0
    size_bytes: int = 1_500_000
    ece: float = 0.10
    ece_loss: float = 0.02
    nll_loss: float = 0.05
    workflows: int = 10


@dataclass(frozen=True)
class MomentEvidence:
    """The figures of one moment (prefill or completion). W workflows, K horizons.

    Attributes:
        correct: `int[W, K]`, positions where the likeliest outcome was the true one.
        positions: `int[W, K]`, positions judged: nothing after END or past a cut.
        nll: K numbers, nats a position; NaN where nothing was judged.
        ece: K numbers between 0 and 1; NaN where nothing was judged.
    """

    correct: NDArray[Any]
    positions: NDArray[Any]
    nll: tuple[float, ...]
    ece: tuple[float, ...]


@dataclass(frozen=True)
class Schema:
    """What a version promises to those that use it.

    Attributes:
        horizon: K, the number of steps forecast.
        version: version of the feature schema.
        workflow_types: those it knows.
    """

    horizon: int
    version: int
    workflow_types: frozenset[str]


@dataclass(frozen=True)
class Evidence:
    """What was measured of one version on some held-out traces.

    Attributes:
        workflows: W ids, unique over workflow types, in the order of the rows of `correct` and `positions`.
        moments: by name, `"prefill"` and `"completion"`.
        latency_us: median of one warm forecast, microseconds.
        size_bytes: the artefact's own files.
        schema: what the version promises.
        pickles: names of files that are or may hide a pickle.
        floor: the best n-gram baseline on the same traces, by moment; empty where none was measured.
    """

    workflows: tuple[str, ...]
    moments: Mapping[str, MomentEvidence]
    latency_us: float
    size_bytes: int
    schema: Schema
    pickles: tuple[str, ...] = ()
    floor: Mapping[str, MomentEvidence] = field(default_factory=dict)


def judge(
    candidate: Evidence,
    champion: Evidence | None,
    budget: Budget,
    *,
    name: str,
    version: int,
    rng: np.random.Generator,
) -> Verdict:
    """Judge a candidate against the present champion, or, where there is none, against its n-gram floor.

    Args:
        candidate: figures of the version that asks for promotion.
        champion: figures of the present holder of the alias, from the same workflows; None for the first.
        budget: the limits.
        name: registered model.
        version: the candidate's version.
        rng: source of the bootstrap; the same state gives the same verdict.

    Raises:
        ValueError: the figures to be compared are not of the same workflows and positions.
    """
    gates = [_evidence(candidate, budget), _schema(candidate, champion)]
    gates += _accuracy("accuracy", candidate, champion, champion.moments if champion else {}, "the champion", rng)
    if candidate.floor:
        gates += _accuracy("floor", candidate, None, candidate.floor, "the best n-gram", rng)
    elif champion is None:
        reason = (
            "no champion and no n-gram baseline to compare with: the first champion must show that it beats counting"
        )
        gates.append(Gate("floor", passed=False, value=None, limit=None, reason=reason))
    gates += _calibration(candidate, champion, budget)
    gates += _nll(candidate, champion, budget)
    gates.append(budget_gate("latency", candidate.latency_us, budget.latency_us, "µs for one warm forecast"))
    gates.append(budget_gate("size", candidate.size_bytes, budget.size_bytes, "bytes of artefact"))
    gates.append(pickle_gate(candidate.pickles))
    return Verdict(name, version, tuple(gates))


def sampling_ece(positions: int, bins: int = 15) -> float:
    """An upper bound on the calibration error that sampling alone makes a perfectly calibrated forecaster show.

    A bin of n_b positions misses its mean by about sqrt(2/π · p(1−p)/n_b); with p = 1/2 and over equally filled bins
    the weighted sum is sqrt(2/π)/2 · sqrt(bins/positions), and any other p or filling gives less.

    Args:
        positions: positions judged.
        bins: bins of the reliability table.
    """
    return math.sqrt(2 / math.pi) / 2 * math.sqrt(bins / positions) if positions else math.inf


def _evidence(candidate: Evidence, budget: Budget) -> Gate:
    judged = [moment.positions.any(axis=1) for moment in candidate.moments.values()]
    workflows = int(np.logical_or.reduce(judged).sum()) if judged else 0
    return evidence_gate(workflows, budget.workflows)


def _schema(candidate: Evidence, champion: Evidence | None) -> Gate:
    if champion is None:
        return schema_gate(None)
    mine, its = candidate.schema, champion.schema
    broken = []
    if mine.horizon != its.horizon:
        broken.append(f"horizon {mine.horizon}, the champion's is {its.horizon}")
    if mine.version != its.version:
        broken.append(f"feature schema {mine.version}, the champion's is {its.version}")
    broken += forgotten_types(mine.workflow_types, its.workflow_types)
    if missing := sorted(champion.moments.keys() - candidate.moments.keys()):
        broken.append(f"not judged at {', '.join(missing)}")
    return schema_gate(broken)


def _accuracy(
    gate: str,
    candidate: Evidence,
    other: Evidence | None,
    moments: Mapping[str, MomentEvidence],
    rival: str,
    rng: np.random.Generator,
) -> Iterator[Gate]:
    """Refused where even the upper end of the interval of candidate − rival lies below zero."""
    if other is not None and other.workflows != candidate.workflows:
        raise ValueError(f"candidate and {rival} were judged on different workflows; judge both on the same traces")
    for moment, horizon, mine, its in _both(candidate.moments, moments):
        positions = mine.positions[:, horizon]
        if not np.array_equal(positions, its.positions[:, horizon]):
            raise ValueError(
                f"candidate and {rival} were judged on different positions at {moment}, horizon {horizon + 1}; "
                "judge both on the same traces"
            )
        name, total = f"{gate}-{moment}-{horizon + 1}", int(positions.sum())
        if not total:
            yield Gate(name, passed=True, value=None, limit=None, reason="no position reaches this horizon")
            continue
        correct, rivals = mine.correct[:, horizon], its.correct[:, horizon]
        low, high = paired_difference_ci(correct, rivals, positions, rng)
        reason = (
            f"{correct.sum() / total:.4f} against {rival}'s {rivals.sum() / total:.4f} on {total} positions: "
            f"difference {(correct.sum() - rivals.sum()) / total:+.4f}, 95 % interval [{low:+.4f}, {high:+.4f}]"
        )
        yield Gate(name, high >= 0, high, 0.0, reason)


def _calibration(candidate: Evidence, champion: Evidence | None, budget: Budget) -> Iterator[Gate]:
    for moment, mine in candidate.moments.items():
        for horizon, total in enumerate(mine.positions.sum(axis=0).tolist()):
            name = f"calibration-{moment}-{horizon + 1}"
            if not total:
                yield Gate(name, passed=True, value=None, limit=None, reason="no position reaches this horizon")
                continue
            sampling = sampling_ece(total)
            limit = budget.ece + sampling
            against = f"at most {budget.ece} + {sampling:.4f} that sampling explains"
            its = _at(champion, moment, "ece", horizon)
            if its is not None and its + budget.ece_loss + sampling < limit:
                limit = its + budget.ece_loss + sampling
                against = (
                    f"at most the champion's {its:.4f} + {budget.ece_loss} + {sampling:.4f} that sampling explains"
                )
            value = mine.ece[horizon]
            yield Gate(name, value <= limit, value, limit, f"calibration error {value:.4f}, wanted {against}")


def _nll(candidate: Evidence, champion: Evidence | None, budget: Budget) -> Iterator[Gate]:
    for moment, mine in candidate.moments.items():
        for horizon, total in enumerate(mine.positions.sum(axis=0).tolist()):
            name, value = f"nll-{moment}-{horizon + 1}", mine.nll[horizon]
            its = _at(champion, moment, "nll", horizon)
            if not total:
                yield Gate(name, passed=True, value=None, limit=None, reason="no position reaches this horizon")
            elif its is None:
                reason = f"{value:.4f} nats a position, wanted a finite number; no champion to compare with"
                yield Gate(name, math.isfinite(value), value, None, reason)
            else:
                limit = its + budget.nll_loss
                reason = f"{value:.4f} nats a position, wanted at most the champion's {its:.4f} + {budget.nll_loss}"
                yield Gate(name, value <= limit and math.isfinite(value), value, limit, reason)


def _both(
    mine: Mapping[str, MomentEvidence], other: Mapping[str, MomentEvidence]
) -> Iterator[tuple[str, int, MomentEvidence, MomentEvidence]]:
    """Moments and horizons that both sides have; one that only the champion has is a matter of the schema gate."""
    for moment in [moment for moment in mine if moment in other]:
        for horizon in range(min(mine[moment].correct.shape[1], other[moment].correct.shape[1])):
            yield moment, horizon, mine[moment], other[moment]


def _at(champion: Evidence | None, moment: str, figure: str, horizon: int) -> float | None:
    """The champion's figure there; None where it has none."""
    if champion is None or moment not in champion.moments:
        return None
    figures: tuple[float, ...] = getattr(champion.moments[moment], figure)
    return figures[horizon] if horizon < len(figures) and math.isfinite(figures[horizon]) else None
