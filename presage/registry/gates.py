"""Gates: what a version of a predictor has to pass before it takes an alias, and the verdict they come to.

A gate is one row of evidence, judged: a figure, what it is held against, and why it passed or not. `evidence.py` makes
the rows of each kind of predictor; whether a row passes is decided here. Every gate is always judged, so that a refusal
names everything that is wrong at once. Nothing here knows of MLflow, of traces or of how the figures came about.

Why not `mlflow.models.MetricThreshold`: it asks for a minimal *improvement* over a baseline by a fixed amount, and
"not worse than the champion beyond a paired interval over workflows" has no spelling in it; using it for the plain
budgets alone would put two vocabularies into one verdict, and load MLflow to compare two numbers.

Baselines are not part of an artefact, so a training compares them once, on its held-out tasks. The result travels with
the version as a tag for each target (`floor_tags`), and is a gate there (`floor_gates`): a version that lost to a
baseline beyond the interval is not promoted.
"""

import json
import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Final

from presage.features.input_profiles import TARGETS

AT_LEAST: Final = 30
"""Test workflows (or prompts) below which a lost comparison refuses nothing: intervals of fewer are too narrow, and of
dozens of comparisons one is lost by chance."""

TAG: Final = "presage.baselines."
"""Followed by a target: the tag with the trained baselines and the comparisons lost under the target's profile."""

NEGLIGIBLE: Final = 0.01
"""A baseline that is better by at most this share of its own figure is no reason to refuse, however sure it is."""


@dataclass(frozen=True)
class Gate:
    """One question and its answer.

    Attributes:
        name: for example `"accuracy-prefill-1"`.
        passed: whether this gate lets the version pass.
        value: the figure judged; None where it is no number, or nothing could be measured.
        limit: what the figure was held against; None where there is no number.
        reason: one sentence for people.
    """

    name: str
    passed: bool
    value: float | None
    limit: float | None
    reason: str

    def to_dict(self) -> dict[str, Any]:
        """The gate as JSON values."""
        return {
            "name": self.name,
            "passed": self.passed,
            "value": _json_number(self.value),
            "limit": _json_number(self.limit),
            "reason": self.reason,
        }


@dataclass(frozen=True)
class Verdict:
    """All gates of one version; it may be promoted when every one let it pass."""

    name: str
    version: int
    gates: tuple[Gate, ...]

    @property
    def promoted(self) -> bool:
        """True when all gates passed."""
        return all(gate.passed for gate in self.gates)

    @property
    def refusals(self) -> tuple[Gate, ...]:
        """The gates that did not let the version pass."""
        return tuple(gate for gate in self.gates if not gate.passed)

    def to_dict(self) -> dict[str, Any]:
        """`{"name", "version", "promoted", "gates": [{"name", "passed", "value", "limit", "reason"}, …]}`."""
        return {
            "name": self.name,
            "version": self.version,
            "promoted": self.promoted,
            "gates": [gate.to_dict() for gate in self.gates],
        }


@dataclass(frozen=True)
class Compared:
    """One figure of a candidate beside a rival's, NaN where nothing was judged.

    Attributes:
        mine, its: the candidate's and the rival's.
        ci95: of candidate − rival, paired.
    """

    mine: float
    its: float
    ci95: tuple[float, float]


def at_most(name: str, value: float, limit: float, reason: str) -> Gate:
    """Passes up to a limit; NaN never passes."""
    return Gate(name, bool(value <= limit), float(value), float(limit), reason)


def at_least(name: str, value: float, limit: float, reason: str) -> Gate:
    """Passes from a limit up; NaN never passes."""
    return Gate(name, bool(value >= limit), float(value), float(limit), reason)


def plain(name: str, passed: bool, reason: str) -> Gate:
    """Has no number to judge."""
    return Gate(name, passed, None, None, reason)


def no_worse(name: str, of: Compared, against: str, *, higher_is_better: bool, digits: int = 4) -> Gate:
    """Refuses where the whole interval of candidate − rival lies on the wrong side of zero.

    Args:
        name: of the gate.
        of: the figures.
        against: the rival and its figure, in words.
        higher_is_better: which side is the wrong one.
        digits: after the point, in the reason.
    """
    low, high = of.ci95
    reason = (
        f"{of.mine:.{digits}f} against {against}: difference {of.mine - of.its:+.{digits}f}, "
        f"95 % interval [{low:+.{digits}f}, {high:+.{digits}f}]"
    )
    return at_least(name, high, 0.0, reason) if higher_is_better else at_most(name, low, 0.0, reason)


def evidence_gate(found: int, wanted: int, what: str = "workflows") -> Gate:
    """Whether enough workflows, or prompts, stand behind the figures."""
    return at_least("evidence", found, wanted, f"{found} {what} stand behind the figures, at least {wanted} wanted")


def schema_gate(broken: Sequence[str] | None) -> Gate:
    """Whether the champion's promises are kept: those that are not, in words; None where there is no champion."""
    if broken is None:
        return plain("schema", True, "no champion whose promises must be kept")
    return plain("schema", not broken, "; ".join(broken) or "keeps the champion's promises")


def forgotten(mine: Set[str], its: Set[str], what: str = "workflow types") -> list[str]:
    """Says which names the champion knows and the candidate does not, if there are such."""
    if not (lost := sorted(its - mine)):
        return []
    return [f"does not know {len(lost)} of the champion's {what}: {', '.join(lost[:5])}"]


def artefact_gates(
    latency: float, most_latency: float, unit: str, size_bytes: int, most_bytes: int, pickles: Sequence[str]
) -> list[Gate]:
    """Latency and size against their limits, and that the artefact is data only.

    Args:
        latency, most_latency: in one unit.
        unit: that unit, and what takes so long.
        size_bytes, most_bytes: of the artefact.
        pickles: names of files that are or may hide a pickle.
    """
    data_only = f"may hide code: {', '.join(pickles[:3])}" if pickles else "data only: JSON and safetensors"
    return [
        at_most("latency", latency, most_latency, f"{latency:,.6g} {unit}, at most {most_latency:,.6g} wanted"),
        at_most(
            "size", size_bytes, most_bytes, f"{size_bytes:,.6g} bytes of artefact, at most {most_bytes:,.6g} wanted"
        ),
        at_most("pickle", len(pickles), 0, data_only),
    ]


def calibration_gate(name: str, ece: float, limit: float, sampling: float, wanted: str) -> Gate:
    """Expected calibration error against a limit, on top of what sampling alone explains.

    Args:
        name: of the gate.
        ece: expected calibration error.
        limit: without the share of sampling.
        sampling: `sampling_ece` of the positions judged.
        wanted: the limit in words.
    """
    reason = f"calibration error {ece:.4f}, wanted at most {wanted} + {sampling:.4f} that sampling explains"
    return at_most(name, ece, limit + sampling, reason)


def sampling_ece(positions: int, bins: int = 15) -> float:
    """An upper bound on the calibration error that sampling alone makes a perfectly calibrated forecaster show.

    A bin of n_b positions misses its mean by about sqrt(2/π · p(1−p)/n_b); with p = 1/2 and over equally filled bins
    the weighted sum is sqrt(2/π)/2 · sqrt(bins/positions), and any other p or filling gives less.

    Args:
        positions: positions judged.
        bins: bins of the reliability table.
    """
    return math.sqrt(2 / math.pi) / 2 * math.sqrt(bins / positions) if positions else math.inf


def floor_tags(metrics: Mapping[str, Any]) -> dict[str, str]:
    """The tags of a version, from the metrics of its training: of each baseline the comparison it won most clearly."""
    found = {}
    judged = metrics["workflows"] if "workflows" in metrics else metrics["prompts"]
    for target, profile in TARGETS.items():
        lost = metrics["profiles"][profile]["behind"] if "profiles" in metrics else metrics["behind"]
        worst = {one["baseline"]: one for one in sorted(lost, key=_share)}
        kept = {name: worst.get(name) for name in sorted(metrics["baselines"])}
        found[TAG + target] = json.dumps({"baselines": kept, "lost": len(lost), "judged": judged})
    return found


def lost_by_target(tags: Mapping[str, str]) -> dict[str, int]:
    """How many comparisons with baselines a version lost in training, by what it may be promoted to."""
    return {target: int(json.loads(tags[TAG + target])["lost"]) for target in TARGETS if TAG + target in tags}


def floor_gates(tags: Mapping[str, str], target: str) -> list[Gate]:
    """One gate for each baseline of the version's training, under the profile of the target."""
    if TAG + target not in tags:
        reason = "no baseline was kept with this version: it was trained by an earlier version of Presage"
        return [plain("baselines", True, reason)]
    kept = json.loads(tags[TAG + target])
    return [_floor_gate(f"floor-{name}", lost, kept["judged"]) for name, lost in kept["baselines"].items()]


def _floor_gate(name: str, lost: Mapping[str, Any] | None, judged: int) -> Gate:
    if lost is None:
        return plain(name, True, "not better beyond the interval in training")
    share, (low, high) = _share(lost), lost["ci95"]
    reason = (
        f"on the tasks held out in training it is better {lost['at']} by {lost['by']:.4g}, 95 % interval "
        f"[{low:.4g}, {high:.4g}], {share:.1%} of its own figure; at most {NEGLIGIBLE:.0%} is let pass"
    )
    if judged < AT_LEAST:
        reason += f"; it was judged on {judged}, and fewer than {AT_LEAST} are too few to refuse by"
        return Gate(name, passed=True, value=share, limit=None, reason=reason)
    return at_most(name, share, NEGLIGIBLE, reason)


def _share(one: Mapping[str, Any]) -> float:
    """How much better the baseline is, as a share of its own figure."""
    return float(one["by"]) / max(float(one["of"]), 1e-9)


def _json_number(value: float | None) -> float | None:
    """JSON has no NaN and no infinity."""
    return value if value is not None and math.isfinite(value) else None
