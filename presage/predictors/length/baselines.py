"""Baselines of the length predictors: first come first served, input length, group medians, and a ridge."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from presage.features.lengths import LengthRows
from presage.predictors.length.linear import InputEncoding, LogLine
from presage.predictors.length.log_estimator import LengthEstimator, labels_of, rising

_LEAST_ROWS: Final = 5
_PROMPT_TOKENS: Final = 2
"""Column of `numbers`: tokens of the full prompt."""


class Constant:
    """The same quantiles for every step. Ranking by them is first come, first served."""

    name = "constant"

    def fit(self, train: LengthRows, calibration: LengthRows, quantiles: Sequence[float]) -> Self:
        """Fit the quantiles of all training labels; `calibration` is not used."""
        self._said = np.quantile(labels_of(train)[0].remaining, quantiles).astype(np.float32)
        return self

    def predict(self, rows: LengthRows) -> NDArray[np.float32]:
        """Output tokens float32 [n, Q]."""
        return np.tile(self._said, (len(rows), 1))


class InputLength:
    """Predicts output in proportion to the prompt, so it ranks by input length."""

    name = "input-length"

    def fit(self, train: LengthRows, calibration: LengthRows, quantiles: Sequence[float]) -> Self:
        """Fit the quantiles of output tokens per input token; `calibration` is not used."""
        rows, _ = labels_of(train)
        self._usual = float(np.nan_to_num(np.nanmean(np.append(rows.numbers[:, _PROMPT_TOKENS], 1.0)), nan=1.0))
        self._each = np.quantile(rows.remaining / self._tokens(rows), quantiles).astype(np.float32)
        return self

    def predict(self, rows: LengthRows) -> NDArray[np.float32]:
        """Output tokens float32 [n, Q]."""
        return rising(self._tokens(rows)[:, None] * self._each)

    def _tokens(self, rows: LengthRows) -> NDArray[np.float32]:
        tokens = rows.numbers[:, _PROMPT_TOKENS]
        return np.asarray(1.0 + np.where(np.isnan(tokens), self._usual, tokens), np.float32)


class MedianPerStep:
    """Quantiles by workflow type, agent and step; falls back to coarser groups where rows are few."""

    name = "median-per-step"

    def fit(self, train: LengthRows, calibration: LengthRows, quantiles: Sequence[float]) -> Self:
        """Fit the quantiles of each group with at least 5 training rows; `calibration` is not used."""
        rows, _ = labels_of(train)
        self._known: list[dict[tuple[int, ...], NDArray[np.float32]]] = []
        for keys in _groups(rows):
            found, index, counts = np.unique(keys, axis=0, return_inverse=True, return_counts=True)
            order = np.argsort(index.reshape(-1), kind="stable")
            parts = np.split(rows.remaining[order], np.cumsum(counts)[:-1])
            self._known.append(
                {
                    tuple(key): np.quantile(part, quantiles).astype(np.float32)
                    for key, part in zip(found.tolist(), parts, strict=True)
                    if len(part) >= _LEAST_ROWS or not keys.shape[1]
                }
            )
        return self

    def predict(self, rows: LengthRows) -> NDArray[np.float32]:
        """Output tokens float32 [n, Q]."""
        groups = [list(map(tuple, keys.tolist())) for keys in _groups(rows)]
        return np.stack(
            [
                next(known[key] for known, key in zip(self._known, keys, strict=True) if key in known)
                for keys in zip(*groups, strict=True)
            ]
        )


class LogRidge:
    """Ridge regression of log tokens, with quantiles from its training errors."""

    name = "ridge"

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def fit(self, train: LengthRows, calibration: LengthRows, quantiles: Sequence[float]) -> Self:
        """Fit on the training rows; `calibration` is not used."""
        rows, labels = labels_of(train)
        self._encoding = InputEncoding.fit(rows, labels, int(max(train.model.max(), 0)) + 1)
        inputs = self._encoding.inputs(rows)
        self._line = LogLine.fit(inputs, labels)
        self._errors = np.quantile(labels - self._line(inputs), quantiles).astype(np.float32)
        return self

    def predict(self, rows: LengthRows) -> NDArray[np.float32]:
        """Output tokens float32 [n, Q]."""
        return rising(np.expm1(self._line(self._encoding.inputs(rows))[:, None] + self._errors))


LENGTH_BASELINES: Final[Mapping[str, Callable[[int], LengthEstimator]]] = MappingProxyType(
    {
        Constant.name: lambda _: Constant(),
        InputLength.name: lambda _: InputLength(),
        MedianPerStep.name: lambda _: MedianPerStep(),
        LogRidge.name: LogRidge,
    }
)
"""Factories of the baselines by name; each takes a seed."""


def _groups(rows: LengthRows) -> list[NDArray[np.int32]]:
    """The groups of each row, the narrowest first: int32 [n, 3], [n, 2], [n, 1], [n, 0]."""
    keys = np.stack([rows.workflow_type, rows.agent, rows.step], axis=1)
    return [keys[:, :width] for width in (3, 2, 1, 0)]
