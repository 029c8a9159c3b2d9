"""Settings of a predictor of quantiles, and the choice among its estimators on the selection part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Final, Literal, Self

import numpy as np
from numpy.typing import NDArray

from presage.errors import ConfigurationError
from presage.features.rows import LEARNT_PROFILES, TEXT_COLUMNS, LabelledRows
from presage.predictors.common import Progress
from presage.predictors.quantiles.boosted import BoostedQuantiles
from presage.predictors.quantiles.estimator import (
    FLOOR,
    MIN_EVIDENCE,
    EncodedRows,
    LogEstimator,
    Nameless,
    Observe,
    RidgeQuantiles,
    labels_of,
)
from presage.predictors.quantiles.forest import ForestQuantiles

ESTIMATORS: Final[Mapping[str, type[LogEstimator]]] = MappingProxyType(
    {estimator.name: estimator for estimator in (ForestQuantiles, BoostedQuantiles, RidgeQuantiles)}
)
AUTO: Final = "auto"


@dataclass(frozen=True)
class QuantileConfig:
    """Settings of a predictor of quantiles.

    Attributes:
        estimator: "auto" is the one with the smallest loss over all quantiles on the selection part, under the input
            profiles of an engine and of a gateway.
        quantiles: ascending, between 0 and 1; the first at or above .5 ranks requests.
        floor: calibration rows that a workflow type needs for its own quantiles.
        min_evidence: with fewer training rows of an agent in a workflow type the forecast is marked `back-off`.
        refit: once an estimator is chosen, fit again on training and selection rows; training rows calibrate.
    """

    estimator: Literal["forest", "boosted", "ridge", "auto"] = AUTO
    quantiles: tuple[float, ...] = (0.5, 0.9, 0.99)
    floor: int = FLOOR
    min_evidence: int = MIN_EVIDENCE
    refit: bool = True

    def check(self) -> None:
        """Raise ConfigurationError unless every field is in its range."""
        if self.estimator not in (*ESTIMATORS, AUTO):
            raise ConfigurationError(
                f"estimator is {self.estimator!r}; expected one of {', '.join((*ESTIMATORS, AUTO))}"
            )
        levels = (0.0, *self.quantiles, 1.0)
        if not self.quantiles or not all(low < high for low, high in pairwise(levels)):
            raise ConfigurationError(
                f"quantiles are {list(self.quantiles)}; expected rising numbers between 0 and 1, such as 0.5,0.9,0.99"
            )
        for name, value in (("floor", self.floor), ("min_evidence", self.min_evidence)):
            if value < 1:
                raise ConfigurationError(f"{name} is {value}; expected at least 1 row")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Inverse of `asdict`, checked."""
        config = cls(**{**data, "quantiles": tuple(data["quantiles"])})
        config.check()
        return config


def fit_estimator(
    config: QuantileConfig,
    seed: int,
    train: LabelledRows,
    selection: LabelledRows,
    observed: Observe,
    nameless: Nameless,
    *,
    text_columns: tuple[int, ...] = TEXT_COLUMNS,
    logarithmic: bool = False,
    progress: Progress | None = None,
) -> tuple[LogEstimator, dict[str, list[float]]]:
    """Fit the configured estimator, or with "auto" all of them and keep the best.

    Args:
        train, selection: rows of one target and of different tasks. `train` calibrates, out of fold; `selection` only
            selects the estimator, since coverage on rows that made a choice is optimistic.
        observed: restricts rows to the inputs of some sources.
        nameless: rows as if each one's agent were unknown.
        text_columns: of which one is known if a row has a text.
        logarithmic: select by the loss of the label's logarithm.

    Returns:
        The estimator, and the mean pinball loss on the selection part at each quantile, by estimator.

    Raises:
        ConfigurationError: a field of the configuration is out of its range.
        TraceError: no training row has a label.
    """
    config.check()
    names = tuple(ESTIMATORS) if config.estimator == AUTO else (config.estimator,)
    encoded = EncodedRows(train, observed, nameless, seed)
    held = selection.take(selection.labelled)
    judged = held if len(held) else labels_of(train)[0]
    fitted, losses = {}, {}
    for index, name in enumerate(names):
        if progress is not None:
            progress(f"learning ({name})", index / len(names))
        estimator = ESTIMATORS[name](seed, config.floor, config.min_evidence, text_columns)
        fitted[name] = estimator.fit(train, config.quantiles, observed, nameless, encoded=encoded)
        losses[name] = _losses(estimator, judged, observed, logarithmic)
    chosen = fitted[min(losses, key=lambda name: sum(losses[name]))]
    if config.refit:
        if progress is not None:
            progress("learning again on all", 0.0)
        chosen.fit(train, config.quantiles, observed, nameless, more=selection)
    return chosen, losses


def _losses(estimator: LogEstimator, rows: LabelledRows, observed: Observe, logarithmic: bool) -> list[float]:
    """Mean pinball loss at each quantile."""
    predicted = np.stack([estimator.predict(observed(rows, sources)) for sources in LEARNT_PROFILES[1:]])
    labels: NDArray[np.float64] = rows.label[:, None].astype(np.float64)
    above = np.log1p(labels) - np.log1p(predicted) if logarithmic else labels - predicted
    levels = np.array(estimator.quantiles)
    loss: list[float] = np.maximum(levels * above, (levels - 1.0) * above).mean(axis=(0, 1)).tolist()
    return loss
