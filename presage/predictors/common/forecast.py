"""Forecast of the next steps of one workflow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from presage.features.moment import Moment

Source = Literal["champion", "back-off", "none"]


@dataclass(frozen=True)
class Forecast:
    """The next K steps of a workflow.

    Attributes:
        source: `champion`: the whole model; `back-off`: too little training data of this agent in this workflow type,
            so forecast without the network, or of this type, so by the n-gram alone; `none`: no forecast.
        evidence: training steps of this agent in this workflow type.
        moment: of the last step.
        agents: for each horizon, the probability of each known agent to be called, given that the workflow has not
            ended before.
        end: for each horizon, the probability that the workflow ends there, likewise.
    """

    source: Source
    evidence: int
    moment: Moment
    agents: Sequence[dict[str, float]]
    end: Sequence[float]

    def to_dict(self) -> dict[str, Any]:
        """As `presage forecast --json` prints it."""
        return {
            "source": self.source,
            "evidence": self.evidence,
            "moment": self.moment,
            "horizons": [{"agents": a, "end": e} for a, e in zip(self.agents, self.end, strict=True)],
        }
