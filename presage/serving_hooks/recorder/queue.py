"""Rows on their way to the disk: never more than it may hold. Of the thread that writes."""

from __future__ import annotations

from collections import Counter, deque
from typing import Final

from presage.serving_hooks.recorder.rows import ROW_BYTES, EndRow, ForecastRow, Row, StepRow, forecast_bytes, text_bytes

FULL: Final = "dropped: queue full"


class Queue:
    """Rows on their way to the disk.

    Args:
        rows: how many may wait; ends of runs, which are few and small, may wait beyond that.
        size: bytes that may wait, about.
        counts: of what is dropped.

    Attributes:
        waiting_bytes: about how much memory waits.
    """

    def __init__(self, rows: int, size: int, counts: Counter[str]) -> None:
        self._rows, self._size, self._counts = rows, size, counts
        self._waiting: deque[tuple[Row, int]] = deque()
        self.waiting_bytes = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def offer(self, row: Row) -> bool:
        """Takes a row, or drops and counts it; whether it was taken."""
        size = _bytes_of(row)
        room = 2 * self._rows if isinstance(row, EndRow) else self._rows
        if len(self._waiting) >= room or self.waiting_bytes + size > self._size:
            self._counts[FULL] += 1
            return False
        self.waiting_bytes += size
        self._waiting.append((row, size))
        return True

    def first(self) -> Row | None:
        """The row that has waited longest; None if none waits."""
        return self._waiting[0][0] if self._waiting else None

    def take(self) -> Row:
        """The same, out of the queue."""
        row, size = self._waiting.popleft()
        self.waiting_bytes -= size
        return row


def _bytes_of(row: Row) -> int:
    if isinstance(row, StepRow):
        size = ROW_BYTES
        for state in (row.prefill_state, row.completion_state):
            if state is not None:
                size += len(state.data)
        return size + text_bytes(row.input_text) + text_bytes(row.output_text)
    if isinstance(row, ForecastRow):
        return forecast_bytes(row.live)
    return ROW_BYTES
