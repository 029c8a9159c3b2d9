"""What the alarm says: which workflow type has changed, by which figures, and whose forecasts that speaks against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

from presage.serving_hooks.truth.detector import Side
from presage.serving_hooks.truth.promoted import ACCURACY, COVERAGE, Figure

Kind = Literal["next-agent", "remaining-length"]

RECENT: Final = 50
"""Workflows that an alarm tells the mean of."""
REASONS: Final = 8
"""Told at most."""


@dataclass(frozen=True)
class Reason:
    """A figure that left its promoted interval.

    Attributes:
        figure: its name, as `figures_of` has it.
        side: to which it left.
        live: its mean over the last `RECENT` workflows.
        promoted: what it was.
    """

    figure: str
    side: Side
    live: float
    promoted: Figure

    @property
    def text(self) -> str:
        """For people."""
        was = self.promoted
        return f"{self.figure}: {self.live:.3f}, promoted with {was.mean:.3f} [{was.low:.3f}, {was.high:.3f}]"

    def is_over(self, mean: float) -> bool:
        """Whether a mean lies on the right side of the limit again."""
        return mean <= self.promoted.high if self.side == "above" else mean >= self.promoted.low

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        was = self.promoted
        return {
            "figure": self.figure,
            "side": self.side,
            "live": self.live,
            "promoted": was.mean,
            "ci95": [was.low, was.high],
        }


@dataclass(frozen=True)
class Alarm:
    """A workflow type has changed.

    Attributes:
        workflow_type: which.
        workflows: watched until it was raised, from the last reset or recovery.
        reasons: the strongest first.
    """

    workflow_type: str
    workflows: int
    reasons: tuple[Reason, ...]

    @property
    def text(self) -> str:
        """For people; the name of the type is quoted, since clients choose it."""
        why = "; ".join(reason.text for reason in self.reasons)
        return f"workflow type {self.workflow_type!r} has changed, noticed after {self.workflows} workflows: {why}"

    def speaks_of(self, kind: Kind) -> bool:
        """Whether forecasts of this kind are to be doubted: lengths by their coverage, agents by their accuracy, both
        where agents or the call graph are others.
        """
        other = COVERAGE if kind == "next-agent" else ACCURACY
        return any(not reason.figure.startswith(other) for reason in self.reasons)

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {"workflows": self.workflows, "reasons": [reason.to_dict() for reason in self.reasons]}


@dataclass(frozen=True)
class Recovered:
    """An alarm has ended by itself."""

    workflow_type: str
    workflows: int
