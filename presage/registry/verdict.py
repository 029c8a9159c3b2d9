"""What judging a version comes to, whatever its kind: gates, a verdict, and the gates that all kinds share."""

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any


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


def evidence_gate(found: int, wanted: int, what: str = "workflows") -> Gate:
    """Whether enough workflows, or prompts, stand behind the figures."""
    reason = f"{found} {what} stand behind the figures, at least {wanted} wanted"
    return Gate("evidence", found >= wanted, float(found), float(wanted), reason)


def schema_gate(broken: Sequence[str] | None) -> Gate:
    """Whether the champion's promises are kept: those that are not, in words; None where there is no champion."""
    if broken is None:
        return Gate("schema", passed=True, value=None, limit=None, reason="no champion whose promises must be kept")
    return Gate("schema", not broken, None, None, "; ".join(broken) or "keeps the champion's promises")


def forgotten_types(mine: Set[str], its: Set[str]) -> list[str]:
    """Says which workflow types the champion knows and the candidate does not, if there are such."""
    if not (forgotten := sorted(its - mine)):
        return []
    return [f"does not know {len(forgotten)} of the champion's workflow types: {', '.join(forgotten[:5])}"]


def budget_gate(name: str, value: float, limit: float, unit: str) -> Gate:
    """Whether a figure is at most its limit."""
    return Gate(name, value <= limit, float(value), float(limit), f"{value:,.6g} {unit}, at most {limit:,.6g} wanted")


def pickle_gate(names: Sequence[str]) -> Gate:
    """Whether the artefact is data only: names of files that are or may hide a pickle."""
    reason = f"may hide code: {', '.join(names[:3])}" if names else "data only: JSON and safetensors"
    return Gate("pickle", not names, float(len(names)), 0.0, reason)


def _json_number(value: float | None) -> float | None:
    """JSON has no NaN and no infinity."""
    return value if value is not None and math.isfinite(value) else None
