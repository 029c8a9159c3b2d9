"""A forecast of the next steps of one workflow, as users and hooks read it."""

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
        source: `champion` when the whole model answered; `back-off` when it had seen too little of this agent in this
            workflow type: then the network is left out, and of a type hardly seen the n-gram answers alone; `none`
            when there is nothing to say.
        evidence: training steps of this agent in this workflow type.
        moment: of the last step.
        agents: for each horizon, every known agent's probability of being the one called, given that the workflow
            has not finished before.
        end: for each horizon, the probability that the workflow finishes there, likewise.
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
