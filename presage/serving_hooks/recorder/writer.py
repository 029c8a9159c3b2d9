"""The writer thread: turns events into rows, and rows into Arrow batches that it writes to disk.

While the disk fails, rows wait in the bounded queue and writing is retried; the log reports once that writing stopped
and once that it continues. Steps are written before the ends of their runs: a reader that sees an end has every step.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from presage.datasets.recording import ENDS, FORECASTS, OUTCOMES, STEPS, TABLES, described
from presage.datasets.schema import STATE_COLUMNS
from presage.serving_hooks.counts import RECORDER, EventCounts, RecorderEvent
from presage.serving_hooks.recorder.config import RecorderConfig, Redact, load_redact
from presage.serving_hooks.recorder.files import EngineFolder, OpenFile, RotatingWriter, error_reason
from presage.serving_hooks.recorder.rows import (
    EndRow,
    EventBuffer,
    ForecastRow,
    ReportRow,
    RowQueue,
    State,
    StepRow,
    Text,
    WallClock,
)

# Both are small, so that the engine thread rarely waits for the interpreter.
_BATCH_ROWS: Final = 256
_EVENTS: Final = 256
_PAUSE_S: Final = 0.02
_FIRST_RETRY_S, _LAST_RETRY_S = 1.0, 60.0
_JOIN_S: Final = 10.0

RECORDING: Final = "recording"
RECORDING_FULL: Final = "stopped: the recording takes all the room it may"
RECORDING_CLOSED: Final = "closed"

_STEP_COLUMNS: Final = (
    *("step", "client_step", "step_id", "agent", "input_tokens", "output_tokens", "cached_input_tokens"),
    *("finish_reason", "started_at", "ended_at", "model", "decision", "tools_called"),
    *("identity_confidence", "goes_on_from", "quotes"),
)

_log = logging.getLogger(__name__)


class TextFilter:
    """Decodes token ids and applies the operator's redaction.

    A text that cannot be redacted is not kept. The log names the kind of an error, never its message.
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
            if not isinstance(given, str):
                if self._decode is None:
                    return self._not_kept("text not kept", "nobody decodes token ids")
                given = self._decode(given)
            kept: object = given if self._redact is None else self._redact(given, column)
        except (Exception, SystemExit) as error:  # SystemExit would end the writer thread
            return self._not_kept("text failed", type(error).__name__)
        if kept is not None and not isinstance(kept, str):
            return self._not_kept("text of another type", type(kept).__name__)
        return None if kept is None else kept.encode("utf-8", "replace").decode()  # files cannot hold lone surrogates

    def _not_kept(self, event: RecorderEvent, why: str) -> str | None:
        if self._counts.add(RECORDER, event, why) == 1:
            _log.warning("recorder: %s", RECORDER.key(event, why))
        return None


class StateColumn:
    """A column of hidden states. The first state sets the width of all. States that are not kept are counted."""

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
    """Makes the batches of one engine, in which every step should have the `wanted` state columns."""

    def __init__(self, texts: TextFilter, wanted: Sequence[str], counts: EventCounts) -> None:
        self._texts, self._wanted, self._counts = texts, wanted, counts
        self._states = {name: StateColumn(name, counts) for name in STATE_COLUMNS}
        self._builders: dict[str, Callable[[Sequence[Any]], pa.RecordBatch]] = {
            "steps": self._steps,
            "forecasts": _forecasts,
            "ends": _ends,
            "outcomes": _outcomes,
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
        for name in ("input_text", "system_prompt", "output_text"):
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


def _outcomes(rows: Sequence[ReportRow]) -> pa.RecordBatch:
    columns = {name: [getattr(row, name) for row in rows] for name in ("step", "success", "score", "reported_at")}
    return _batch(rows, columns, OUTCOMES)


def _batch(
    rows: Sequence[StepRow] | Sequence[ForecastRow] | Sequence[EndRow] | Sequence[ReportRow],
    columns: dict[str, Any],
    schema: pa.Schema,
) -> pa.RecordBatch:
    columns = columns | {
        "run": [row.run.number for row in rows],
        "workflow_type": [row.run.workflow_type for row in rows],
        "workflow_id": [row.run.workflow_id for row in rows],
        "tenant": [row.run.tenant for row in rows],
    }
    arrays = [
        value if isinstance(value := columns[field.name], pa.Array) else pa.array(value, field.type) for field in schema
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


class Writer:
    """Drains an event buffer and the queue of the rows made of them to disk. See `Recorder`.

    Attributes:
        counts: rows written, and rows not written by reason; counted by this thread only.
        state: RECORDING, RECORDING_FULL, RECORDING_CLOSED, or why writing is paused.
    """

    def __init__(
        self,
        config: RecorderConfig,
        events: EventBuffer,
        queue: RowQueue,
        decode: Callable[[Sequence[int]], str] | None,
        clock: WallClock,
        instance: str,
        model: str | None,
        state_layer: int | None,
        counts: EventCounts,
        open_file: OpenFile,
    ) -> None:
        self.counts = counts
        self.state = RECORDING
        self._config, self._events, self._queue, self._clock = config, events, queue, clock
        wanted = {"off": STATE_COLUMNS[:0], "prefill": STATE_COLUMNS[:1], "both": STATE_COLUMNS}[config.states]
        self._batches = BatchBuilder(TextFilter(load_redact(config.redact), decode, counts), wanted, counts)
        self._folder = EngineFolder(config, instance)
        self._files = {
            table: RotatingWriter(
                self._folder.path, table, described(schema, instance, model, state_layer), config, open_file
            )
            for table, schema in TABLES.items()
        }
        self._number = 1
        self._taken: dict[str, list[Any]] = {table: [] for table in TABLES}
        self._built: dict[str, pa.RecordBatch] = {}
        self._since_s = self._looked_s = 0.0
        self._retry_s, self._retry_at_s = _FIRST_RETRY_S, 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="presage-recorder", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        pa.array([None])  # imports pandas, if installed, before the engine serves
        self._thread.start()

    def close(self) -> None:
        """Writes waiting rows once and closes all files; stops after `_JOIN_S` seconds."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(_JOIN_S)
        elif self.state != RECORDING_CLOSED:
            self._end()

    def turn(self, now_s: float, *, last: bool = False) -> bool:
        """Handles events, rows and files once, with `last` all of them; returns whether more work waits."""
        if self._clock.set_back():
            self.counts.add(RECORDER, "clock", "set back")
        undrained = self._events.drain(_EVENTS)  # even while the disk fails: the queue chooses better what to drop
        if now_s < self._retry_at_s and not last:
            return undrained
        try:
            more = self._take(now_s, last)
            due = more or last or now_s - self._since_s >= self._config.flush_s
            if due and self._held:
                if self._folder.full(now_s):
                    self._drop()
                else:
                    self._write(now_s)
            if last or now_s - self._looked_s >= self._config.flush_s:
                self._look_after_files(now_s)
        except Exception as error:  # no error here may affect the engine
            self._pause(error, now_s)
            return undrained
        return more or undrained

    def _run(self) -> None:
        while not self._stop.wait(_PAUSE_S):
            while self.turn(self._clock.monotonic()) and not self._stop.is_set():
                self._stop.wait(0.0005)  # yields the interpreter to the engine thread between two batches
        self._end()

    def _end(self) -> None:
        while self.turn(self._clock.monotonic(), last=True):
            pass
        try:
            self._rotate()
        except Exception as error:
            self._pause(error, self._clock.monotonic())
        lost = self._held + self.waiting
        if lost:
            self.counts.add(RECORDER, "lost", "not written before the end", times=lost)
        self._folder.release()
        self.state = RECORDING_CLOSED

    @property
    def waiting(self) -> int:
        """Events not handled and rows not taken from the queue."""
        return len(self._events) + len(self._queue)

    @property
    def _held(self) -> int:
        """Rows taken from the queue and not written."""
        return sum(map(len, self._taken.values())) + sum(int(batch.num_rows) for batch in self._built.values())

    def _take(self, now_s: float, last: bool) -> bool:
        """Takes rows from the queue, up to a batch of them; returns whether there may be more."""
        if self._built:
            return True  # rows that could not be written go first
        held = self._held
        if not held:
            self._since_s = now_s
        for _ in range(_BATCH_ROWS - held):
            row = self._queue.first()
            if row is None:
                return False
            if isinstance(row, StepRow):
                waits = row.awaits_state and not (last and not len(self._events))
                if waits and self._events.drained_to_s(now_s) - row.completed_s < self._config.linger_s:
                    return False  # its last state may still arrive
                row.awaits_state = False
                table = "steps"
            elif isinstance(row, EndRow):
                table = "ends"
            else:
                table = "outcomes" if isinstance(row, ReportRow) else "forecasts"
            self._taken[table].append(self._queue.take())
        return True

    def _write(self, now_s: float) -> None:
        for table, rows in self._taken.items():
            if rows and table not in self._built:
                self._taken[table] = []
                batch = self._batches.build(table, rows)
                if table == "steps":
                    for row in rows:
                        row.release()
                if batch is not None:
                    self._built[table] = batch
        if self._folder.claim():
            self._look_after_files(now_s)  # open files were removed with the folder
        for table, file in self._files.items():
            batch = self._built.get(table)
            if batch is not None:
                self._folder.grew(file.write(batch, self._number, now_s))
                del self._built[table]
                self.counts.add(RECORDER, "written", table, times=batch.num_rows)
        if self.state != RECORDING:
            _log.warning("recorder: continues in %s", self._folder.root)
            self.state, self._retry_s = RECORDING, _FIRST_RETRY_S
        self._rotate_if_full(now_s)

    def _look_after_files(self, now_s: float) -> None:
        self._looked_s = now_s
        for table, file in self._files.items():
            lost = file.take_lost()
            if lost:
                self.counts.add(RECORDER, "lost with its file", table, times=lost)
        self._rotate_if_full(now_s)

    def _rotate_if_full(self, now_s: float) -> None:
        if any(file.full(now_s) for file in self._files.values()):
            self._rotate()

    def _rotate(self) -> None:
        """Rotates all tables together: files of one number belong together, and the lowest may be removed any time."""
        self._number += 1
        for file in self._files.values():
            file.rotate()

    def _drop(self) -> None:
        self._stopped(RECORDING_FULL)
        self.counts.add(RECORDER, "dropped", "recording full", times=self._held)
        for row in self._taken["steps"]:
            row.release()
        self._built.clear()
        for rows in self._taken.values():
            rows.clear()

    def _pause(self, error: Exception, now_s: float) -> None:
        self.counts.add(RECORDER, "not written at once", error_reason(error))
        self._stopped(f"paused: {error_reason(error)}")
        self._number += 1  # a file that failed is not written to again
        self._retry_at_s = now_s + self._retry_s
        self._retry_s = min(2 * self._retry_s, _LAST_RETRY_S)

    def _stopped(self, state: str) -> None:
        if state != self.state:
            _log.warning("recorder: %s in %s", state, self._folder.root)
        self.state = state
