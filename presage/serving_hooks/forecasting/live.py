"""What policies read of one workflow now, without a dictionary an agent, and the reasons why there is nothing to read.

A reason is one of a few fixed sentences, or the name of an exception: never anything of a request.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from presage.features.moment import Moment
from presage.predictors.common.forecast import Source

Projection = tuple[NDArray[np.float32], NDArray[np.float32]]
"""W float32 [d, p] and b [p]; a hidden state x becomes x @ W + b."""

NO_MODEL: Final = "no model"
NO_STEP: Final = "completion of a step that never began here, or has completed"
MISSED_STEP: Final = "an earlier step was missed"
SWITCHED_OFF: Final = "the predictor is switched off"
NOT_BACK: Final = "the predictor did not come back"
STATES_LEFT_OUT: Final = "states left out: the predictor learnt those of another served model"
LAYER_LEFT_OUT: Final = "states left out: the predictor learnt those of another layer"
LITTLE_SEEN: Final = "too little seen"
DRIFTED: Final = "the workflow type has changed"
NOT_AWAITED: Final = "a state of a step that is not the one that began last, or had its state"


@dataclass(frozen=True, slots=True)
class LiveLengths:
    """Output tokens that a workflow still has to produce, this step's included.

    Attributes:
        source: as `Forecast.source`; with "none" there are no quantiles.
        evidence: steps of this agent in this workflow type it was learnt from.
        quantiles: Q numbers, rising.
        tokens: Q numbers, tokens at each quantile, not falling.
        ranks: place of the quantile that ranks workflows.
        version: of the model; None where counts answer.
        reason: why the model did not answer.
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
        """What the shortest total job first goes by, tokens; None where nothing is known."""
        return self.tokens[self.ranks] if self.tokens else None

    def after(self, output_tokens: float) -> LiveLengths:
        """What is left once the step has produced so many tokens, from what was said before it did.

        No new forecast: tokens produced are taken from every quantile, down to 0.
        """
        if not self.tokens:
            return self
        left = tuple(max(0.0, tokens - output_tokens) for tokens in self.tokens)
        return LiveLengths(self.source, self.evidence, self.quantiles, left, self.ranks, self.version, self.reason)


@lru_cache(maxsize=256)  # reasons are few, and every forecast has one of these
def no_lengths(reason: str, version: int | None = None) -> LiveLengths:
    """Nothing is known of what is left."""
    return LiveLengths("none", 0, (), (), 0, version, reason)


NO_LENGTHS: Final = no_lengths(NO_MODEL)


@dataclass(frozen=True, slots=True)
class LiveForecast:
    """What a policy reads, without a dictionary an agent.

    Attributes:
        source: as `Forecast.source`; with "none" there are no probabilities.
        evidence: training steps of this agent in this workflow type; where counts answer, steps counted.
        moment: of the step it was made at.
        probabilities: float32 [K, V+1], END last; [0, 0] with source "none".
        agents: names of the first V columns.
        version: of the model; None where counts answer.
        reason: why the model did not answer, or what it had to do without.
        remaining: output tokens left.
    """

    source: Source
    evidence: int
    moment: Moment
    probabilities: NDArray[np.float32]
    agents: tuple[str, ...]
    version: int | None
    reason: str | None = None
    remaining: LiveLengths = NO_LENGTHS

    @property
    def end(self) -> NDArray[np.float32]:
        """Probability of END at each horizon, float32 [K]."""
        return self.probabilities[:, -1]


class NotAForecast(Exception):  # noqa: N818  its name is the reason that is told
    """A predictor answered with something else than a forecast: NaN, another shape, what sums to no distribution."""


NOTHING: Final = np.empty((0, 0), np.float32)
"""The probabilities of source "none"."""
