"""What the steps of one running workflow say, moved step by step: `LengthEncoder.course` where no trace is at hand.

The size is that of the vocabulary, however many steps the workflow takes.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from presage.features import history, progress


class Course:
    """A workflow before its first step.

    Args:
        agents: V.
        columns: int64 [H], which numbers of the history are wanted, in this order.
    """

    __slots__ = ("_calls", "_columns", "_counters", "_history")

    def __init__(self, agents: int, columns: NDArray[np.int64]) -> None:
        self._columns = columns
        self._history = np.empty(history.history_size(agents), np.float32)
        self._calls = np.empty(agents + 1, np.int64)
        self._counters = np.empty(progress.COUNTERS, np.float64)
        _begin(self._history, self._calls, self._counters)

    def begun(self, agent: int) -> NDArray[np.float32]:
        """A step of `agent` (0..V, V: unknown) begins: what is known of it, float32 [6 + H]."""
        out = np.empty(len(progress.PROGRESS) + len(self._columns), np.float32)
        _advance(self._history, self._calls, self._counters, agent, self._columns, out)
        return out

    def completed(self, output_tokens: float) -> None:
        """It has produced so many tokens; NaN where that is not known, as it is where this is not called."""
        _produce(self._counters, output_tokens)


@njit(cache=True)
def _begin(row: NDArray[np.float32], calls: NDArray[np.int64], counters: NDArray[np.float64]) -> None:
    history.begin(row, len(calls) - 1)
    progress.begin(calls, counters)


@njit(cache=True)
def _advance(
    row: NDArray[np.float32],
    calls: NDArray[np.int64],
    counters: NDArray[np.float64],
    agent: int,
    columns: NDArray[np.int64],
    out: NDArray[np.float32],
) -> None:
    history.advance(row, agent, len(calls) - 1)
    progress.advance(calls, counters, agent, out[:6])
    for i in range(len(columns)):
        out[6 + i] = row[columns[i]]


@njit(cache=True)
def _produce(counters: NDArray[np.float64], output_tokens: float) -> None:
    progress.produce(counters, output_tokens)
