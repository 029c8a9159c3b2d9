"""Rows for tests of lengths: from the known law, apart into training, selection and test."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from presage.datasets.synthetic.lengths import generate_lengths
from presage.features.lengths import LengthEncoder, length_rows
from presage.features.rows import LabelledRows
from presage.training.length.train import LengthTexts

QUANTILES = (0.5, 0.9, 0.99)


def sketched(table: pa.Table, size: int) -> tuple[LengthEncoder, LabelledRows]:
    """An encoder with a sketch of so many numbers, and training rows."""
    encoder = LengthEncoder.fit(table)
    texts = LengthTexts.of(table, length_rows(table, encoder), 0)
    assert texts is not None
    return texts.fit(encoder, relevant=False, seed=0, size=size)


@cache
def law_rows(workflows: int = 500, seed: int = 0) -> tuple[LengthEncoder, LabelledRows, LabelledRows]:
    """An encoder, training rows (four fifths) and selection rows."""
    table = generate_lengths(workflows, seed).table
    encoder, rows = sketched(table, 8)
    held = rows.task % 5 == 0
    return encoder, rows.take(~held), rows.take(held)


@cache
def fresh_rows(workflows: int = 300) -> LabelledRows:
    """Other workflows of the law, through the same encoder."""
    return length_rows(generate_lengths(workflows, 99).table, law_rows()[0])


def pinball(tokens: np.ndarray, said: np.ndarray, quantile: float) -> float:
    above = tokens - said
    return float(np.maximum(quantile * above, (quantile - 1) * above).mean())


def with_labels(rows: LabelledRows, remaining: NDArray[np.float32]) -> LabelledRows:
    """The same rows with these labels, float32 [n], none of them a bound."""
    return replace(rows, label=remaining, lower_bound=np.zeros(len(rows), bool))
