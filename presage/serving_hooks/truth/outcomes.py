"""What came of forecasts: of one, and of all that were made in one workflow.

A workflow's own sums are what everything later is made of: events inside one workflow depend on each other, so it is
workflows that are counted, weighed and drawn.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from math import log
from typing import Final

import numpy as np
from numpy.typing import NDArray

from presage.features.moment import MOMENTS, Moment
from presage.predictors.forecast import Source
from presage.predictors.probabilities import BINS
from presage.serving_hooks.forecasting.live import LAYER_LEFT_OUT, STATES_LEFT_OUT, LiveForecast

COUNTS: Final = "counts"
"""What answered where no predictor did (`online_counts.py`)."""

END: Final = ""
"""Stands for the end of a workflow among agents, who all have names; as one that comes before, for its start."""

_BINS: Final = np.float32(BINS)
_PLACE: Final = {moment: place for place, moment in enumerate(MOMENTS)}

LEAST_PROBABILITY: Final = 1e-12
"""A forecast that ruled out what came costs 27.6 nats, not infinity."""


def model_of(source: Source, version: int | None, reason: str | None) -> str:
    """Who made a forecast: "version 3", "no version" for a predictor from a folder, or `COUNTS`.

    Counts answer with a reason why the predictor did not; a predictor's own back-off has none, or one of its states.
    """
    if version is not None:
        return f"version {version}"
    return COUNTS if source == "back-off" and reason not in (None, STATES_LEFT_OUT, LAYER_LEFT_OUT) else "no version"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one forecast said of one step ahead, and what came.

    Attributes:
        workflow_type: of the workflow.
        model: who made it, as `model_of`.
        moment: at which it was made.
        horizon: k, 1..K steps ahead.
        right: whether the likeliest outcome came true; a tie counts the first.
        confidence: probability of the likeliest outcome.
        given: probability given to what came; 0 where it has no column.
        known: whether what came has a column; an agent that the forecast has no name for is always wrong.
    """

    workflow_type: str
    model: str
    moment: Moment
    horizon: int
    right: bool
    confidence: float
    given: float
    known: bool


@dataclass(frozen=True, slots=True)
class LengthOutcome:
    """What was said of the tokens left when a step began, and how many came.

    Attributes:
        workflow_type: of the workflow.
        model: who said it, as `model_of`.
        tokens: output tokens that were left, this step's included.
        quantiles: Q numbers, rising.
        within: whether at most as many came as each quantile said, Q of them.
    """

    workflow_type: str
    model: str
    tokens: float
    quantiles: tuple[float, ...]
    within: tuple[bool, ...]


class Tally:
    """Sums over the forecasts of one model in one workflow.

    Args:
        horizon: K.
    """

    __slots__ = ("_flat", "_horizon", "_planes")

    def __init__(self, horizon: int) -> None:
        self._horizon, self._planes = horizon, len(MOMENTS) * horizon * BINS
        # Not an array of NumPy's: five single numbers a forecast are added here, which that is slow at.
        self._flat = array("f", bytes(4 * 5 * self._planes))

    @property
    def sums(self) -> NDArray[np.float32]:
        """Float32 [5, 2, K, BINS]: by moment, horizon and bin of confidence, positions judged, their confidence, those
        right, nats of surprise, and positions where what came has a column, which are those of the surprise.
        """
        return np.frombuffer(self._flat, np.float32).reshape(5, len(MOMENTS), self._horizon, BINS)

    def add(self, outcome: Outcome) -> None:
        """One more."""
        place = min(int(np.float32(outcome.confidence) * _BINS), BINS - 1)
        at = (_PLACE[outcome.moment] * self._horizon + outcome.horizon - 1) * BINS + place
        flat, plane = self._flat, self._planes
        flat[at] += 1.0
        flat[at + plane] += outcome.confidence
        if outcome.right:
            flat[at + 2 * plane] += 1.0
        if outcome.known:
            flat[at + 3 * plane] -= log(max(outcome.given, LEAST_PROBABILITY))
            flat[at + 4 * plane] += 1.0


@dataclass(slots=True)
class LengthTally:
    """The same of the tokens left.

    Attributes:
        quantiles: Q numbers.
        judged: steps whose tokens left are known.
        within: of those, how many kept within each quantile, int64 [Q].
    """

    quantiles: tuple[float, ...]
    judged: int
    within: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Followed:
    """A workflow that is followed no further.

    Attributes:
        workflow_type: of it.
        ended: whether it said that it has ended; else it was cut, expired, or dropped to make room.
        transitions: how often one agent came right after another, (before, after); `END` as the first is the start.
        next_agent: sums by model, as `model_of` has it; the one that forecast last stands last.
        lengths: likewise.
    """

    workflow_type: str
    ended: bool
    transitions: Mapping[tuple[str, str], int]
    next_agent: Mapping[str, Tally]
    lengths: Mapping[str, LengthTally]


def judge(workflow_type: str, model: str, forecast: LiveForecast, horizon: int, came: str) -> Outcome:
    """Holds row `horizon` of a forecast, from 1, against the agent that came, or `END`."""
    row = forecast.probabilities[horizon - 1]
    top = int(row.argmax())
    column = -1
    if came == END:
        column = len(row) - 1
    elif came in forecast.agents:
        column = forecast.agents.index(came)
    given = float(row[column]) if column >= 0 else 0.0
    return Outcome(workflow_type, model, forecast.moment, horizon, top == column, float(row[top]), given, column >= 0)
