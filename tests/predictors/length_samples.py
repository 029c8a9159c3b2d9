"""Rows for tests of lengths: from the known law, apart into training, calibration and test."""

from __future__ import annotations

from functools import cache

import numpy as np

from presage.datasets.length_law import generate_lengths
from presage.features.lengths import LengthEncoder, LengthRows, length_rows

QUANTILES = (0.5, 0.9, 0.99)


@cache
def law_rows(workflows: int = 500, seed: int = 0) -> tuple[LengthEncoder, LengthRows, LengthRows]:
    """An encoder, training rows (four fifths) and calibration rows."""
    table = generate_lengths(workflows, seed).table
    encoder = LengthEncoder.fit(table, sketch_size=8)
    rows = length_rows(table, encoder)
    held = rows.task % 5 == 0
    return encoder, rows.take(~held), rows.take(held)


@cache
def fresh_rows(workflows: int = 300) -> LengthRows:
    """Other workflows of the law, through the same encoder."""
    return length_rows(generate_lengths(workflows, 99).table, law_rows()[0])


def pinball(tokens: np.ndarray, said: np.ndarray, quantile: float) -> float:
    above = tokens - said
    return float(np.maximum(quantile * above, (quantile - 1) * above).mean())
