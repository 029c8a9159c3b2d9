"""Quantiles of groups of training rows, the narrowest group of a row that has enough: baselines of several kinds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from presage.features.rows import LabelledRows

_LEAST_ROWS: Final = 5


def quantiles_of_groups(
    keys: Callable[[LabelledRows], list[NDArray[np.integer]]],
    labelled: LabelledRows,
    values: NDArray[Any],
    quantiles: Callable[[NDArray[Any]], NDArray[Any]],
) -> Callable[[LabelledRows], NDArray[np.float32]]:
    """A function from rows to quantiles, float32 [n, Q], fitted on labelled rows and their values [m].

    Args:
        keys: the groups of each row, the narrowest first, [n, K] each; the last is of all rows.
        quantiles: values of a group -> [Q]. A group with fewer than 5 rows gets those of the next wider one.
    """
    by_group: list[dict[tuple[int, ...], NDArray[np.float32]]] = []
    groups = keys(labelled)
    for key_columns in groups:
        distinct, index, counts = np.unique(key_columns, axis=0, return_inverse=True, return_counts=True)
        parts = np.split(values[np.argsort(index.reshape(-1), kind="stable")], np.cumsum(counts)[:-1])
        by_group.append(
            {
                tuple(key): quantiles(part).astype(np.float32)
                for key, part in zip(distinct.tolist(), parts, strict=True)
                if len(part) >= _LEAST_ROWS or key_columns is groups[-1]
            }
        )

    def predict(rows: LabelledRows) -> NDArray[np.float32]:
        each = [list(map(tuple, key_columns.tolist())) for key_columns in keys(rows)]
        return np.stack(
            [
                next(
                    quantiles_by_key[key]
                    for quantiles_by_key, key in zip(by_group, of_row, strict=True)
                    if key in quantiles_by_key
                )
                for of_row in zip(*each, strict=True)
            ]
        )

    return predict
