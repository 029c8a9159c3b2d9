"""Where the rows of a table came from, so that an error names file, row and column.

A table forgets its files: chunks are joined, rows are sorted. What is kept beside it is one `Origin`: for each row the
source it came from, and its line or its place in there. It costs twelve bytes a row and is dropped as soon as the table
is valid.
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
    """The source of each row of a table.

    Args:
        names: one name a source, as the user gave it.
        sources: index into `names` of each row, int32 [rows].
        places: the line of each row, or its place in its source where rows are no lines, int64 [rows], from 1; in a
            data frame from 0, as `frame.iloc` counts.
        lined: for each source, whether its rows are lines.
    """

    names: tuple[str, ...]
    sources: NDArray[np.int32]
    places: NDArray[np.int64]
    lined: tuple[bool, ...]

    @classmethod
    def of(cls, name: str, rows: int, lines: NDArray[np.int64] | None = None, *, first: int = 1) -> Origin:
        """`rows` rows of one source: their `lines`, int64 [rows], or the place of the `first` of them."""
        places = np.arange(first, first + rows) if lines is None else lines
        return cls((name,), np.zeros(rows, np.int32), places, (lines is not None,))

    @classmethod
    def join(cls, origins: Sequence[Origin]) -> Origin:
        """The origin of the tables of different sources joined in this order."""
        starts = np.cumsum([0, *(len(origin.names) for origin in origins)], dtype=np.int32)
        return cls(
            tuple(name for origin in origins for name in origin.names),
            np.concatenate([origin.sources + start for origin, start in zip(origins, starts[:-1], strict=True)]),
            np.concatenate([origin.places for origin in origins]),
            tuple(lined for origin in origins for lined in origin.lined),
        )

    @classmethod
    def chunks(cls, origins: Sequence[Origin]) -> Origin:
        """The origin of the chunks of one source joined in this order; at least one."""
        first = origins[0]
        places = np.concatenate([origin.places for origin in origins])
        return cls(first.names, np.zeros(len(places), np.int32), places, first.lined)

    def filtered(self, keep: NDArray[np.bool_]) -> Origin:
        """The origin of the rows where `keep`, bool [rows], is true."""
        return Origin(self.names, self.sources[keep], self.places[keep], self.lined)

    def part(self, start: int, stop: int) -> Origin:
        """The origin of the rows from `start` (included) to `stop` (excluded)."""
        return Origin(self.names, self.sources[start:stop], self.places[start:stop], self.lined)

    def first(self, rows: NDArray[np.int64]) -> int:
        """The one of these rows, int64 [n], that stands first in the first of their sources."""
        return int(rows[np.lexsort((self.places[rows], self.sources[rows]))[0]])

    def at(self, row: int) -> str:
        """`"traces.jsonl, line 17"` or `"traces.parquet, row 17"`; `row` counts from 0."""
        source = self.sources[row]
        return f"{self.names[source]}, {'line' if self.lined[source] else 'row'} {self.places[row]}"

    def bad(self, row: int, column: str, message: str, reason: str) -> RowError:
        """The error for one row and column; `message` says what came, what was wanted and what to do."""
        return RowError(f'{self.at(row)}, column "{column}": {message}', row=row, reason=reason)
