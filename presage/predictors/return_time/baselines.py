"""Baselines of the return-time predictor: quantiles of groups of steps, and two distributions fitted to them.

Each is a function that fits on training rows and returns a function from rows to milliseconds, float32 [n, Q]. A group
with fewer than 5 training rows gets the quantiles of the next wider one. The quantiles of a group are those of its
Kaplan-Meier curve: a step whose next request is unknown was cut right at its completion, which censors it before any
other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm

from presage.features.return_times import LEAST_MS, ReturnEncoder
from presage.features.rows import LabelledRows
from presage.predictors.quantiles.groups import quantiles_of_groups

Predict = Callable[[LabelledRows], NDArray[np.float32]]
Keys = Callable[[LabelledRows, ReturnEncoder], list[NDArray[np.integer]]]
Distribution = Callable[[NDArray[np.float64], NDArray[np.float64]], NDArray[np.float64]]
"""Return times [m] and levels [Q] to quantiles [Q]."""


def _log_normal(times: NDArray[np.float64], levels: NDArray[np.float64]) -> NDArray[np.float64]:
    logs = np.log(times)
    return np.asarray(np.exp(logs.mean() + norm.ppf(levels) * logs.std()), np.float64)


def _exponential(times: NDArray[np.float64], levels: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(np.maximum(-np.log1p(-levels) * times.mean(), LEAST_MS), np.float64)


def _column(rows: LabelledRows, encoder: ReturnEncoder, names: Sequence[str]) -> NDArray[np.int64]:
    """Which of these columns are set, as a number, int64 [n]; 0 for none."""
    columns = [encoder.names.index(name) for name in names]
    return np.asarray((rows.numbers[:, columns] > 0) @ (1 << np.arange(len(columns))), np.int64)


def _groups(*parts: str) -> Keys:
    """Keys of the groups of each row, the narrowest first: the last parts are left out one by one."""

    def keys(rows: LabelledRows, encoder: ReturnEncoder) -> list[NDArray[np.integer]]:
        names_of = {"agent": [], "reason": encoder.reasons, "tool": encoder.tools}
        columns = [np.zeros(len(rows), np.int64)]
        for part in parts:
            names = [f"{part}_{name}" for name in names_of[part]]
            columns.append(rows.agent.astype(np.int64) if part == "agent" else _column(rows, encoder, names))
        return [np.stack(columns[:width], 1) for width in range(len(columns), 0, -1)]

    return keys


def _fit(
    keys: Keys,
    train: LabelledRows,
    encoder: ReturnEncoder,
    quantiles: Sequence[float],
    distribution: Distribution = np.quantile,
) -> Predict:
    labelled, levels = train.take(train.labelled), np.asarray(quantiles, np.float64)
    times = labelled.label.astype(np.float64)
    return quantiles_of_groups(
        lambda rows: keys(rows, encoder), labelled, times, lambda part: distribution(part, levels)
    )


Fit = Callable[[LabelledRows, ReturnEncoder, Sequence[float]], Predict]

RETURN_BASELINES: Final[Mapping[str, Fit]] = MappingProxyType(
    {
        "constant": partial(_fit, _groups()),
        "reason": partial(_fit, _groups("reason")),
        "agent-and-reason": partial(_fit, _groups("agent", "reason")),
        "agent-and-tool": partial(_fit, _groups("agent", "reason", "tool")),
        "log-normal": partial(_fit, _groups("agent", "reason"), distribution=_log_normal),
        "exponential": partial(_fit, _groups("agent", "reason"), distribution=_exponential),
    }
)
"""By name; the last two are fitted to each agent and finish reason."""
