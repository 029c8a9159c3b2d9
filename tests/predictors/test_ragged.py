"""Batches of ragged workflows: each once, of about the size that was asked for, and their padded view."""

import numpy as np

from presage.predictors.ragged import batches, rows_and_padding


def test_every_workflow_is_in_one_batch() -> None:
    lengths = np.array([3, 50, 1, 7, 7, 20, 2, 90])
    for rng in (None, np.random.default_rng(0)):
        parts = batches(lengths, 25, rng)
        assert sorted(np.concatenate(parts).tolist()) == list(range(8))
        assert len(parts) <= -(-lengths.sum() // 25)


def test_the_padded_view_has_every_row_once_in_its_place() -> None:
    rows, padded = rows_and_padding(np.array([0, 2, 5, 6]), np.array([1, 2]))
    assert rows.tolist() == [2, 3, 4, 5]
    assert padded.tolist() == [[0, 1, 2], [3, 4, 4]]
