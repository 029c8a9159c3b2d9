"""The queue at several loads."""

import numpy as np
import pytest

from presage.datasets.length_law import generate_lengths
from presage.features.lengths import LengthEncoder, length_rows
from presage.training.lengths.load import queued, saved_at_loads
from presage.training.lengths.queue import FIRST_COME, ORACLE, compare

TABLE = generate_lengths(120, 0, censored=0.3).table
ROWS = length_rows(TABLE, LengthEncoder.fit(TABLE))


def test_only_workflows_whose_every_step_is_known_stand_in_the_queue() -> None:
    waiting = queued(ROWS)
    assert waiting is not None
    whole = np.asarray(TABLE["complete"].to_numpy(), bool)
    assert np.array_equal(waiting.taken, whole)
    assert waiting.work == pytest.approx(TABLE["output_tokens"].to_numpy()[whole], abs=0.5)  # labels are float32 sums
    assert len(waiting.offsets) - 1 == len(set(TABLE["workflow_id"].filter(TABLE["complete"]).to_pylist()))


def test_a_trace_of_cut_workflows_has_no_queue() -> None:
    assert queued(ROWS.take(ROWS.lower_bound)) is None


def test_first_come_saves_nothing_and_the_true_order_most_at_every_load() -> None:
    waiting = queued(ROWS)
    assert waiting is not None
    rng = np.random.default_rng(0)
    guess = {"a guess": rng.random(len(ROWS))}
    found = saved_at_loads(waiting, guess, (0.5, 0.9), 0, draws=6)
    assert all(share.value == 0 for share in found[FIRST_COME])
    for low, high in zip(found["a guess"], found[ORACLE], strict=True):
        assert low.value < high.value
        assert high.ci95[0] <= high.value <= high.ci95[1]
    assert found[ORACLE][0].value < found[ORACLE][1].value  # the fuller, the more there is to save


def test_one_draw_is_the_queue_itself() -> None:
    waiting = queued(ROWS)
    assert waiting is not None
    once = compare(waiting.work, {}, waiting.offsets, 3, load=0.8, draws=1).completion
    share = saved_at_loads(waiting, {}, (0.8,), 3, draws=1)[ORACLE][0]
    assert share.value == pytest.approx(1 - once[ORACLE] / once[FIRST_COME])
