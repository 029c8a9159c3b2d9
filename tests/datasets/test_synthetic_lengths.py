"""The known law for lengths: sound traces, an oracle that covers, heavy tails, cuts that are told."""

import numpy as np
import pytest

from presage.datasets.schema import canonical_order
from presage.datasets.schema.validate import validate
from presage.datasets.synthetic.lengths import generate_lengths
from presage.errors import ConfigurationError
from presage.features.lengths import LengthEncoder, length_rows


def test_the_same_seed_draws_the_same_trace_in_canonical_order() -> None:
    first, second = (generate_lengths(50, 4) for _ in range(2))
    assert first.table.equals(second.table)
    assert not first.table.equals(generate_lengths(50, 5).table)
    np.testing.assert_array_equal(canonical_order(first.table), np.arange(first.table.num_rows))
    validate(first.table, "law")


@pytest.mark.slow
def test_the_oracle_covers_as_it_says_and_lengths_are_heavy_tailed() -> None:
    levels, below, remaining = (0.5, 0.9, 0.99), [], []
    for seed in range(6):
        drawn = generate_lengths(1500, seed)
        rows = length_rows(drawn.table, LengthEncoder.fit(drawn.table))
        arrival = rows.step == 0  # one row a workflow: rows are independent and the standard error is known
        below.append((rows.label[:, None] <= drawn.oracle(levels))[arrival])
        remaining.append(rows.label)
    error = np.abs(np.concatenate(below).mean(axis=0) - levels)
    assert (error < 3.5 * np.sqrt(np.multiply(levels, np.subtract(1, levels)) / 9000) + 0.0025).all()
    every = np.concatenate(remaining)
    assert np.quantile(every, 0.99) > 8 * np.median(every)


def test_cut_workflows_are_marked_and_shorter() -> None:
    drawn = generate_lengths(300, 0, censored=1.0)
    complete = drawn.table.filter(drawn.table["complete"])
    assert 0.1 < complete.num_rows / drawn.table.num_rows < 0.7
    assert drawn.table.num_rows < generate_lengths(300, 0).table.num_rows


@pytest.mark.parametrize("wrong", [{"workflows": 0}, {"workflows": 3, "censored": 1.5}])
def test_numbers_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError, match="expected"):
        generate_lengths(seed=0, **wrong)
