"""The compiled product against NumPy's in double precision, at every remainder of rows and columns."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from presage.features.project_rows import columns_of, project_rows


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 11), st.integers(1, 9), st.integers(1, 70), st.integers(0, 1000))
def test_every_state_is_multiplied_and_nothing_else_is_written(rows: int, width: int, size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    states = rng.normal(size=(rows, size)).astype(np.float32)
    weights, bias = rng.normal(size=(size, width)).astype(np.float32), rng.normal(size=width).astype(np.float32)
    room = np.full((rows + 2, width), 7, np.float32)
    project_rows(states, columns_of(weights), bias, room[:rows])
    wanted = states.astype(float) @ weights.astype(float) + bias
    np.testing.assert_allclose(room[:rows], wanted, rtol=1e-4, atol=1e-4)
    assert (room[rows:] == 7).all()


@pytest.mark.parametrize("width", [1, 4, 5, 16])
def test_columns_are_filled_up_with_zeros(width: int) -> None:
    weights = np.arange(3 * width, dtype=np.float32).reshape(3, width) + 1
    columns = columns_of(weights)
    assert len(columns) % 4 == 0
    np.testing.assert_array_equal(columns[:width], weights.T)
    assert not columns[width:].any()
