"""Hidden states of many steps as one Arrow column of raw float16."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from presage.serving_hooks.recorder.rows import State


class StateColumn:
    """A state column of one engine; its first state tells the width of all.

    Args:
        name: of the column.
        counts: states that are not kept, by reason.
    """

    def __init__(self, name: str, counts: Counter[str]) -> None:
        self._name, self._counts = name, counts
        self._width: int | None = None

    def build(self, states: Sequence[State | None]) -> pa.Array:
        """large_binary [n], each value 2·d bytes or null.

        A state of another width, or with a number float16 cannot hold, is null and counted: ingestion refuses a trace
        with one.
        """
        if self._width is None:
            self._width = next((_width(state) for state in states if state is not None), None)
        valid = np.array([state is not None and self._fits(state) for state in states], bool)
        if not valid.any():
            return pa.nulls(len(states), pa.large_binary())
        halves = _halves([state for state, fits in zip(states, valid.tolist(), strict=True) if state and fits])
        finite = _finite(halves)
        if not finite.all():
            self._counts[f"{self._name} not kept: NaN, infinity or past ±65504"] += int((~finite).sum())
            halves, valid[valid] = np.ascontiguousarray(halves[finite]), finite
        return _binary(halves, valid)

    def _fits(self, state: State) -> bool:
        if _width(state) == self._width:
            return True
        self._counts[f"{self._name} not kept: of another width"] += 1
        return False


def _width(state: State) -> int:
    return len(state.data) // (2 if state.dtype == "float16" else 4)


def _halves(states: Sequence[State]) -> NDArray[np.float16]:
    """float16 [n, d] of n states of one width; past ±65504 becomes infinity."""
    with np.errstate(over="ignore"):
        if len({state.dtype for state in states}) == 1:  # as it is in one engine, and many times faster
            joined = np.frombuffer(b"".join(state.data for state in states), states[0].dtype)
        else:
            joined = np.concatenate([np.frombuffer(state.data, state.dtype) for state in states])
        return joined.astype(np.float16, copy=False).reshape(len(states), -1)


def _finite(halves: NDArray[np.float16]) -> NDArray[np.bool_]:
    """Rows without NaN and infinity. Read as whole numbers those are the largest of either sign, so two maxima tell,
    without another array of this size; isfinite is slow on float16."""
    finite: NDArray[np.bool_] = halves.view(np.int16).max(axis=1) < 0x7C00
    finite &= halves.view(np.uint16).max(axis=1) < 0xFC00
    return finite


def _binary(halves: NDArray[np.float16], valid: NDArray[np.bool_]) -> pa.Array:
    """One value for each row where `valid`, bool [n], is true, in the order of `halves`; null elsewhere."""
    offsets = np.concatenate([[0], np.cumsum(valid, dtype=np.int64)]) * (halves.shape[1] * 2)
    bits = np.packbits(valid, bitorder="little")
    return pa.Array.from_buffers(pa.large_binary(), len(valid), [pa.py_buffer(b) for b in (bits, offsets, halves)])
