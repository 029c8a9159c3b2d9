"""What an order saves as the server fills up: the queue of `queue.py` at several loads, with intervals.

The workflows are the same in every draw, only their arrivals differ: the interval is the doubt of the arrivals, not
that of the workflows or of the training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from presage.features.lengths import LengthRows
from presage.predictors.bootstrap import ratio_ci
from presage.training.lengths.metrics import Share
from presage.training.lengths.queue import FIRST_COME, compare

DRAWS: Final = 20


@dataclass(frozen=True)
class Queued:
    """The workflows of rows that can stand in a queue: those whose every step is known.

    Attributes:
        taken: bool [n], the rows that take part, m of them.
        work: float64 [m], output tokens of each step.
        offsets: int64 [W+1], the steps of each workflow.
    """

    taken: NDArray[np.bool_]
    work: NDArray[np.float64]
    offsets: NDArray[np.int64]


def queued(rows: LengthRows) -> Queued | None:
    """The workflows of rows whose every step is known; None where there is none."""
    whole = np.ones(int(rows.workflow.max()) + 1, bool)
    whole[rows.workflow[~rows.labelled]] = False
    taken = whole[rows.workflow]
    if not taken.any():
        return None
    workflow, label = rows.workflow[taken], rows.remaining[taken].astype(np.float64)
    work = label
    if rows.target == "remaining":
        last = np.diff(workflow, append=-1) != 0
        # Labels are float32 sums: their differences may miss 0 by a little.
        work = np.maximum(np.where(last, label, label - np.append(label[1:], 0.0)), 0.0)
    offsets = np.append(np.flatnonzero(np.diff(workflow, prepend=-1)), len(workflow)).astype(np.int64)
    return Queued(taken, work, offsets)


def saved_at_loads(
    waiting: Queued,
    predicted: Mapping[str, NDArray[np.floating]],
    loads: Sequence[float],
    seed: int,
    draws: int = DRAWS,
) -> dict[str, list[Share]]:
    """The share of the mean completion under first come that each policy takes away, a `Share` a load.

    Args:
        waiting: the workflows.
        predicted: by name of the policy, tokens forecast for each row, [n]; lower first.
        loads: shares of the time the server is busy, each between 0 and 1.
        seed: of the arrivals and of the bootstrap over draws.
        draws: of the arrivals; every policy meets the same ones.
    """
    keys = {name: forecast[waiting.taken].astype(np.float64) for name, forecast in predicted.items()}
    found: dict[str, list[Share]] = {}
    for load in loads:
        runs = [
            compare(waiting.work, keys, waiting.offsets, seed + draw, load=load, draws=1).completion
            for draw in range(draws)
        ]
        first = np.array([run[FIRST_COME] for run in runs])
        for name in runs[0]:
            left = np.array([run[name] for run in runs])
            low, high = ratio_ci(left, first, np.random.default_rng(seed))
            found.setdefault(name, []).append(Share(1 - float(left.sum() / first.sum()), (1 - high, 1 - low)))
    return found
