"""The evidence of each kind of predictor, and the gates made of it.

The caller measures candidate and champion on the same held-out data.

- Next agent: accuracy, calibration and likelihood at up to 2 moments × K horizons, by paired intervals over workflows.
  Each refuses an equally good candidate in at most 2.5 % of cases. There is no correction for multiple tests: they are
  strongly correlated, and a false refusal costs one more look.
- Lengths and return times: order (tau distance) and pinball loss, by paired intervals over workflows; coverage of the
  upper quantiles, overall and in the worst workflow type. Quantiles that are too wide pay in pinball loss, which is
  judged where `common/bootstrap.py` expects enough steps beyond the quantile.
- Profile: coverage of whole workflows and accuracy of the next step, by paired intervals over workflows. An expression
  of any agent in any order covers everything, so coverage alone is no evidence.
- Router: macro mean average precision, Brier score and accuracy of the picks, by paired intervals over prompts.
- Replay: hit rate and mean completion, paired by run. Each run is a random half of the workflows, so the standard
  deviation of the differences between runs, undivided, is the standard error of a difference on all of them, and the
  interval is mean ± t · deviation.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from presage.features.moment import Moment
from presage.predictors.common.bootstrap import (
    STEPS_BEYOND,
    MomentCounts,
    QuantileCounts,
    enough_beyond,
    pair_ratio_cis,
    ratio_ci,
    resample_weights,
    share_ci,
    steps_beyond,
)
from presage.registry.gates import (
    ArtefactEvidence,
    Compared,
    Gate,
    GateBudget,
    Interface,
    artefact_gates,
    at_least,
    at_most,
    calibration_gate,
    evidence_gate,
    no_worse,
    plain,
    sampling_ece,
    schema_gate,
    warning_gates,
)
from presage.wording import counted

LEAST_RUNS: Final = 3

RESAMPLES: Final = 1000


@dataclass(frozen=True)
class NextAgentBudget(GateBudget):
    """The limits of a next-agent version; the defaults are those of `docs/registry.md`.

    Attributes:
        latency: microseconds, several times the design's 30 µs: it catches a model of the wrong kind, not a busy
            machine.
        ece: expected calibration error at any moment and horizon, beyond what sampling explains.
        ece_loss: calibration error in excess of the champion's; trainings that differ by their seed alone differ by
            as much.
        nll_loss: negative log-likelihood in excess of the rival's, nats a position.
    """

    latency: float = 200.0
    size_bytes: int = 1_500_000
    evidence: int = 10
    ece: float = 0.10
    ece_loss: float = 0.05
    nll_loss: float = 0.05


@dataclass(frozen=True)
class NextAgentEvidence:
    """The figures of one next-agent version on held-out traces.

    Attributes:
        artefact: with the latency in microseconds.
        workflows: W ids, unique over workflow types, in the order of the rows of `correct` and `positions`.
        moments: by name, `"prefill"` and `"completion"`.
        floor: the best n-gram baseline on the same traces, by moment; empty if not measured.
        warnings: what makes these figures suspicious, by name.
    """

    artefact: ArtefactEvidence
    workflows: tuple[str, ...]
    moments: Mapping[Moment, MomentCounts]
    floor: Mapping[Moment, MomentCounts] = field(default_factory=dict)
    warnings: Mapping[str, str] = field(default_factory=dict)


def judge_next_agent(
    candidate: NextAgentEvidence,
    champion: NextAgentEvidence | None,
    budget: NextAgentBudget,
    *,
    seed: int,
) -> list[Gate]:
    """Judge a candidate against the current champion, if there is one, and against its n-gram floor.

    Raises ValueError if the figures are of different workflows or positions.
    """
    rng = np.random.default_rng(seed)
    judged = [moment.positions.any(axis=1) for moment in candidate.moments.values()]
    judged_workflows = int(np.logical_or.reduce(judged).sum()) if judged else 0
    gates = [evidence_gate(judged_workflows, budget.evidence)]
    if champion is not None:
        broken = champion.artefact.interface.broken_by(candidate.artefact.interface)
        if missing := sorted(champion.moments.keys() - candidate.moments.keys()):
            broken.append(f"not judged at {', '.join(missing)}")
        _check_workflows(candidate.workflows, champion.workflows)
        gates.append(schema_gate(broken))
        gates += _accuracy("accuracy", candidate.moments, champion.moments, "the champion", rng)
    else:
        gates.append(schema_gate(None))
    if candidate.floor:
        gates += _accuracy("floor", candidate.moments, candidate.floor, "the best n-gram", rng)
    elif champion is None:
        reason = (
            "no champion and no n-gram baseline to compare with: the first champion must show that it beats counting"
        )
        gates.append(plain("floor", False, reason))
    gates += _calibration(candidate, champion, budget, seed)
    rivals, rival = (candidate.floor, "the best n-gram") if champion is None else (champion.moments, "the champion")
    gates += _nll(candidate, rivals, rival, budget, seed)
    gates += warning_gates(candidate.warnings)
    return gates + artefact_gates(candidate.artefact, budget, "µs for one warm forecast")


def _accuracy(
    gate: str,
    candidate: Mapping[Moment, MomentCounts],
    other: Mapping[Moment, MomentCounts],
    rival: str,
    rng: np.random.Generator,
) -> Iterator[Gate]:
    """At moments and horizons that both have; the schema gate judges missing ones."""
    for moment in [moment for moment in candidate if moment in other]:
        mine, its = candidate[moment], other[moment]
        for horizon in range(min(mine.correct.shape[1], its.correct.shape[1])):
            positions = mine.positions[:, horizon]
            _check_positions(positions, its.positions[:, horizon], rival, moment, horizon)
            name, total = f"{gate}-{moment}-{horizon + 1}", int(positions.sum())
            if not total:
                yield _unreached(name)
                continue
            correct, rivals = mine.correct[:, horizon], its.correct[:, horizon]
            ci95 = ratio_ci(correct - rivals, positions, rng)
            compared = Compared(correct.sum() / total, rivals.sum() / total, ci95)
            against = f"{rival}'s {compared.its:.4f} on {counted(total, 'position')}"
            yield no_worse(name, compared, against, higher_is_better=True)


def _calibration(
    candidate: NextAgentEvidence, champion: NextAgentEvidence | None, budget: NextAgentBudget, seed: int
) -> Iterator[Gate]:
    """Against the limit, and against the champion by the paired interval of the difference."""
    for moment, mine in candidate.moments.items():
        its = champion.moments.get(moment) if champion is not None else None
        for horizon, total in enumerate(mine.positions.sum(axis=0).tolist()):
            cell = f"{moment}-{horizon + 1}"
            if not total:
                yield _unreached(f"calibration-{cell}")
                continue
            ece = mine.ece[horizon]
            yield calibration_gate(f"calibration-{cell}", ece, budget.ece, sampling_ece(total), str(budget.ece))
            if its is not None and horizon < len(its.ece):
                positions = mine.positions[:, horizon]
                gaps = mine.bin_gaps[:, horizon], its.bin_gaps[:, horizon]
                compared = Compared(ece, its.ece[horizon], _ece_difference_ci(*gaps, positions, seed))
                against = f"the champion's {compared.its:.4f}, lower is better"
                yield no_worse(
                    f"calibration-champion-{cell}",
                    compared,
                    against,
                    higher_is_better=False,
                    allowed=budget.ece_loss,
                )


def _ece_difference_ci(
    mine: NDArray[np.float64], its: NDArray[np.float64], positions: NDArray[Any], seed: int
) -> tuple[float, float]:
    """95 % interval of a difference of calibration errors, of gaps `[W, B]` each, over resampled workflows."""
    drawn = []
    for weights in resample_weights(len(positions), np.random.default_rng(seed), RESAMPLES):
        both = [np.abs(weights @ gaps).sum(axis=1) for gaps in (mine, its)]
        total = weights @ positions
        drawn.append((both[0] - both[1])[total > 0] / total[total > 0])
    low, high = np.quantile(np.concatenate(drawn), (0.025, 0.975))
    return float(low), float(high)


def _nll(
    candidate: NextAgentEvidence,
    rivals: Mapping[Moment, MomentCounts],
    rival: str,
    budget: NextAgentBudget,
    seed: int,
) -> Iterator[Gate]:
    """Over the outcomes that both know: one may have agents in its vocabulary that the other has not."""
    for moment, mine in candidate.moments.items():
        its = rivals.get(moment)
        for horizon, total in enumerate(mine.positions.sum(axis=0).tolist()):
            name, value = f"nll-{moment}-{horizon + 1}", mine.nll[horizon]
            if not total:
                yield _unreached(name)
                continue
            finite = f"{value:.4f} nats a position, wanted a finite number"
            if not math.isfinite(value):
                yield plain(name, False, finite)
                continue
            if its is None or horizon >= its.surprise.shape[1]:
                yield plain(name, True, f"{finite}; there is nothing to compare it with")
                continue
            surprises = mine.surprise[:, horizon], its.surprise[:, horizon]
            both = ~np.isnan(surprises[0]) & ~np.isnan(surprises[1])
            if not both.any():
                yield plain(name, True, f"{finite}; {rival} knows none of these outcomes")
                continue
            workflow, size = mine.workflow[both], len(candidate.workflows)
            sums = [np.bincount(workflow, surprise[both], size) for surprise in surprises]
            counts = np.bincount(workflow, minlength=size)
            ci95 = ratio_ci(sums[0] - sums[1], counts, np.random.default_rng(seed))
            compared = Compared(sums[0].sum() / counts.sum(), sums[1].sum() / counts.sum(), ci95)
            against = f"{rival}'s {compared.its:.4f} nats a position, lower is better"
            yield no_worse(name, compared, against, higher_is_better=False, allowed=budget.nll_loss)


def _check_positions(mine: NDArray[Any], its: NDArray[Any], rival: str, moment: str, horizon: int) -> None:
    if not np.array_equal(mine, its):
        raise ValueError(
            f"candidate and {rival} were judged on different positions at {moment}, horizon {horizon + 1}; judge both "
            "on the same traces"
        )


def _unreached(name: str) -> Gate:
    return plain(name, True, "no position reaches this horizon")


@dataclass(frozen=True)
class LengthBudget(GateBudget):
    """The limits of a version that predicts lengths; the defaults are those of `docs/registry.md`.

    Attributes:
        latency: of all quantiles from one feature row, microseconds. The slowest estimator, a forest that also
            forecasts the end, takes 90 where nothing else runs and twice that on a busy machine.
        evidence: fewest workflows, in total and of a type that is judged.
        shortfall: how far the coverage of an upper quantile may lie below its level ...
        shortfall_share: ... and at most this share of its misses: .99 may cover .985, not .97.
        type_shortfall: factor on the shortfall within one workflow type.
        unit: of the pinball loss.
    """

    latency: float = 500.0
    size_bytes: int = 15_000_000
    evidence: int = 10
    shortfall: float = 0.02
    shortfall_share: float = 0.5
    type_shortfall: float = 3.0
    unit: str = "tokens"


@dataclass(frozen=True)
class LengthEvidence:
    """The figures of one version that predicts lengths at Q quantiles, ascending, on held-out traces.

    Attributes:
        artefact: with the latency of all quantiles from one feature row, microseconds.
        workflows, type_of: W ids, unique over workflow types, and the type of each.
        floor: counts of the best constant on the same steps.
    """

    artefact: ArtefactEvidence
    quantiles: tuple[float, ...]
    workflows: tuple[str, ...]
    type_of: tuple[str, ...]
    counts: QuantileCounts
    floor: QuantileCounts


def judge_lengths(
    candidate: LengthEvidence,
    champion: LengthEvidence | None,
    budget: LengthBudget,
    *,
    seed: int,
) -> list[Gate]:
    """Judge a candidate against the current champion, if there is one, and against the floor.

    Raises ValueError if the figures are of different workflows or steps.
    """
    gates = [evidence_gate(int((candidate.counts.positions > 0).sum()), budget.evidence)]
    quantiles = candidate.quantiles
    if champion is not None:
        broken = champion.artefact.interface.broken_by(candidate.artefact.interface)
        if missing := [f"{q:g}" for q in champion.quantiles if q not in quantiles]:
            broken.append(f"lacks the champion's quantiles {', '.join(missing)}")
        _check_workflows(candidate.workflows, champion.workflows)
        gates.append(schema_gate(broken))
        shared = [q for q in quantiles if q in champion.quantiles]
        places = [(q, quantiles.index(q), champion.quantiles.index(q)) for q in shared]
        gates += _order_and_loss("", candidate.counts, champion.counts, "the champion", places, budget.unit, seed)
    else:
        gates.append(schema_gate(None))
    own = [(q, place, place) for place, q in enumerate(quantiles)]
    gates += _order_and_loss("floor-", candidate.counts, candidate.floor, "the best constant", own, budget.unit, seed)
    gates += _coverage(candidate, budget, seed)
    return gates + artefact_gates(candidate.artefact, budget, "µs for all quantiles of one step")


def _order_and_loss(
    prefix: str,
    mine: QuantileCounts,
    its: QuantileCounts,
    rival: str,
    places: list[tuple[float, int, int]],
    unit: str,
    seed: int,
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
    steps = int(mine.positions.sum())
    for q, here, there in places:
        loss, other = mine.loss[:, here], its.loss[:, there]
        ends = ratio_ci(loss - other, mine.positions, np.random.default_rng(seed))
        pinball = Compared(loss.sum() / steps, other.sum() / steps, ends)
        digits = 2 if unit == "tokens" else 4
        against = f"{rival}'s {pinball.its:.{digits}f} {unit} a step, lower is better"
        verdict = no_worse(f"{prefix}pinball-{q:g}", pinball, against, higher_is_better=False, digits=digits)
        yield verdict if enough_beyond(steps, q) else _not_judged(verdict, steps, q)


def _not_judged(gate: Gate, steps: int, q: float) -> Gate:
    """Passes a comparison at a quantile that too few steps can lie beyond; the reason keeps the figures."""
    expected = f"{steps_beyond(steps, q):.3g} steps expected beyond the {q:g} quantile"
    reason = f"{gate.reason}; {expected}, {STEPS_BEYOND} needed to judge it: not judged"
    return replace(gate, passed=True, value=None, limit=None, reason=reason)


def _coverage(candidate: LengthEvidence, budget: LengthBudget, seed: int) -> Iterator[Gate]:
    """Fails if even the upper end of the interval lies below the level of the quantile less the shortfall."""
    counts, types = candidate.counts, np.asarray(candidate.type_of)
    for place, q in enumerate(candidate.quantiles):
        if q <= 0.5:
            continue  # only upper quantiles serve as bounds
        allowed = min(budget.shortfall, budget.shortfall_share * (1 - q))
        covered = _covered(counts, place, np.ones(len(types), bool), seed)
        yield _bound(f"coverage-{q:g}", covered, q, allowed, "")
        judged = {
            kind: _covered(counts, place, types == kind, seed)
            for kind in sorted(set(candidate.type_of))
            if (counts.positions[types == kind] > 0).sum() >= budget.evidence
        }
        if len(judged) > 1:  # a single type repeats the overall figure
            worst = min(judged, key=lambda kind: judged[kind][0])
            allowed *= budget.type_shortfall
            yield _bound(f"coverage-{q:g}-worst-type", judged[worst], q, allowed, f" in {worst}")


def _covered(counts: QuantileCounts, place: int, within: NDArray[Any], seed: int) -> tuple[float, float, float]:
    """Coverage and its interval."""
    hits, positions = counts.covered[within, place], counts.positions[within]
    return float(hits.sum() / positions.sum()), *share_ci(hits, positions, np.random.default_rng(seed))


def _bound(gate: str, covered: tuple[float, float, float], q: float, allowed: float, where: str) -> Gate:
    share, low, high = covered
    reason = (
        f"{share:.4f} of the steps{where} are within the {q:g} quantile, 95 % interval [{low:.4f}, {high:.4f}]; "
        f"wanted {q:g}, at least {q - allowed:.4f}"
    )
    return at_least(gate, high, q - allowed, reason)


@dataclass(frozen=True)
class ProfileBudget(GateBudget):
    """The limits of a profile; the defaults are those of `docs/profiles.md`.

    Latency is of one further step of a workflow, microseconds; `coverage` is the least share of whole workflows
    covered.
    """

    latency: float = 500.0
    size_bytes: int = 5_000_000
    evidence: int = 10
    coverage: float = 0.9


@dataclass(frozen=True)
class ProfileEvidence:
    """The figures of one profile on W held-out workflows.

    Attributes:
        artefact: with the latency of one further step, microseconds.
        workflows: W ids, unique over workflow types.
        covered, whole: int64 [W], 1 if the workflow is covered, and if its end is known.
        correct, positions: int64 [W], steps forecast right, and judged.
        doubts: by workflow type, why its profile is not confident; empty if it is.
    """

    artefact: ArtefactEvidence
    workflows: tuple[str, ...]
    covered: NDArray[np.int64]
    whole: NDArray[np.int64]
    correct: NDArray[np.int64]
    positions: NDArray[np.int64]
    doubts: Mapping[str, tuple[str, ...]]


def judge_profile(
    candidate: ProfileEvidence, champion: ProfileEvidence | None, budget: ProfileBudget, *, seed: int
) -> list[Gate]:
    """Judge a candidate against the budget and the current champion, if there is one.

    A profile of which no workflow type is confident is refused: it would be asked and never answer.
    """
    gates = [evidence_gate(int(candidate.whole.sum()), budget.evidence, "whole workflow")]
    sure = [name for name, doubts in candidate.doubts.items() if not doubts]
    why = "; ".join(f"{name}: {' and '.join(doubts)}" for name, doubts in candidate.doubts.items() if doubts)
    reason = f"{len(sure)} of {counted(len(candidate.doubts), 'workflow type')} with a confident profile"
    gates.append(at_least("confident", len(sure), 1, f"{reason}{f' ({why})' if why else ''}"))
    if candidate.whole.any():
        share = candidate.covered.sum() / candidate.whole.sum()
        low, high = share_ci(candidate.covered, candidate.whole, np.random.default_rng(seed))
        reason = f"{share:.4f} of the whole workflows, 95 % interval [{low:.4f}, {high:.4f}]; wanted {budget.coverage}"
        gates.append(at_least("coverage", high, budget.coverage, reason))
    if champion is None:
        gates.append(schema_gate(None))
    else:
        gates.append(schema_gate(champion.artefact.interface.broken_by(candidate.artefact.interface)))
        _check_workflows(candidate.workflows, champion.workflows)
        for name, part, whole in (("coverage", "covered", "whole"), ("accuracy", "correct", "positions")):
            mine, its, total = getattr(candidate, part), getattr(champion, part), getattr(candidate, whole)
            if total.any():
                ends = ratio_ci(mine - its, total, np.random.default_rng(seed))
                compared = Compared(mine.sum() / total.sum(), its.sum() / total.sum(), ends)
                against = f"the champion's {compared.its:.4f}"
                gates.append(no_worse(f"{name}-champion", compared, against, higher_is_better=True))
    return gates + artefact_gates(candidate.artefact, budget, "µs for one further step")


@dataclass(frozen=True)
class RouterBudget(GateBudget):
    """The limits of a router; the defaults are those of `docs/router.md` for a linear router.

    Latency is of one prompt, milliseconds; `evidence` is prompts; `ece` is beyond what sampling explains.
    """

    latency: float = 20.0
    size_bytes: int = 100_000_000
    evidence: int = 100
    ece: float = 0.05


@dataclass(frozen=True)
class RouterComparison:
    """A candidate and a `rival` (in words, such as "the champion") on the same prompts and the models both know.

    The figures are average precision as a mean over models, accuracy of the picks, and mean squared error.
    """

    rival: str
    macro_map: Compared
    picked_accuracy: Compared
    brier: Compared


@dataclass(frozen=True)
class RouterEvidence:
    """The figures of one router on held-out outcomes.

    Attributes:
        artefact: with the latency of one prompt, milliseconds.
        prompts: number of prompts with a label.
        warnings: what makes these figures suspicious, by name.
        ece: expected calibration error, 0..1.
        floor: comparison with the base rates of the models, which always pick the best single one.
    """

    artefact: ArtefactEvidence
    labels: int
    prompts: int
    ece: float
    floor: RouterComparison
    warnings: Mapping[str, str] = field(default_factory=dict)


def judge_router(
    candidate: RouterEvidence, champion: tuple[Interface, RouterComparison] | None, budget: RouterBudget
) -> list[Gate]:
    """Judge a candidate against the base rates and, if there is a champion, compared with it."""
    gates = [evidence_gate(candidate.prompts, budget.evidence, "prompt")]
    if champion is not None:
        interface, comparison = champion
        gates.append(schema_gate(interface.broken_by(candidate.artefact.interface)))
        gates += _order_and_picks("", comparison)
    else:
        gates.append(schema_gate(None))
    gates += _order_and_picks("floor-", candidate.floor)
    sampling = sampling_ece(candidate.labels)
    gates.append(calibration_gate("calibration", candidate.ece, budget.ece, sampling, str(budget.ece)))
    gates += warning_gates(candidate.warnings)
    return gates + artefact_gates(candidate.artefact, budget, "ms for one prompt")


def _order_and_picks(prefix: str, beside: RouterComparison) -> Iterator[Gate]:
    for figure, compared, higher in (
        ("macro-map", beside.macro_map, True),
        ("picked-accuracy", beside.picked_accuracy, True),
        ("brier", beside.brier, False),
    ):
        name = f"{prefix}{figure}"
        if math.isnan(compared.ci95[higher]):
            yield plain(name, True, "no prompt has the labels to judge this by")
            continue
        against = f"{compared.its:.4f} of {beside.rival}, {'higher' if higher else 'lower'} is better"
        yield no_worse(name, compared, against, higher_is_better=higher)


@dataclass(frozen=True)
class Replayed:
    """Figures of one contender by run; all contenders have the same runs.

    The share of prompt tokens found in the cache, 0 to 1; the mean completion of workflows and its 99th percentile,
    and that of delays of their starts and of times to the first token of later steps, seconds; and the policies that
    failed and were switched off.
    """

    hit_rate: tuple[float, ...]
    completion_s: tuple[float, ...]
    completion_p99_s: tuple[float, ...]
    start_delay_p99_s: tuple[float, ...]
    later_first_token_p99_s: tuple[float, ...]
    switched_off: tuple[str, ...] = ()


def judge_replay(candidate: Replayed, champion: Replayed | None, stock: Replayed) -> tuple[Gate, ...]:
    """The gates of a replay with forecasts of a candidate, of the champion (if there is one), and of vLLM alone.

    Each refuses an equally good version in at most 2.5 % of cases. Raises ValueError for different runs, or too few.
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
        for gate, said, mine, its in (
            ("completion", "mean completion", candidate.completion_s, rival.completion_s),
            ("completion-p99", "p99 of completion", candidate.completion_p99_s, rival.completion_p99_s),
            ("start-p99", "p99 of start delays", candidate.start_delay_p99_s, rival.start_delay_p99_s),
            (
                *("later-first-token-p99", "p99 of first tokens of later steps"),
                *(candidate.later_first_token_p99_s, rival.later_first_token_p99_s),
            ),
        ):
            mean, low, high = _mean_difference(mine, its)
            reason = f"{said} {mean:+.3f} s beside {whom}, 95 % interval {low:+.3f} to {high:+.3f} s"
            gates.append(at_most(f"replay-{gate}-{name}", low, 0.0, reason))
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
