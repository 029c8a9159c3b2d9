"""Whether a version that predicts lengths may take an alias: figures in, a verdict out (see `gates.py`).

Two questions about accuracy, the order (tau distance) and the numbers (pinball loss), each against the champion and
against the floor, by a paired interval over workflows; and one about honesty: do the upper bounds hold as often as they
promise, over all and within the worst workflow type? A bound that is too wide is no lie; its price is pinball loss.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from presage.predictors.bootstrap import pair_ratio_cis, ratio_ci, share_ci
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
class LengthBudget:
    """The limits of the gates; the defaults are those of `docs/registry.md`.

    Attributes:
        latency_us: median of all quantiles from one feature row, microseconds.
        size_bytes: the artefact's own files.
        shortfall: how far coverage may lie below what an upper quantile promises ...
        shortfall_share: ... and at most this share of its promised misses: .99 may cover .985, not .97.
        type_shortfall: how many times as far within one workflow type.
        workflows: how many workflows must stand behind the figures, and behind those of a type that is judged.
    """

    latency_us: float = 200.0
    size_bytes: int = 15_000_000
    shortfall: float = 0.02
    shortfall_share: float = 0.5
    type_shortfall: float = 3.0
    workflows: int = 10


class Counts(Protocol):
    """What was counted in each of W workflows, at Q quantiles; `LengthFigures` of an evaluation are such."""

    @property
    def wrong(self) -> Mapping[str, NDArray[np.float64]]:
        """float64 [W] by scope, discordant pairs of each workflow's steps."""
        ...

    @property
    def pairs(self) -> Mapping[str, NDArray[np.float64]]:
        """float64 [W] by scope, pairs of each workflow's steps."""
        ...

    @property
    def loss(self) -> NDArray[np.float64]:
        """float64 [W, Q], sum of the pinball loss, tokens."""
        ...

    @property
    def covered(self) -> NDArray[np.int64]:
        """int64 [W, Q], steps whose length is at most the quantile."""
        ...

    @property
    def positions(self) -> NDArray[np.int64]:
        """int64 [W], steps judged."""
        ...


@dataclass(frozen=True)
class LengthSchema:
    """What a version promises to those that use it.

    Attributes:
        target: "remaining" or "step".
        quantiles: Q, rising.
        version: of the artefact's format.
        workflow_types: those it knows.
    """

    target: str
    quantiles: tuple[float, ...]
    version: int
    workflow_types: frozenset[str]


@dataclass(frozen=True)
class LengthEvidence:
    """What was measured of one version on some held-out traces.

    Attributes:
        workflows: W ids, unique over workflow types.
        type_of: workflow type of each.
        counts: of the version.
        floor: of the constant that would have been best on the same steps: it puts nothing in order.
        latency_us: median of all quantiles from one feature row, microseconds.
        size_bytes: the artefact's own files.
        schema: what the version promises.
        pickles: names of files that are or may hide a pickle.
    """

    workflows: tuple[str, ...]
    type_of: tuple[str, ...]
    counts: Counts
    floor: Counts
    latency_us: float
    size_bytes: int
    schema: LengthSchema
    pickles: tuple[str, ...] = ()


def judge_lengths(
    candidate: LengthEvidence,
    champion: LengthEvidence | None,
    budget: LengthBudget,
    *,
    name: str,
    version: int,
    seed: int,
) -> Verdict:
    """Judge a candidate against the present champion and against the floor.

    Args:
        candidate: figures of the version that asks for promotion.
        champion: figures of the present holder of the alias, from the same workflows; None for the first.
        budget: the limits.
        name: registered model.
        version: the candidate's version.
        seed: of the bootstrap; the same seed gives the same verdict.

    Raises:
        ValueError: the figures to be compared are not of the same workflows and steps.
    """
    if champion is not None and champion.workflows != candidate.workflows:
        raise ValueError("candidate and champion were judged on different workflows; judge both on the same traces")
    gates = [
        evidence_gate(int((candidate.counts.positions > 0).sum()), budget.workflows),
        schema_gate(None if champion is None else _broken(candidate.schema, champion.schema)),
    ]
    if champion is not None:
        shared = [q for q in candidate.schema.quantiles if q in champion.schema.quantiles]
        places = [(q, candidate.schema.quantiles.index(q), champion.schema.quantiles.index(q)) for q in shared]
        gates += _no_worse("", candidate.counts, champion.counts, "the champion", places, seed)
    own = [(q, place, place) for place, q in enumerate(candidate.schema.quantiles)]
    gates += _no_worse("floor-", candidate.counts, candidate.floor, "the best constant", own, seed)
    gates += _coverage(candidate, budget, seed)
    gates.append(budget_gate("latency", candidate.latency_us, budget.latency_us, "µs for all quantiles of one step"))
    gates.append(budget_gate("size", candidate.size_bytes, budget.size_bytes, "bytes of artefact"))
    gates.append(pickle_gate(candidate.pickles))
    return Verdict(name, version, tuple(gates))


def _broken(mine: LengthSchema, its: LengthSchema) -> list[str]:
    broken = []
    if mine.target != its.target:
        broken.append(f"predicts the tokens of target {mine.target!r}, the champion those of {its.target!r}")
    if mine.version != its.version:
        broken.append(f"format version {mine.version}, the champion's is {its.version}")
    if missing := [f"{q:g}" for q in its.quantiles if q not in mine.quantiles]:
        broken.append(f"lacks the champion's quantiles {', '.join(missing)}")
    return broken + forgotten_types(mine.workflow_types, its.workflow_types)


def _no_worse(
    prefix: str, mine: Counts, its: Counts, rival: str, places: list[tuple[float, int, int]], seed: int
) -> Iterator[Gate]:
    """Refused where even the lower end of the interval of candidate − rival lies above zero."""
    if not np.array_equal(mine.positions, its.positions):
        raise ValueError(f"candidate and {rival} were judged on different steps; judge both on the same traces")
    for scope, pairs in mine.pairs.items():
        gate, total = f"{prefix}tau-distance-{scope}", pairs.sum()
        if not total:
            yield Gate(gate, passed=True, value=None, limit=None, reason="no two steps to put in order")
            continue
        gap = mine.wrong[scope] - its.wrong[scope]
        ends = pair_ratio_cis(gap[:, None], pairs[:, None], np.random.default_rng(seed))[0]
        yield _against(gate, mine.wrong[scope].sum() / total, its.wrong[scope].sum() / total, ends, rival, "", 4)
    steps = mine.positions.sum()
    for q, here, there in places:
        loss, other = mine.loss[:, here], its.loss[:, there]
        ends = ratio_ci(loss - other, mine.positions, np.random.default_rng(seed))
        yield _against(
            f"{prefix}pinball-{q:g}", loss.sum() / steps, other.sum() / steps, ends, rival, " tokens a step", 2
        )


def _against(gate: str, mine: float, its: float, ends: tuple[float, float], rival: str, unit: str, digits: int) -> Gate:
    low, high = ends
    reason = (
        f"{mine:.{digits}f} against {rival}'s {its:.{digits}f}{unit}, lower is better: difference "
        f"{mine - its:+.{digits}f}, 95 % interval [{low:+.{digits}f}, {high:+.{digits}f}]"
    )
    return Gate(gate, low <= 0, low, 0.0, reason)


def _coverage(candidate: LengthEvidence, budget: LengthBudget, seed: int) -> Iterator[Gate]:
    """Refused where even the upper end of the interval lies below what is promised, less the shortfall allowed."""
    counts, types = candidate.counts, np.asarray(candidate.type_of)
    for place, q in enumerate(candidate.schema.quantiles):
        if q <= 0.5:
            continue  # only upper bounds are reserved by
        allowed = min(budget.shortfall, budget.shortfall_share * (1 - q))
        found = _covered(counts, place, np.ones(len(types), bool), seed)
        yield _bound(f"coverage-{q:g}", found, q, allowed, "")
        judged = {
            kind: _covered(counts, place, types == kind, seed)
            for kind in sorted(set(candidate.type_of))
            if (counts.positions[types == kind] > 0).sum() >= budget.workflows
        }
        if len(judged) > 1:  # the only type is all of them
            worst = min(judged, key=lambda kind: judged[kind][0])
            allowed *= budget.type_shortfall
            yield _bound(f"coverage-{q:g}-worst-type", judged[worst], q, allowed, f" in {worst}")


def _covered(counts: Counts, place: int, within: NDArray[Any], seed: int) -> tuple[float, float, float]:
    """Coverage and the ends of its interval."""
    hits, positions = counts.covered[within, place], counts.positions[within]
    return float(hits.sum() / positions.sum()), *share_ci(hits, positions, np.random.default_rng(seed))


def _bound(gate: str, found: tuple[float, float, float], q: float, allowed: float, where: str) -> Gate:
    share, low, high = found
    limit = q - allowed
    reason = (
        f"{share:.4f} of the steps{where} are within the {q:g} quantile, 95 % interval [{low:.4f}, {high:.4f}]; "
        f"wanted {q:g}, at least {limit:.4f}"
    )
    return Gate(gate, high >= limit, high, limit, reason)
