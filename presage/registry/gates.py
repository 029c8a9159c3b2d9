"""Gates: the checks a version must pass before it gets an alias.

A gate compares one figure with a limit and explains the result; `evidence.py` makes the gates of each kind. All gates
are always judged, so a refusal lists everything that is wrong. `mlflow.models.MetricThreshold` cannot express "not
worse than the champion beyond a paired interval", and would load MLflow to compare two numbers.

Baselines are not part of an artefact. Training compares them once, on held-out tasks; the metrics in the version's run
carry the result, and `floor_gates` refuses a version that lost to a baseline beyond the interval.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from presage.features.input_profiles import TARGETS
from presage.wording import counted

if TYPE_CHECKING:
    import pandas as pd  # type: ignore[import-untyped]

AT_LEAST: Final = 30
"""With fewer test workflows (or prompts) a lost comparison is no reason to refuse: the intervals are too narrow, and of
dozens of comparisons one is lost by chance."""

LOST: Final = "presage.lost."
"""Prefix of a run's tags: LOST + target counts the comparisons with trained baselines lost under its profile."""

NEGLIGIBLE: Final = 0.01
"""A rival that is better by at most this share of its own figure is no reason to refuse, even if significant: trainings
that differ by their seed alone differ by as much, and an interval over workflows does not cover that."""


@dataclass(frozen=True)
class Gate:
    """One check, such as `accuracy-prefill-1`, and its result. `value` and `limit` are None if there is no number.

    A gate that passes with a `warning` refuses nothing: its reason is for people to judge.
    """

    name: str
    passed: bool
    value: float | None
    limit: float | None
    reason: str
    warning: bool = False

    @property
    def result(self) -> str:
        """In short, such as `passed 0.41 <= 0.45`."""
        outcome = ("warning" if self.warning else "passed") if self.passed else "refused"
        if self.value is None or self.limit is None:
            return outcome if self.value is None else f"{outcome} {self.value:.4g}"
        below = self.value <= self.limit
        relation = ("<=" if below else ">=") if self.passed else ("<" if below else ">")
        return f"{outcome} {self.value:.4g} {relation} {self.limit:.4g}"

    def to_dict(self) -> dict[str, Any]:
        """The gate as JSON values."""
        return {**vars(self), "value": _json_number(self.value), "limit": _json_number(self.limit)}


@dataclass(frozen=True)
class Verdict:
    """All gates of one version."""

    name: str
    version: int
    gates: tuple[Gate, ...]

    @property
    def promoted(self) -> bool:
        """Whether all gates passed."""
        return all(gate.passed for gate in self.gates)

    @property
    def refusals(self) -> tuple[Gate, ...]:
        """The gates that failed."""
        return tuple(gate for gate in self.gates if not gate.passed)

    @property
    def warnings(self) -> tuple[Gate, ...]:
        """The gates that passed with a warning."""
        return tuple(gate for gate in self.gates if gate.passed and gate.warning)

    def to_dict(self) -> dict[str, Any]:
        """`{"name", "version", "promoted", "gates": [the fields of each, …]}`."""
        return {
            "name": self.name,
            "version": self.version,
            "promoted": self.promoted,
            "gates": [gate.to_dict() for gate in self.gates],
        }

    def to_frame(self) -> "pd.DataFrame":
        """A row a gate, in the order of evaluation: passed, value, limit and reason."""
        import pandas as pd

        return pd.DataFrame([gate.to_dict() for gate in self.gates]).set_index("name")

    def _repr_html_(self) -> str:
        head = f"{self.name} version {self.version}: {'every gate passed' if self.promoted else 'refused'}"
        return f"<p>{head}</p>{self.to_frame().to_html(float_format='{:.4g}'.format)}"


@dataclass(frozen=True)
class Compared:
    """Figures of a candidate and of a rival, and the paired interval of the difference; NaN if nothing was judged."""

    mine: float
    its: float
    ci95: tuple[float, float]


def at_most(name: str, value: float, limit: float, reason: str) -> Gate:
    """Passes if value ≤ limit; NaN fails."""
    return Gate(name, bool(value <= limit), float(value), float(limit), reason)


def at_least(name: str, value: float, limit: float, reason: str) -> Gate:
    """Passes if value ≥ limit; NaN fails."""
    return Gate(name, bool(value >= limit), float(value), float(limit), reason)


def plain(name: str, passed: bool, reason: str) -> Gate:
    """A gate without a number."""
    return Gate(name, passed, None, None, reason)


def warning_gates(warnings: Mapping[str, str]) -> list[Gate]:
    """A gate for each warning, by name."""
    return [Gate(name, True, None, None, reason, warning=True) for name, reason in warnings.items()]


def no_worse(
    name: str, of: Compared, against: str, *, higher_is_better: bool, digits: int = 4, allowed: float | None = None
) -> Gate:
    """Fails if the whole interval of candidate − rival is worse than `allowed` (None: `NEGLIGIBLE` of the rival's
    figure).

    The reason names the rival and its figure (`against`) and has `digits` decimals.
    """
    low, high = of.ci95
    allowed = NEGLIGIBLE * abs(of.its) if allowed is None else allowed
    reason = (
        f"{of.mine:.{digits}f} against {against}: difference {of.mine - of.its:+.{digits}f}, "
        f"95 % interval [{low:+.{digits}f}, {high:+.{digits}f}]; {allowed:.{digits}f} worse passes"
    )
    return at_least(name, high, -allowed, reason) if higher_is_better else at_most(name, low, allowed, reason)


def evidence_gate(found: int, wanted: int, what: str = "workflow") -> Gate:
    """Whether the figures rest on enough workflows (or prompts)."""
    return at_least("evidence", found, wanted, f"{counted(found, what)} behind the figures, at least {wanted} wanted")


@dataclass(frozen=True)
class Interface:
    """What the successor of a champion must keep: the settings `fixed`, and the names (of `what`) that are `known`.

    Workflow types have a gate of their own (`types_gate`).
    """

    fixed: Mapping[str, object]
    known: frozenset[str] = frozenset()
    what: str = ""

    def broken_by(self, candidate: "Interface") -> list[str]:
        """The differences that make a candidate incompatible, one sentence each."""
        broken = [
            f"{name} {candidate.fixed[name]}, the champion's is {value}"
            for name, value in self.fixed.items()
            if candidate.fixed[name] != value
        ]
        if lost := sorted(self.known - candidate.known):
            broken.append(f"does not know {len(lost)} of the champion's {self.what}: {', '.join(lost[:5])}")
        return broken


def schema_gate(broken: Sequence[str] | None) -> Gate:
    """Whether the candidate is compatible: `broken` lists the differences; None: there is no champion."""
    if broken is None:
        return plain("schema", True, "no champion to be compatible with")
    return plain("schema", not broken, "; ".join(broken) or "compatible with the champion")


def types_gate(
    candidate: Collection[str], champion: Collection[str], judged: Collection[str], wanted: Collection[str] | None
) -> Gate:
    """Whether no workflow type is lost unintentionally.

    Args:
        candidate, champion: the workflow types that each knows; the champion's are empty if there is none.
        judged: those of the held-out workflows.
        wanted: those that the user named as the ones to serve; None: all of the champion's.

    The gate fails if the candidate does not know a wanted type. It warns of types that the champion knows and the
    candidate does not, and of types that the candidate knows and no held-out workflow has.
    """
    known_types, name = set(candidate), "workflow-types"
    if missing := sorted((set(champion) if wanted is None else set(wanted)) - known_types):
        whose = "that the champion knows" if wanted is None else "that --types names"
        remaining = ",".join(sorted(set(champion) & known_types)) or "TYPE,…"
        remedy = (
            "train it on traces that have them too (older ones will do), or give them up: with "
            f"--types {remaining} it is judged on these alone, and engines forecast the others by online counts"
            if wanted is None
            else "name types that it was trained on"
        )
        return plain(name, False, f"does not know {_types(missing)} {whose}: {remedy}")
    said = []
    if lost := sorted(set(champion) - known_types):
        said.append(f"gives up {_types(lost)} that the champion knows: engines will forecast these by online counts")
    if unjudged := sorted(known_types - set(judged)):
        said.append(f"not judged on {_types(unjudged)} that it knows, for there are no such held-out workflows")
    if wanted is not None:
        said.insert(0, f"judged on {', '.join(sorted(wanted))} alone, as --types asks")
    reason = "; ".join(said) or f"judged on each of {counted(len(known_types), 'workflow type')} that it knows"
    return Gate(name, True, None, None, reason, warning=bool(lost or unjudged))


def _types(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return f"{counted(len(names), 'workflow type')} ({', '.join(names[:_MOST_NAMED])}{more})"


_MOST_NAMED: Final = 8


@dataclass(frozen=True)
class ArtefactEvidence:
    """What the gates of every kind judge.

    Attributes:
        latency: median of one warm forecast, in the unit of the kind's budget.
        size_bytes: the artefact's own files; pickles: files that are or may hide a pickle.
        interface: what a successor must keep.
    """

    latency: float
    size_bytes: int
    interface: Interface
    pickles: tuple[str, ...] = ()


@dataclass(frozen=True)
class GateBudget:
    """The limits of every kind: of the latency of one warm forecast, of the bytes of the artefact's own files, and the
    fewest workflows (of a router: prompts) behind the figures.
    """

    latency: float
    size_bytes: int
    evidence: int


def artefact_gates(of: ArtefactEvidence, budget: GateBudget, unit: str) -> list[Gate]:
    """Latency and size within their limits, and no pickle; `unit` is that of the latency, and what it measures."""
    data_only = f"may hide code: {', '.join(of.pickles[:3])}" if of.pickles else "data only: JSON and safetensors"
    latency, size = f"{of.latency:,.6g} {unit}", f"{of.size_bytes:,.6g} bytes of artefact"
    return [
        at_most("latency", of.latency, budget.latency, f"{latency}, at most {budget.latency:,.6g} wanted"),
        at_most("size", of.size_bytes, budget.size_bytes, f"{size}, at most {budget.size_bytes:,.6g} wanted"),
        at_most("pickle", len(of.pickles), 0, data_only),
    ]


def calibration_gate(name: str, ece: float, limit: float, sampling: float, wanted: str) -> Gate:
    """Expected calibration error against a limit (`wanted` in words) plus the `sampling_ece` of the positions."""
    reason = f"calibration error {ece:.4f}, wanted at most {wanted} + {sampling:.4f} that sampling explains"
    return at_most(name, ece, limit + sampling, reason)


def sampling_ece(positions: int, bins: int = 15) -> float:
    """Upper bound on the calibration error that a perfectly calibrated forecaster shows by sampling alone.

    A bin of n_b positions misses its mean by about sqrt(2/π · p(1−p)/n_b); with p = 1/2 and over equally filled bins
    the weighted sum is sqrt(2/π)/2 · sqrt(bins/positions), and any other p or filling gives less.
    """
    return math.sqrt(2 / math.pi) / 2 * math.sqrt(bins / positions) if positions else math.inf


def lost_tags(metrics: Mapping[str, Any]) -> dict[str, str]:
    """Tags of a training's run, from its metrics: the number of comparisons with baselines lost, by target; under
    `full` alone if it has no input profiles (a router).
    """
    targets = TARGETS if "profiles" in metrics else ("full",)
    return {LOST + target: str(len(_lost(metrics, target))) for target in targets}


def lost_by_target(tags: Mapping[str, str]) -> dict[str, int]:
    """Number of comparisons with baselines that a version lost in training, by target."""
    return {target: int(tags[LOST + target]) for target in TARGETS if LOST + target in tags}


def floor_gates(metrics: Mapping[str, Any], target: str) -> list[Gate]:
    """One gate for each baseline of the training with these metrics, under the profile of the target."""
    if "baselines" not in metrics:
        reason = "no baseline was kept with this version: its run holds no figures of any"
        return [plain("baselines", True, reason)]
    if not metrics["baselines"]:
        reason = "it was trained without baselines, so nothing shows that it beats any: train it again with --baselines"
        return [plain("baselines", False, reason)]
    worst = {comparison["baseline"]: comparison for comparison in sorted(_lost(metrics, target), key=_share)}
    judged = metrics["workflows"] if "workflows" in metrics else metrics["prompts"]
    return [_floor_gate(f"floor-{name}", worst.get(name), judged) for name in sorted(metrics["baselines"])]


def forgetting_gates(metrics: Mapping[str, Any]) -> list[Gate]:
    """Warnings about a version that was trained further from an older one: by more than `NEGLIGIBLE` and beyond the
    interval it is worse than that one on older traces, or nobody has measured it."""
    started = metrics.get("started_from")
    if not started:
        return []
    old = started.get("old_test")
    if old is None:
        reason = (
            f"it was trained further from {started['model']}, and what it has forgotten of older traces was not "
            "measured: train it again with --old-test, or judge it on newer and older traces"
        )
        return warning_gates({"forgotten": reason})
    reasons = {}
    for moment, gap in old["forgotten"].items():
        mine = old["moments"][moment]["accuracy"]
        for k, (lost, ends) in enumerate(zip(gap["difference"], gap["ci95"], strict=True)):
            if lost is not None and ends[0] > NEGLIGIBLE * (mine[k] + lost):
                reasons[f"forgotten-{moment}-{k + 1}"] = (
                    f"on {counted(old['workflows'], 'workflow')} of older traces it has {mine[k]:.4f}, and "
                    f"{started['model']}, from which it was trained further, {mine[k] + lost:.4f}: {lost:.4f} less, "
                    f"95 % interval [{ends[0]:.4f}, {ends[1]:.4f}]"
                )
    return warning_gates(reasons)


def _lost(metrics: Mapping[str, Any], target: str) -> list[dict[str, Any]]:
    """The comparisons with baselines that a version lost in training, under the profile of the target."""
    figures = metrics["profiles"][TARGETS[target]] if "profiles" in metrics else metrics
    lost: list[dict[str, Any]] = figures.get("behind", [])
    return lost


def _floor_gate(name: str, lost: Mapping[str, Any] | None, judged: int) -> Gate:
    if lost is None:
        return plain(name, True, "not better beyond the interval in training")
    share, (low, high) = _share(lost), lost["ci95"]
    reason = (
        f"on the tasks held out in training it is better {lost['at']} by {lost['by']:.4g}, 95 % interval "
        f"[{low:.4g}, {high:.4g}], {share:.1%} of its own figure; at most {NEGLIGIBLE:.0%} passes"
    )
    if judged < AT_LEAST:
        reason += f"; it was judged on {judged}, and fewer than {AT_LEAST} are too few to refuse by"
        return Gate(name, passed=True, value=share, limit=None, reason=reason)
    return at_most(name, share, NEGLIGIBLE, reason)


def _share(comparison: Mapping[str, Any]) -> float:
    """The baseline's lead as a share of its own figure."""
    return float(comparison["by"]) / max(float(comparison["of"]), 1e-9)


def _json_number(value: float | None) -> float | None:
    """JSON has no NaN and no infinity."""
    return value if value is not None and math.isfinite(value) else None
