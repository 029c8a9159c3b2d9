"""Forecast of the next agents of one workflow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from presage.features.moment import Moment

if TYPE_CHECKING:
    import pandas as pd  # type: ignore[import-untyped]

Source = Literal["champion", "profile", "back-off", "none"]
"""Who made a forecast; `profile` only of next agents and remaining tokens in an engine or gateway, in place of their
models."""

RETENTION_TARGET: Final = 0.9
"""Default probability of a time to live: that the workflow does not return later."""


@dataclass(frozen=True)
class Forecast:
    """Forecast of the next K steps.

    Attributes:
        source: `champion`: the whole model; `back-off`: the agent is unknown or rare in this workflow type, or the type
            is; `none`: no forecast.
        evidence: training steps of this agent in this workflow type; in an unknown type, the least that it has in any.
        moment: of the last step.
        agents: for each horizon, the probability of each known agent, given that the workflow has not ended before.
        end: for each horizon, the probability that the workflow ends there, given that it has not ended before.
    """

    source: Source
    evidence: int
    moment: Moment
    agents: Sequence[dict[str, float]]
    end: Sequence[float]

    @property
    def prediction(self) -> str:
        """The likeliest next agent, or "END"."""
        likeliest = max(self.agents[0], key=lambda agent: self.agents[0][agent])
        return likeliest if self.agents[0][likeliest] >= self.end[0] else "END"

    def to_frame(self) -> pd.DataFrame:
        """A row a step ahead, a column an agent and END: probabilities, if the workflow has not ended before."""
        import pandas as pd

        rows = pd.RangeIndex(1, len(self.end) + 1, name="steps ahead")
        return pd.DataFrame(list(self.agents), index=rows).assign(END=list(self.end))

    def _repr_html_(self) -> str:
        html: str = self.to_frame().round(3).to_html()
        return html

    def to_dict(self) -> dict[str, Any]:
        """JSON values, as `presage forecast --json` prints them."""
        return {
            "source": self.source,
            "evidence": self.evidence,
            "moment": self.moment,
            "horizons": [{"agents": a, "end": e} for a, e in zip(self.agents, self.end, strict=True)],
        }
