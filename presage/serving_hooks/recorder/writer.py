"""The thread that writes: hears what was told, makes rows and batches of it, and bears with the disk.

Whatever the disk does, rows wait in the queue, which is bounded, and writing is tried again after a while; the log says
once why it has stopped and once that it goes on. Steps are written before the ends of their runs, so a reader that sees
an end has all the steps there are.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from presage.datasets.recording import TABLES, described
from presage.datasets.schema import STATE_COLUMNS
from presage.serving_hooks.recorder.batches import Batches
from presage.serving_hooks.recorder.clock import WallClock
from presage.serving_hooks.recorder.config import RecorderConfig
from presage.serving_hooks.recorder.folder import Folder, reason
from presage.serving_hooks.recorder.queue import Queue
from presage.serving_hooks.recorder.rows import EndRow, StepRow
from presage.serving_hooks.recorder.series import FileLimits, Opening, Series
from presage.serving_hooks.recorder.tape import Tape
from presage.serving_hooks.recorder.texts import Texts

_BATCH_ROWS: Final = 256
"""Small enough that making one does not keep the engine's thread from running."""
_CALLS: Final = 256
"""Likewise."""
_PAUSE_S: Final = 0.02
_FIRST_RETRY_S, _LAST_RETRY_S = 1.0, 60.0
_JOIN_S: Final = 10.0

RECORDING: Final = "recording"
FULL: Final = "stopped: the recording takes all the room it may"
CLOSED: Final = "closed"

_log = logging.getLogger(__name__)


class Writer:
    """Writes what waits in a queue.

    Args:
        config: limits.
        tape: what was told.
        queue: rows that were made of it.
        texts: what is kept of texts.
        clock: of the recorder.
        instance: name of the engine.
        model: what it serves.
        state_layer: the layer of the states; see `datasets.recording.described`.
        counts: rows written, and what was not written, by reason; of this thread.
        opening: opens a file.

    Attributes:
        counts: the same.
        state: RECORDING, FULL, CLOSED, or why writing is paused.
    """

    def __init__(
        self,
        config: RecorderConfig,
        tape: Tape,
        queue: Queue,
        texts: Texts,
        clock: WallClock,
        instance: str,
        model: str | None,
        state_layer: int | None,
        counts: Counter[str],
        opening: Opening = lambda path: pa.OSFile(path, "wb"),
    ) -> None:
        self.counts = counts
        self.state = RECORDING
        self._config, self._tape, self._queue, self._clock = config, tape, queue, clock
        texts.counts = self.counts
        wanted = {"off": STATE_COLUMNS[:0], "prefill": STATE_COLUMNS[:1], "both": STATE_COLUMNS}[config.states]
        self._linger_s = config.linger_s if config.states == "both" else 0.0
        self._batches = Batches(texts, wanted, self.counts)
        self._folder = Folder(Path(config.folder), instance, config.max_mb * 2**20)
        limits = FileLimits(config.rows_per_file, config.file_mb * 2**20, config.file_age_s)
        self._series = {
            name: Series(self._folder.path, name, described(schema, instance, model, state_layer), limits, opening)
            for name, schema in TABLES.items()
        }
        self._number = 1
        self._taken: dict[str, list[Any]] = {name: [] for name in TABLES}
        self._made: dict[str, pa.RecordBatch] = {}
        self._since_s = self._looked_s = 0.0
        self._makers: dict[str, Callable[[Sequence[Any]], pa.RecordBatch | None]] = {
            "steps": self._batches.steps,
            "forecasts": self._batches.forecasts,
            "ends": self._batches.ends,
        }
        self._retry_s, self._retry_at_s = _FIRST_RETRY_S, 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="presage-recorder", daemon=True)

    def start(self) -> None:
        """Begins to write."""
        pa.array([None])  # imports pandas, where there is one, before there is anything to disturb
        self._thread.start()

    def close(self) -> None:
        """Writes what waits, once, and ends all files; waits some seconds at most, and then goes without."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(_JOIN_S)
        elif self.state != CLOSED:
            self._end()

    def turn(self, now_s: float, *, last: bool = False) -> bool:
        """One look at the tape, the queue and the disk; whether more waits than was taken.

        Args:
            now_s: by the rising clock.
            last: write whatever is there.
        """
        if self._clock.set_back():
            self.counts["clock: set back"] += 1
        unheard = self._tape.hear(_CALLS)  # whatever the disk does: the queue drops better than the tape
        if now_s < self._retry_at_s and not last:
            return unheard
        try:
            more = self._take(now_s, last)
            due = more or last or now_s - self._since_s >= self._config.flush_s
            if due and self._holds:
                if self._folder.full(now_s):
                    self._drop()
                else:
                    self._write(now_s)
            if last or now_s - self._looked_s >= self._config.flush_s:
                self._look_after_files(now_s)
        except Exception as error:  # the engine goes on whatever happens here
            self._pause(error, now_s)
            return unheard
        return more or unheard

    def _run(self) -> None:
        while not self._stop.wait(_PAUSE_S):
            while self.turn(self._clock.rising()) and not self._stop.is_set():
                self._stop.wait(0.0005)  # lets the engine's thread have the interpreter between two batches
        self._end()

    def _end(self) -> None:
        while self.turn(self._clock.rising(), last=True):
            pass
        try:
            self._rotate()
        except Exception as error:
            self._pause(error, self._clock.rising())
        lost = self._holds + self.waiting
        if lost:
            self.counts["lost: not written before the end"] += lost
        self._folder.release()
        self.state = CLOSED

    @property
    def waiting(self) -> int:
        """Calls nobody has heard, and rows nobody has taken."""
        return len(self._tape) + len(self._queue)

    @property
    def _holds(self) -> int:
        """Rows that were taken and are not written."""
        return sum(map(len, self._taken.values())) + sum(int(batch.num_rows) for batch in self._made.values())

    def _take(self, now_s: float, last: bool) -> bool:
        """Rows of the queue, as many as a batch holds; whether there may be more."""
        if self._made:
            return True  # what could not be written goes first
        held = self._holds
        if not held:
            self._since_s = now_s
        for _ in range(_BATCH_ROWS - held):
            row = self._queue.first()
            if row is None:
                return False
            if isinstance(row, StepRow):
                late = last and not len(self._tape)
                if not late and self._tape.heard_to_s(now_s) - row.over_s < self._linger_s:
                    return False  # its last state may still come
                table = "steps"
            else:
                table = "ends" if isinstance(row, EndRow) else "forecasts"
            self._taken[table].append(self._queue.take())
        return True

    def _write(self, now_s: float) -> None:
        for table, make in self._makers.items():
            if table not in self._made and self._taken[table]:
                rows, self._taken[table] = self._taken[table], []
                batch = make(rows)
                if table == "steps":
                    for row in rows:
                        row.release()
                if batch is not None:
                    self._made[table] = batch
        if self._folder.claim():
            self._look_after_files(now_s)  # whatever is open was removed with the folder
        for table, series in self._series.items():
            batch = self._made.get(table)
            if batch is not None:
                grown = series.write(batch, self._number, now_s)
                del self._made[table]
                self._folder.grew(grown)
                self.counts[f"written: {table}"] += batch.num_rows
        if self.state != RECORDING:
            _log.warning("recorder: goes on in %s", self._folder.root)
            self.state, self._retry_s = RECORDING, _FIRST_RETRY_S
        if any(series.full(now_s) for series in self._series.values()):
            self._rotate()

    def _look_after_files(self, now_s: float) -> None:
        self._looked_s = now_s
        for table, series in self._series.items():
            lost = series.take_lost()
            if lost:
                self.counts[f"lost: {table} in a file that was removed"] += lost
        if any(series.full(now_s) for series in self._series.values()):
            self._rotate()

    def _rotate(self) -> None:
        """All tables together, so files of one number belong together and the lowest can be removed at any time."""
        self._number += 1
        for series in self._series.values():
            series.rotate()

    def _drop(self) -> None:
        self._said(FULL)
        self.counts["dropped: recording full"] += self._holds
        for row in self._taken["steps"]:
            row.release()
        self._made.clear()
        for rows in self._taken.values():
            rows.clear()

    def _pause(self, error: Exception, now_s: float) -> None:
        self.counts[f"not written at once: {reason(error)}"] += 1
        self._said(f"paused: {reason(error)}")
        self._number += 1  # a file that failed is not written to again
        self._retry_at_s = now_s + self._retry_s
        self._retry_s = min(2 * self._retry_s, _LAST_RETRY_S)

    def _said(self, state: str) -> None:
        if state != self.state:
            _log.warning("recorder: %s in %s", state, self._folder.root)
        self.state = state
