"""Arrow batches of rows, in the form of `presage.datasets.recording`: texts redacted, states as raw float16."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from presage.datasets.recording import ENDS, FORECASTS, STEPS
from presage.datasets.schema import STATE_COLUMNS
from presage.serving_hooks.counts import RECORDER, EventCounts, RecorderEvent
from presage.serving_hooks.recorder.config import Redact
from presage.serving_hooks.recorder.rows import EndRow, ForecastRow, State, StepRow, Text

_STEP_COLUMNS: Final = (
    *("step", "client_step", "step_id", "agent", "input_tokens", "output_tokens", "cached_input_tokens"),
    *("finish_reason", "started_at", "ended_at"),
)

_log = logging.getLogger(__name__)


class TextFilter:
    """Decodes token ids and applies the operator's redaction.

    A text that cannot be redacted is not kept. The log names the kind of an error, never its message.

    Args:
        redact: None keeps texts as they are.
        decode: converts token ids to text; None for engines that pass texts.
        counts: counts texts that are not kept, by reason.
    """

    def __init__(
        self, redact: Redact | None, decode: Callable[[Sequence[int]], str] | None, counts: EventCounts
    ) -> None:
        self._redact, self._decode, self._counts = redact, decode, counts

    def kept(self, given: Text | None, column: str) -> str | None:
        """The text that may be written to a column; None if none may."""
        if given is None:
            return None
        try:
            text = given if isinstance(given, str) else self._decoded(given)
            kept: object = text if text is None or self._redact is None else self._redact(text, column)
        except (Exception, SystemExit) as error:  # SystemExit would end the writer thread
            return self._not_kept("text failed", type(error).__name__)
        if kept is not None and not isinstance(kept, str):
            return self._not_kept("text of another type", type(kept).__name__)
        return None if kept is None else kept.encode("utf-8", "replace").decode()  # files cannot hold lone surrogates

    def _decoded(self, ids: Sequence[int]) -> str | None:
        return (
            self._not_kept("text not kept", "nobody decodes token ids") if self._decode is None else self._decode(ids)
        )

    def _not_kept(self, event: RecorderEvent, why: str) -> str | None:
        if self._counts.add(RECORDER, event, why) == 1:
            _log.warning("recorder: %s", RECORDER.key(event, why))
        return None


class StateColumn:
    """A column of hidden states. The first state sets the width of all.

    Args:
        name: of the column.
        counts: counts states that are not kept, by reason.
    """

    def __init__(self, name: str, counts: EventCounts) -> None:
        self._name, self._counts = name, counts
        self._width: int | None = None

    def build(self, states: Sequence[State | None]) -> pa.Array:
        """large_binary [n], each value 2·d bytes or null.

        A state of another width, or with a number that float16 cannot hold, becomes null and is counted: ingestion
        would refuse its trace.
        """
        if self._width is None:
            self._width = next((_width(state) for state in states if state is not None), None)
        valid = np.array([state is not None and self._fits(state) for state in states], bool)
        if not valid.any():
            return pa.nulls(len(states), pa.large_binary())
        halves = _halves([state for state, fits in zip(states, valid.tolist(), strict=True) if state and fits])
        finite = _finite(halves)
        if not finite.all():
            self._counts.add(RECORDER, "state not finite", self._name, times=int((~finite).sum()))
            halves, valid[valid] = np.ascontiguousarray(halves[finite]), finite
        offsets = np.concatenate([[0], np.cumsum(valid, dtype=np.int64)]) * (halves.shape[1] * 2)
        bits = np.packbits(valid, bitorder="little")
        buffers = [pa.py_buffer(part) for part in (bits, offsets, halves)]
        return pa.Array.from_buffers(pa.large_binary(), len(valid), buffers)

    def _fits(self, state: State) -> bool:
        if _width(state) == self._width:
            return True
        self._counts.add(RECORDER, "state of another width", self._name)
        return False


def _width(state: State) -> int:
    return len(state.data) // np.dtype(state.dtype).itemsize


def _halves(states: Sequence[State]) -> NDArray[np.float16]:
    """float16 [n, d] of n states of one width; numbers past ±65504 become infinity."""
    with np.errstate(over="ignore"):
        if len({state.dtype for state in states}) == 1:  # always so in one engine, and many times faster
            joined = np.frombuffer(b"".join(state.data for state in states), states[0].dtype)
        else:
            joined = np.concatenate([np.frombuffer(state.data, state.dtype) for state in states])
        return joined.astype(np.float16, copy=False).reshape(len(states), -1)


def _finite(halves: NDArray[np.float16]) -> NDArray[np.bool_]:
    """Rows without NaN and infinity. As integers these are the largest of either sign, so two maxima suffice; isfinite
    is slow on float16, and needs another array of this size."""
    finite: NDArray[np.bool_] = halves.view(np.int16).max(axis=1) < 0x7C00
    finite &= halves.view(np.uint16).max(axis=1) < 0xFC00
    return finite


class BatchBuilder:
    """Makes the batches of one engine.

    Args:
        texts: redacts texts.
        wanted: state columns that every step should have.
        counts: counts values that are not kept, by reason.
    """

    def __init__(self, texts: TextFilter, wanted: Sequence[str], counts: EventCounts) -> None:
        self._texts, self._wanted, self._counts = texts, wanted, counts
        self._states = {name: StateColumn(name, counts) for name in STATE_COLUMNS}
        self._builders: dict[str, Callable[[Sequence[Any]], pa.RecordBatch]] = {
            "steps": self._steps,
            "forecasts": _forecasts,
            "ends": _ends,
        }

    def build(self, table: str, rows: Sequence[Any]) -> pa.RecordBatch | None:
        """A batch of a table, without the rows that Arrow refuses, which are counted; None if no row is left."""
        try:
            return self._builders[table](rows)
        except Exception as error:
            if len(rows) == 1:
                self._counts.add(RECORDER, "row not written", type(error).__name__)
                return None
        middle = len(rows) // 2
        kept = [half for half in (self.build(table, rows[:middle]), self.build(table, rows[middle:])) if half]
        return pa.Table.from_batches(kept).combine_chunks().to_batches()[0] if kept else None

    def _steps(self, rows: Sequence[StepRow]) -> pa.RecordBatch:
        columns: dict[str, Any] = {name: [getattr(row, name) for row in rows] for name in _STEP_COLUMNS}
        for name in ("input_text", "output_text"):
            columns[name] = [self._texts.kept(getattr(row, name), name) for row in rows]
        for name, column in self._states.items():
            states = [getattr(row, name) for row in rows]
            columns[name] = column.build(states)
            if name in self._wanted and None in states:
                self._counts.add(RECORDER, "state never came", name, times=states.count(None))
        return _batch(rows, columns, STEPS)


def _forecasts(rows: Sequence[ForecastRow]) -> pa.RecordBatch:
    lives = [row.live for row in rows]
    lengths = [live.remaining for live in lives]
    columns: dict[str, Any] = {
        "step": [row.step for row in rows],
        "moment": [live.moment for live in lives],
        "made_at": [row.made_at for row in rows],
        "agents": [live.agents for live in lives],
        "probabilities": [np.asarray(live.probabilities, np.float32).reshape(-1) for live in lives],
        "quantiles": [one.quantiles for one in lengths],
        "remaining_tokens": [one.tokens for one in lengths],
    }
    for name in ("source", "version", "evidence", "reason"):
        columns[name] = [getattr(live, name) for live in lives]
        columns[f"remaining_{name}"] = [getattr(one, name) for one in lengths]
    return _batch(rows, columns, FORECASTS)


def _ends(rows: Sequence[EndRow]) -> pa.RecordBatch:
    return _batch(rows, {name: [getattr(row, name) for row in rows] for name in ("steps", "how", "ended_at")}, ENDS)


def _batch(
    rows: Sequence[StepRow] | Sequence[ForecastRow] | Sequence[EndRow], columns: dict[str, Any], schema: pa.Schema
) -> pa.RecordBatch:
    columns = columns | {
        "run": [row.run.number for row in rows],
        "workflow_type": [row.run.workflow_type for row in rows],
        "workflow_id": [row.run.workflow_id for row in rows],
    }
    arrays = [
        value if isinstance(value := columns[field.name], pa.Array) else pa.array(value, field.type) for field in schema
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
