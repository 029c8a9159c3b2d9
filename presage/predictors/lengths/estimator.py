"""What every estimator of lengths offers, and what is common to those that learn on the logarithm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from presage.errors import TraceError
from presage.features.lengths import LengthRows


class LengthEstimator(Protocol):
    """Quantiles of how many tokens are left, from rows alone."""

    name: str

    def fit(self, train: LengthRows, calibration: LengthRows, quantiles: Sequence[float]) -> Self:
        """Learns from `train`; `calibration` (other tasks) makes its quantiles cover. Quantiles rise, in (0, 1)."""
        ...

    def predict(self, rows: LengthRows) -> NDArray[np.float32]:
        """Output tokens float32 [n, Q], not falling along Q, 0 or more."""
        ...


def labels_of(rows: LengthRows) -> tuple[LengthRows, NDArray[np.float64]]:
    """The rows whose label is known, and log(1 + tokens), float64 [m]. Bounds of cut workflows are no labels.

    Raises:
        TraceError: no label is known.
    """
    labelled = rows.take(rows.labelled)
    if not len(labelled):
        raise TraceError(
            f"none of {len(rows)} LLM steps has a known number of tokens to learn from ({int(rows.lower_bound.sum())} "
            "are of workflows that were cut): output_tokens is wanted on every LLM step of complete workflows"
        )
    return labelled, np.log1p(labelled.remaining.astype(np.float64))


def rising(tokens: NDArray[np.float32]) -> NDArray[np.float32]:
    """Quantiles made to neither fall along the last axis nor below 0."""
    return np.maximum.accumulate(np.maximum(tokens, np.float32(0.0)), axis=-1)
