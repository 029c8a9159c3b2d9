"""Forecasts as policies read them, and the reasons why a model made none.

A reason is one of the fixed texts below or the name of an exception, never text of a request.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from presage.features.moment import Moment
from presage.predictors.common.forecast import Source

_LEAST_PROBABILITY: Final = 0.01
_MOST_AGENTS: Final = 8

Projection = tuple[NDArray[np.float32], NDArray[np.float32]]
"""W float32 [d, p] and b [p]; a hidden state x becomes x @ W + b."""

NO_MODEL: Final = "no model"
NO_STEP: Final = "completion of a step that never began here, or has completed"
MISSED_STEP: Final = "an earlier step was missed"
SWITCHED_OFF: Final = "the predictor is switched off"
BESIDE: Final = "another step of the workflow runs beside it"
NOT_BACK: Final = "the predictor did not come back"
STATES_LEFT_OUT: Final = "states left out: the predictor learnt those of another served model"
LAYER_LEFT_OUT: Final = "states left out: the predictor learnt those of another layer"
LITTLE_SEEN: Final = "too little seen"
DRIFTED: Final = "the workflow type has changed"
LESS_ACCURATE: Final = "less accurate here than online counts"
OTHER_VERSION: Final = "the profile is of another version of the application"
NOT_AWAITED: Final = "a state of a step that is not the one that began last, or had its state"

STEPS_KEPT: Final = 64
"""Steps of a workflow, from its first, whose remaining tokens are learnt."""
_NO_COUNT: Final = 2**63


def token_count(value: object) -> float | None:
    """Output tokens as a number; None if the value is no count."""
    return float(value) if isinstance(value, int | float | np.number) and 0 <= value < _NO_COUNT else None


@dataclass(frozen=True, slots=True)
class Counted:
    """A forecast of next agents from counts.

    Attributes:
        evidence: steps of the current agent whose next outcome was seen.
        probabilities: float32 [K, V+1] over `agents`, END last, row k given that the workflow gets that far.
    """

    evidence: int
    probabilities: NDArray[np.float32]
    agents: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LiveLengths:
    """Output tokens that a workflow still has to produce, this step's included; or those its context still grows by.

    Attributes:
        source: as `Forecast.source`; with "none" there are no quantiles.
        evidence: training steps of this agent in this workflow type.
        quantiles, tokens: Q numbers, rising, and tokens at each, not falling.
        ranks: index of the quantile that ranks workflows.
        version: None for counts.
        reason: why the model made no forecast.
    """

    source: Source
    evidence: int
    quantiles: tuple[float, ...]
    tokens: tuple[float, ...]
    ranks: int
    version: int | None
    reason: str | None = None

    @property
    def ranking(self) -> float | None:
        """The tokens that shortest-total-job-first ranks by; None if unknown."""
        return self.tokens[self.ranks] if self.tokens else None

    @property
    def mean(self) -> float | None:
        """The mean of the distribution that the quantiles describe, each for the levels nearest to it; None if unknown.

        For .1, .5 and .9 the weights are .3, .4 and .3: Swanson's rule.
        """
        if not self.tokens:
            return None
        ends = [0.0, *((low + high) / 2 for low, high in pairwise(self.quantiles)), 1.0]
        shares = (high - low for low, high in pairwise(ends))
        return sum(share * tokens for share, tokens in zip(shares, self.tokens, strict=True))

    def after(self, output_tokens: float) -> LiveLengths:
        """The forecast less the tokens that the step has produced: subtracted from every quantile, down to 0."""
        if not self.tokens:
            return self
        left = tuple(max(0.0, tokens - output_tokens) for tokens in self.tokens)
        return LiveLengths(self.source, self.evidence, self.quantiles, left, self.ranks, self.version, self.reason)


@lru_cache(maxsize=256)  # there are few reasons
def no_lengths(reason: str, version: int | None = None) -> LiveLengths:
    """Unknown remaining tokens."""
    return LiveLengths("none", 0, (), (), 0, version, reason)


NO_LENGTHS: Final = no_lengths(NO_MODEL)


@dataclass(frozen=True, slots=True)
class LiveReturn:
    """When the next request of a workflow arrives, counted from the completion of its latest step.

    Attributes:
        source: as `Forecast.source`; with "none" there are no quantiles.
        evidence: training steps of this agent in this workflow type; for counts, returns counted after it.
        end: probability that the workflow has ended.
        quantiles, seconds: Q rising numbers below 1, and the seconds at each, not falling, given that it returns.
        version: None for counts.
        reason: why the model made no forecast.
    """

    source: Source
    evidence: int
    end: float
    quantiles: tuple[float, ...]
    seconds: tuple[float, ...]
    version: int | None
    reason: str | None = None


@lru_cache(maxsize=256)
def no_return(reason: str, version: int | None = None) -> LiveReturn:
    """An unknown return time."""
    return LiveReturn("none", 0, 0.0, (), (), version, reason)


NO_RETURN: Final = no_return(NO_MODEL)


@dataclass(frozen=True, slots=True)
class LiveForecast:
    """A forecast as policies read it.

    Attributes:
        source: as `Forecast.source`; with "none" there are no probabilities.
        evidence: training steps of this agent in this workflow type; for counts, steps counted.
        probabilities: float32 [K, V+1], END last; [0, 0] with source "none".
        agents: names of the first V columns.
        version: None for counts.
        reason: why the model made no forecast, or which input it had to ignore.
        known_as: the agent as which the model read the last step, whose agent it does not know (`new_agents.py`).
    """

    source: Source
    evidence: int
    moment: Moment
    probabilities: NDArray[np.float32]
    agents: tuple[str, ...]
    version: int | None
    reason: str | None = None
    remaining: LiveLengths = NO_LENGTHS
    known_as: str | None = None

    @property
    def end(self) -> float | None:
        """Probability that there is no next step; None without a forecast."""
        return float(self.probabilities[0, -1]) if len(self.probabilities) else None

    def next_agents(self) -> tuple[tuple[str, float], ...]:
        """The likeliest agents of the next step and their probabilities, each at least 0.01; none without a forecast.

        At most eight, the likeliest first.
        """
        if not len(self.probabilities):
            return ()
        row = self.probabilities[0]
        likeliest = np.argsort(-row[:-1])[:_MOST_AGENTS]
        return tuple((self.agents[i], float(row[i])) for i in likeliest if row[i] >= _LEAST_PROBABILITY)


class NotAForecast(Exception):  # noqa: N818  its name is shown as the reason
    """A predictor returned no forecast: NaN, a wrong shape, or no distribution."""


NOTHING: Final = np.empty((0, 0), np.float32)
"""The probabilities of source "none"."""
