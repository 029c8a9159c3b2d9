"""The evidence of each kind of predictor, and the gates made of it.

The caller measures candidate and champion on the same held-out data.

- Next agent: accuracy, calibration and likelihood at up to 2 moments × K horizons. Each accuracy gate refuses an
  equally good candidate in at most 2.5 % of cases. There is no correction for multiple tests: they are strongly
  correlated, and a false refusal costs one more look.
- Lengths: order (tau distance) and pinball loss, by paired intervals over workflows; coverage of the upper quantiles,
  overall and in the worst workflow type. Quantiles that are too wide pay in pinball loss.
- Router: macro mean average precision, Brier score and accuracy of the picks, by paired intervals over prompts.
- Replay: hit rate and mean completion, paired by run. Each run is a random half of the workflows, so the standard
  deviation of the differences between runs, undivided, is the standard error of a difference on all of them, and the
  interval is mean ± t · deviation.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from presage.predictors.common.bootstrap import pair_ratio_cis, paired_difference_ci, ratio_ci, share_ci
from presage.registry.gates import (
    Compared,
    Gate,
    artefact_gates,
    at_least,
    at_most,
    calibration_gate,
    evidence_gate,
    forgotten,
    no_worse,
    plain,
    sampling_ece,
    schema_gate,
)

LEAST_RUNS: Final = 3
"""Fewest runs of a replay."""


@dataclass(frozen=True)
class NextAgentBudget:
    """The limits of the gates of a next-agent version; the defaults are those of `docs/registry.md`.

    Attributes:
        latency_us: median of one warm forecast with its state, microseconds. Several times the design's 30 µs: it
            catches a model of the wrong kind, not a busy machine.
        size_bytes: the artefact's own files.
        ece: expected calibration error at any moment and horizon, beyond what sampling explains.
        ece_loss: calibration error in excess of the champion's, beyond what sampling explains.
        nll_loss: negative log-likelihood in excess of the champion's, nats a position.
        workflows: fewest workflows.
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
        nll: K numbers, nats a position; NaN if nothing was judged.
        ece: K numbers between 0 and 1; NaN if nothing was judged.
    """

    correct: NDArray[Any]
    positions: NDArray[Any]
    nll: tuple[float, ...]
    ece: tuple[float, ...]


@dataclass(frozen=True)
class NextAgentSchema:
    """The interface of a next-agent version.

    Attributes:
        horizon: K, the number of steps forecast.
        version: of the feature schema.
        workflow_types: known types.
    """

    horizon: int
    version: int
    workflow_types: frozenset[str]


@dataclass(frozen=True)
class NextAgentEvidence:
    """The figures of one next-agent version on held-out traces.

    Attributes:
        workflows: W ids, unique over workflow types, in the order of the rows of `correct` and `positions`.
        moments: by name, `"prefill"` and `"completion"`.
        latency_us: median of one warm forecast, microseconds.
        size_bytes: the artefact's own files.
        schema: its interface.
        pickles: files that are or may hide a pickle.
        floor: the best n-gram baseline on the same traces, by moment; empty if not measured.
    """

    workflows: tuple[str, ...]
    moments: Mapping[str, MomentEvidence]
    latency_us: float
    size_bytes: int
    schema: NextAgentSchema
    pickles: tuple[str, ...] = ()
    floor: Mapping[str, MomentEvidence] = field(default_factory=dict)


def judge_next_agent(
    candidate: NextAgentEvidence,
    champion: NextAgentEvidence | None,
    budget: NextAgentBudget,
    *,
    seed: int,
) -> list[Gate]:
    """Judge a candidate against the current champion, and against its n-gram floor.

    Args:
        candidate: the version to promote.
        champion: the current holder of the alias, on the same workflows; None for the first.
        budget: the limits.
        seed: of the bootstrap; the same seed gives the same gates.

    Raises:
        ValueError: the figures are of different workflows or positions.
    """
    rng = np.random.default_rng(seed)
    judged = [moment.positions.any(axis=1) for moment in candidate.moments.values()]
    gates = [
        evidence_gate(int(np.logical_or.reduce(judged).sum()) if judged else 0, budget.workflows),
        schema_gate(None if champion is None else _broken_next_agent(candidate, champion)),
    ]
    if champion is not None:
        _check_workflows(candidate.workflows, champion.workflows)
        gates += _accuracy("accuracy", candidate.moments, champion.moments, "the champion", rng)
    if candidate.floor:
        gates += _accuracy("floor", candidate.moments, candidate.floor, "the best n-gram", rng)
    elif champion is None:
        reason = (
            "no champion and no n-gram baseline to compare with: the first champion must show that it beats counting"
        )
        gates.append(plain("floor", False, reason))
    gates += _calibration(candidate, champion, budget)
    gates += _nll(candidate, champion, budget)
    latency = candidate.latency_us, budget.latency_us, "µs for one warm forecast"
    return gates + artefact_gates(*latency, candidate.size_bytes, budget.size_bytes, candidate.pickles)


def _broken_next_agent(candidate: NextAgentEvidence, champion: NextAgentEvidence) -> list[str]:
    mine, its = candidate.schema, champion.schema
    broken = []
    if mine.horizon != its.horizon:
        broken.append(f"horizon {mine.horizon}, the champion's is {its.horizon}")
    if mine.version != its.version:
        broken.append(f"feature schema {mine.version}, the champion's is {its.version}")
    broken += forgotten(mine.workflow_types, its.workflow_types)
    if missing := sorted(champion.moments.keys() - candidate.moments.keys()):
        broken.append(f"not judged at {', '.join(missing)}")
    return broken


def _accuracy(
    gate: str,
    candidate: Mapping[str, MomentEvidence],
    other: Mapping[str, MomentEvidence],
    rival: str,
    rng: np.random.Generator,
) -> Iterator[Gate]:
    """At moments and horizons that both have; the schema gate judges missing ones."""
    for moment in [moment for moment in candidate if moment in other]:
        mine, its = candidate[moment], other[moment]
        for horizon in range(min(mine.correct.shape[1], its.correct.shape[1])):
            positions = mine.positions[:, horizon]
            if not np.array_equal(positions, its.positions[:, horizon]):
                raise ValueError(
                    f"candidate and {rival} were judged on different positions at {moment}, horizon {horizon + 1}; "
                    "judge both on the same traces"
                )
            name, total = f"{gate}-{moment}-{horizon + 1}", int(positions.sum())
            if not total:
                yield _unreached(name)
                continue
            correct, rivals = mine.correct[:, horizon], its.correct[:, horizon]
            ci95 = paired_difference_ci(correct, rivals, positions, rng)
            compared = Compared(correct.sum() / total, rivals.sum() / total, ci95)
            against = f"{rival}'s {compared.its:.4f} on {total} positions"
            yield no_worse(name, compared, against, higher_is_better=True)


def _calibration(
    candidate: NextAgentEvidence, champion: NextAgentEvidence | None, budget: NextAgentBudget
) -> Iterator[Gate]:
    for name, total, value, its in _by_horizon("calibration", "ece", candidate, champion):
        sampling = sampling_ece(total)
        if not total:
            yield _unreached(name)
        elif its is not None and its + budget.ece_loss < budget.ece:
            wanted = f"the champion's {its:.4f} + {budget.ece_loss}"
            yield calibration_gate(name, value, its + budget.ece_loss, sampling, wanted)
        else:
            yield calibration_gate(name, value, budget.ece, sampling, str(budget.ece))


def _nll(candidate: NextAgentEvidence, champion: NextAgentEvidence | None, budget: NextAgentBudget) -> Iterator[Gate]:
    for name, total, value, its in _by_horizon("nll", "nll", candidate, champion):
        if not total:
            yield _unreached(name)
        elif its is None:
            reason = f"{value:.4f} nats a position, wanted a finite number; no champion to compare with"
            yield Gate(name, math.isfinite(value), value, None, reason)
        else:
            reason = f"{value:.4f} nats a position, wanted at most the champion's {its:.4f} + {budget.nll_loss}"
            yield at_most(name, value, its + budget.nll_loss, reason)


def _by_horizon(
    gate: str, figure: str, candidate: NextAgentEvidence, champion: NextAgentEvidence | None
) -> Iterator[tuple[str, int, float, float | None]]:
    """(gate, positions judged, the candidate's figure, the champion's figure or None) by moment and horizon."""
    for moment, mine in candidate.moments.items():
        theirs = champion.moments.get(moment) if champion is not None else None
        known: tuple[float, ...] = getattr(theirs, figure) if theirs is not None else ()
        for horizon, total in enumerate(mine.positions.sum(axis=0).tolist()):
            its = known[horizon] if horizon < len(known) and math.isfinite(known[horizon]) else None
            yield f"{gate}-{moment}-{horizon + 1}", total, getattr(mine, figure)[horizon], its


def _unreached(name: str) -> Gate:
    return plain(name, True, "no position reaches this horizon")


@dataclass(frozen=True)
class LengthBudget:
    """The limits of the gates of a version that predicts lengths; the defaults are those of `docs/registry.md`.

    Attributes:
        latency_us: median of all quantiles from one feature row, microseconds.
        size_bytes: the artefact's own files.
        shortfall: how far the coverage of an upper quantile may lie below its level ...
        shortfall_share: ... and at most this share of its misses: .99 may cover .985, not .97.
        type_shortfall: factor on the shortfall within one workflow type.
        workflows: fewest workflows, in total and of a type that is judged.
    """

    latency_us: float = 200.0
    size_bytes: int = 15_000_000
    shortfall: float = 0.02
    shortfall_share: float = 0.5
    type_shortfall: float = 3.0
    workflows: int = 10


class Counts(Protocol):
    """Counts of each of W workflows at Q quantiles; `LengthFigures` implements it."""

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
    """The interface of a version that predicts lengths.

    Attributes:
        target: "remaining" or "step".
        quantiles: Q, rising.
        version: of the artefact's format.
        workflow_types: known types.
    """

    target: str
    quantiles: tuple[float, ...]
    version: int
    workflow_types: frozenset[str]


@dataclass(frozen=True)
class LengthEvidence:
    """The figures of one version that predicts lengths, on held-out traces.

    Attributes:
        workflows: W ids, unique over workflow types.
        type_of: workflow type of each.
        counts: of the version.
        floor: counts of the best constant on the same steps.
        latency_us: median of all quantiles from one feature row, microseconds.
        size_bytes: the artefact's own files.
        schema: its interface.
        pickles: files that are or may hide a pickle.
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
    seed: int,
) -> list[Gate]:
    """Judge a candidate against the current champion and against the floor.

    Args:
        candidate: the version to promote.
        champion: the current holder of the alias, on the same workflows; None for the first.
        budget: the limits.
        seed: of the bootstrap; the same seed gives the same gates.

    Raises:
        ValueError: the figures are of different workflows or steps.
    """
    gates = [
        evidence_gate(int((candidate.counts.positions > 0).sum()), budget.workflows),
        schema_gate(None if champion is None else _broken_lengths(candidate.schema, champion.schema)),
    ]
    quantiles = candidate.schema.quantiles
    if champion is not None:
        _check_workflows(candidate.workflows, champion.workflows)
        shared = [q for q in quantiles if q in champion.schema.quantiles]
        places = [(q, quantiles.index(q), champion.schema.quantiles.index(q)) for q in shared]
        gates += _order_and_loss("", candidate.counts, champion.counts, "the champion", places, seed)
    own = [(q, place, place) for place, q in enumerate(quantiles)]
    gates += _order_and_loss("floor-", candidate.counts, candidate.floor, "the best constant", own, seed)
    gates += _coverage(candidate, budget, seed)
    latency = candidate.latency_us, budget.latency_us, "µs for all quantiles of one step"
    return gates + artefact_gates(*latency, candidate.size_bytes, budget.size_bytes, candidate.pickles)


def _broken_lengths(mine: LengthSchema, its: LengthSchema) -> list[str]:
    broken = []
    if mine.target != its.target:
        broken.append(f"predicts the tokens of target {mine.target!r}, the champion those of {its.target!r}")
    if mine.version != its.version:
        broken.append(f"format version {mine.version}, the champion's is {its.version}")
    if missing := [f"{q:g}" for q in its.quantiles if q not in mine.quantiles]:
        broken.append(f"lacks the champion's quantiles {', '.join(missing)}")
    return broken + forgotten(mine.workflow_types, its.workflow_types)


def _order_and_loss(
    prefix: str, mine: Counts, its: Counts, rival: str, places: list[tuple[float, int, int]], seed: int
) -> Iterator[Gate]:
    if not np.array_equal(mine.positions, its.positions):
        raise ValueError(f"candidate and {rival} were judged on different steps; judge both on the same traces")
    for scope, pairs in mine.pairs.items():
        gate, total = f"{prefix}tau-distance-{scope}", pairs.sum()
        if not total:
            yield plain(gate, True, "no two steps to put in order")
            continue
        gap = mine.wrong[scope] - its.wrong[scope]
        ends = pair_ratio_cis(gap[:, None], pairs[:, None], np.random.default_rng(seed))[0]
        tau = Compared(mine.wrong[scope].sum() / total, its.wrong[scope].sum() / total, ends)
        yield no_worse(gate, tau, f"{rival}'s {tau.its:.4f}, lower is better", higher_is_better=False)
    steps = mine.positions.sum()
    for q, here, there in places:
        loss, other = mine.loss[:, here], its.loss[:, there]
        ends = ratio_ci(loss - other, mine.positions, np.random.default_rng(seed))
        pinball = Compared(loss.sum() / steps, other.sum() / steps, ends)
        against = f"{rival}'s {pinball.its:.2f} tokens a step, lower is better"
        yield no_worse(f"{prefix}pinball-{q:g}", pinball, against, higher_is_better=False, digits=2)


def _coverage(candidate: LengthEvidence, budget: LengthBudget, seed: int) -> Iterator[Gate]:
    """Fails if even the upper end of the interval lies below the level of the quantile less the shortfall."""
    counts, types = candidate.counts, np.asarray(candidate.type_of)
    for place, q in enumerate(candidate.schema.quantiles):
        if q <= 0.5:
            continue  # only upper quantiles serve as bounds
        allowed = min(budget.shortfall, budget.shortfall_share * (1 - q))
        found = _covered(counts, place, np.ones(len(types), bool), seed)
        yield _bound(f"coverage-{q:g}", found, q, allowed, "")
        judged = {
            kind: _covered(counts, place, types == kind, seed)
            for kind in sorted(set(candidate.type_of))
            if (counts.positions[types == kind] > 0).sum() >= budget.workflows
        }
        if len(judged) > 1:  # a single type repeats the overall figure
            worst = min(judged, key=lambda kind: judged[kind][0])
            allowed *= budget.type_shortfall
            yield _bound(f"coverage-{q:g}-worst-type", judged[worst], q, allowed, f" in {worst}")


def _covered(counts: Counts, place: int, within: NDArray[Any], seed: int) -> tuple[float, float, float]:
    """Coverage and its interval."""
    hits, positions = counts.covered[within, place], counts.positions[within]
    return float(hits.sum() / positions.sum()), *share_ci(hits, positions, np.random.default_rng(seed))


def _bound(gate: str, found: tuple[float, float, float], q: float, allowed: float, where: str) -> Gate:
    share, low, high = found
    reason = (
        f"{share:.4f} of the steps{where} are within the {q:g} quantile, 95 % interval [{low:.4f}, {high:.4f}]; "
        f"wanted {q:g}, at least {q - allowed:.4f}"
    )
    return at_least(gate, high, q - allowed, reason)


@dataclass(frozen=True)
class RouterBudget:
    """The limits of the gates of a router; the defaults are those of `docs/router.md` for a linear router.

    Attributes:
        latency_ms: median of one prompt, milliseconds.
        size_bytes: the artefact's own files.
        ece: expected calibration error, beyond what sampling explains.
        prompts: fewest prompts.
    """

    latency_ms: float = 20.0
    size_bytes: int = 100_000_000
    ece: float = 0.05
    prompts: int = 100


@dataclass(frozen=True)
class RouterSchema:
    """The interface of a router.

    Attributes:
        version: of the artefact's format.
        models: known models.
    """

    version: int
    models: frozenset[str]


@dataclass(frozen=True)
class RouterComparison:
    """A candidate and a rival on the same prompts and the models both know.

    Attributes:
        rival: in words, such as "the champion".
        macro_map: average precision, mean over models.
        picked_accuracy: accuracy of the picked models.
        brier: mean squared error of the probabilities.
    """

    rival: str
    macro_map: Compared
    picked_accuracy: Compared
    brier: Compared


@dataclass(frozen=True)
class RouterEvidence:
    """The figures of one router on held-out outcomes.

    Attributes:
        labels: number of labels.
        prompts: number of prompts with a label.
        ece: expected calibration error, 0..1.
        latency_ms: median of one prompt, milliseconds.
        size_bytes: the artefact's own files.
        schema: its interface.
        floor: comparison with the base rates of the models, which always pick the best single one.
        pickles: files that are or may hide a pickle.
    """

    labels: int
    prompts: int
    ece: float
    latency_ms: float
    size_bytes: int
    schema: RouterSchema
    floor: RouterComparison
    pickles: tuple[str, ...] = ()


def judge_router(
    candidate: RouterEvidence,
    champion: tuple[RouterSchema, RouterComparison] | None,
    budget: RouterBudget,
) -> list[Gate]:
    """Judge a candidate against the current champion and against the base rates.

    Args:
        candidate: the version to promote.
        champion: the interface of the current holder of the alias, and the comparison with it; None for the first.
        budget: the limits.
    """
    gates = [
        evidence_gate(candidate.prompts, budget.prompts, "prompts"),
        schema_gate(None if champion is None else _broken_router(candidate.schema, champion[0])),
    ]
    if champion is not None:
        gates += _order_and_picks("", champion[1])
    gates += _order_and_picks("floor-", candidate.floor)
    sampling = sampling_ece(candidate.labels)
    gates.append(calibration_gate("calibration", candidate.ece, budget.ece, sampling, str(budget.ece)))
    latency = candidate.latency_ms, budget.latency_ms, "ms for one prompt"
    return gates + artefact_gates(*latency, candidate.size_bytes, budget.size_bytes, candidate.pickles)


def _broken_router(mine: RouterSchema, its: RouterSchema) -> list[str]:
    other = [] if mine.version == its.version else [f"format version {mine.version}, the champion's is {its.version}"]
    return other + forgotten(mine.models, its.models, "models")


def _order_and_picks(prefix: str, beside: RouterComparison) -> Iterator[Gate]:
    for figure, of, higher in (
        ("macro-map", beside.macro_map, True),
        ("picked-accuracy", beside.picked_accuracy, True),
        ("brier", beside.brier, False),
    ):
        name = f"{prefix}{figure}"
        if math.isnan(of.ci95[higher]):
            yield plain(name, True, "no prompt has the labels to judge this by")
            continue
        against = f"{of.its:.4f} of {beside.rival}, {'higher' if higher else 'lower'} is better"
        yield no_worse(name, of, against, higher_is_better=higher)


@dataclass(frozen=True)
class Replayed:
    """Figures of one contender by run; all contenders have the same runs.

    Attributes:
        hit_rate: share of prompt tokens found in the cache, 0 to 1.
        completion_s: mean completion of workflows, seconds.
        switched_off: policies that failed and were switched off.
    """

    hit_rate: tuple[float, ...]
    completion_s: tuple[float, ...]
    switched_off: tuple[str, ...] = ()


def judge_replay(candidate: Replayed, champion: Replayed | None, stock: Replayed) -> tuple[Gate, ...]:
    """The gates of a replay; each refuses an equally good version in at most 2.5 % of cases.

    Args:
        candidate: with forecasts of the version to promote.
        champion: with forecasts of the current holder; None for the first.
        stock: vLLM without hooks.

    Raises:
        ValueError: different runs, or too few.
    """
    off = candidate.switched_off
    reason = f"{' and '.join(off)} failed and switched off with its forecasts" if off else "no policy failed with it"
    gates = [at_most("replay-ran", len(off), 0, reason)]
    for rival, name, whom in ((champion, "champion", "the champion's"), (stock, "stock", "vLLM's alone")):
        if rival is None:
            continue
        mean, low, high = _mean_difference(candidate.hit_rate, rival.hit_rate)
        reason = f"hit rate {mean:+.4f} beside {whom}, 95 % interval {low:+.4f} to {high:+.4f}"
        gates.append(at_least(f"replay-hit-rate-{name}", high, 0.0, reason))
        mean, low, high = _mean_difference(candidate.completion_s, rival.completion_s)
        reason = f"mean completion {mean:+.3f} s beside {whom}, 95 % interval {low:+.3f} to {high:+.3f} s"
        gates.append(at_most(f"replay-completion-{name}", low, 0.0, reason))
    return tuple(gates)


def _mean_difference(candidate: Sequence[float], rival: Sequence[float]) -> tuple[float, float, float]:
    """Mean and interval of candidate − rival on all workflows, from runs on random halves."""
    from scipy.stats import t

    if len(candidate) != len(rival) or len(candidate) < LEAST_RUNS:
        raise ValueError(
            f"{len(candidate)} and {len(rival)} runs were compared; the same of both are wanted, {LEAST_RUNS} or more"
        )
    differences = [mine - its for mine, its in zip(candidate, rival, strict=True)]
    mean = float(np.mean(differences))
    half = float(t.ppf(0.975, len(differences) - 1)) * float(np.std(differences, ddof=1))
    if math.isclose(half, 0.0, abs_tol=1e-12):
        half = 0.0
    return mean, mean - half, mean + half


def _check_workflows(mine: tuple[str, ...], its: tuple[str, ...]) -> None:
    if mine != its:
        raise ValueError("candidate and the champion were judged on different workflows; judge both on the same traces")
