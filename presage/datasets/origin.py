"""Where the rows of a table came from, so that an error names file, row and column.

A table forgets its files: batches are joined, rows are sorted. What is kept beside it is one `Origin`: the sources in
the order they were joined and, for text formats, the line of each row. It costs eight bytes a row and is dropped as
soon as the table is valid.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from presage.errors import TraceError


class RowError(TraceError):
    """A row of a trace breaks the schema.

    `row` counts from 0 in the table that was being checked; `reason` is a short phrase to count by under `--skip-bad`.
    """

    def __init__(self, message: str, *, row: int, reason: str) -> None:
        super().__init__(message)
        self.row = row
        self.reason = reason


@dataclass(frozen=True)
class Origin:
    """The sources of a table, in row order.

    Args:
        names: one name a source, as the user gave it.
        rows: number of rows of each source.
        lines: for each source the line numbers of its rows, int64 [rows], counted from 1; None where rows are no lines.
    """

    names: tuple[str, ...]
    rows: tuple[int, ...]
    lines: tuple[NDArray[np.int64] | None, ...]

    @classmethod
    def of(cls, name: str, rows: int, lines: NDArray[np.int64] | None = None) -> Origin:
        """One source of `rows` rows."""
        return cls((name,), (rows,), (lines,))

    @classmethod
    def join(cls, origins: Sequence[Origin]) -> Origin:
        """The origin of the tables joined in this order."""
        return cls(
            tuple(name for origin in origins for name in origin.names),
            tuple(rows for origin in origins for rows in origin.rows),
            tuple(lines for origin in origins for lines in origin.lines),
        )

    def filtered(self, keep: NDArray[np.bool_]) -> Origin:
        """The origin of the rows where `keep`, bool [rows], is true."""
        ends = np.cumsum(self.rows)
        masks = [keep[end - rows : end] for end, rows in zip(ends, self.rows, strict=True)]
        return Origin(
            self.names,
            tuple(int(mask.sum()) for mask in masks),
            tuple(None if lines is None else lines[mask] for lines, mask in zip(self.lines, masks, strict=True)),
        )

    def sources(self) -> NDArray[np.int64]:
        """Index into `names` of each row, int64 [rows]."""
        return np.repeat(np.arange(len(self.names)), self.rows)

    def at(self, row: int) -> str:
        """`"traces.jsonl, line 17"` or `"traces.parquet, row 17"`; `row` counts from 0, what is printed from 1."""
        for name, rows, lines in zip(self.names, self.rows, self.lines, strict=True):
            if row < rows:
                return f"{name}, row {row + 1}" if lines is None else f"{name}, line {lines[row]}"
            row -= rows
        raise IndexError(f"row {row} lies past the end of its sources")

    def bad(self, row: int, column: str, message: str, reason: str) -> RowError:
        """The error for one row and column; `message` says what came, what was wanted and what to do."""
        return RowError(f'{self.at(row)}, column "{column}": {message}', row=row, reason=reason)
