"""The writer thread: turns events into rows and batches, and writes them to disk.

While the disk fails, rows wait in the bounded queue and writing is retried; the log reports once that writing stopped
and once that it continues. Steps are written before the ends of their runs: a reader that sees an end has every step.
"""

from __future__ import annotations

import logging
import threading
from typing import Any, Final

import pyarrow as pa

from presage.datasets.recording import TABLES, described
from presage.datasets.schema import STATE_COLUMNS
from presage.serving_hooks.counts import RECORDER, EventCounts
from presage.serving_hooks.recorder.batches import BatchBuilder, TextFilter
from presage.serving_hooks.recorder.buffer import EventBuffer, WallClock
from presage.serving_hooks.recorder.config import RecorderConfig
from presage.serving_hooks.recorder.files import EngineFolder, OpenFile, RotatingWriter, error_reason
from presage.serving_hooks.recorder.rows import EndRow, RowQueue, StepRow

# Both are small, so that the engine thread rarely waits for the interpreter.
_BATCH_ROWS: Final = 256
_EVENTS: Final = 256
_PAUSE_S: Final = 0.02
_FIRST_RETRY_S, _LAST_RETRY_S = 1.0, 60.0
_JOIN_S: Final = 10.0

RECORDING: Final = "recording"
RECORDING_FULL: Final = "stopped: the recording takes all the room it may"
RECORDING_CLOSED: Final = "closed"

_log = logging.getLogger(__name__)


class Writer:
    """Drains an event buffer and a row queue to disk.

    Args:
        config: limits.
        events: drained first, even while the disk fails.
        queue: holds the rows made of them.
        texts: redacts texts.
        clock: of the recorder.
        instance: name of the engine.
        model: name of the served model.
        state_layer: the layer of the states; see `datasets.recording.described`.
        counts: rows written, and rows not written by reason; used by this thread only.
        open_file: opens a file.

    Attributes:
        counts: the same.
        state: RECORDING, RECORDING_FULL, RECORDING_CLOSED, or why writing is paused.
    """

    def __init__(
        self,
        config: RecorderConfig,
        events: EventBuffer,
        queue: RowQueue,
        texts: TextFilter,
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
        self._linger_s = config.linger_s if config.states == "both" else 0.0
        self._batches = BatchBuilder(texts, wanted, counts)
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
        """Handles events, rows and files once; returns whether more work waits.

        Args:
            now_s: by the monotonic clock.
            last: write all remaining rows.
        """
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
                final = last and not len(self._events)
                if not final and self._events.drained_to_s(now_s) - row.completed_s < self._linger_s:
                    return False  # its last state may still arrive
                table = "steps"
            else:
                table = "ends" if isinstance(row, EndRow) else "forecasts"
            self._taken[table].append(self._queue.take())
        return True

    def _write(self, now_s: float) -> None:
        for table, rows in self._taken.items():
            if rows and table not in self._built:
                self._taken[table] = []
                batch = self._batches.build(table, rows)
                if table == "steps":
                    _release(rows)
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
        _release(self._taken["steps"])
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


def _release(rows: list[StepRow]) -> None:
    for row in rows:
        row.release()
