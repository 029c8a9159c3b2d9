"""Rows on their way in: the chunks that every reader gives, and where each row came from.

A table forgets its files: chunks are joined, rows are sorted. What is kept beside it is one `Origin`: for each row the
source it came from, and its line or its place in there, so that an error names file, row and column. It costs twelve
bytes a row and is dropped as soon as the table is valid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa
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


Workflow = tuple[str, str]
"""(workflow type, workflow id)."""


@dataclass(frozen=True)
class Source:
    """A bounded chunk of the rows of one source, a few ten thousand or a few dozen MiB at most.

    The rows of one workflow may be spread over chunks. A workflow may be named as spoiled in any chunk, before or after
    its rows.

    Args:
        table: conforming rows, not yet checked as workflows.
        origin: where they came from. All chunks of a reading carry one and the same name: a workflow that stands
            under two names stands in two sources, which is refused.
        skipped: how many rows were skipped for each reason since the chunk before; empty unless bad rows are skipped,
            or this is a recording, which is cut wherever its engine was.
        spoiled: workflows that lost a row that way. They must not be kept: what is left of one may look whole, and
            its last step would teach a false END.
        read_bytes: bytes of the source on disk read since the chunk before, for progress; 0 where that is not known.
    """

    table: pa.Table
    origin: Origin
    skipped: Mapping[str, int] = field(default_factory=dict)
    spoiled: frozenset[Workflow] = frozenset()
    read_bytes: int = 0


def named(paths: Sequence[Path]) -> str:
    """What a source of one path or several is called."""
    more = len(paths) - 1
    return f"{paths[0]}{f' and {more} more' if more else ''}"


class Reader(Protocol):
    """Reads one file, or one folder, as chunks."""

    def __call__(self, path: Path, *, skip_bad: bool, progress: Callable[[int], None] | None) -> Iterator[Source]:
        """Read a path lazily: reading starts, and errors are raised, as chunks are taken. No rows may give no chunk.

        Args:
            path: the file or folder.
            skip_bad: count bad rows instead of raising, and mark their workflows as spoiled.
            progress: called with the number of steps read since its last call.
        """
        ...


class JoiningReader(Protocol):
    """A `Reader` of a format whose workflows may be spread over files."""

    def __call__(
        self, path: Path | Sequence[Path], *, skip_bad: bool, progress: Callable[[int], None] | None
    ) -> Iterator[Source]:
        """As `Reader`; `path` may be several files, over which a workflow may be spread."""
        ...


def salvage(
    rows: int, build: Callable[[int, int], pa.Table], on_bad: Callable[[int, RowError], None]
) -> list[tuple[int, int, pa.Table]]:
    """Build a table from all rows but the bad ones.

    Args:
        rows: number of rows.
        build: makes the table of the rows `start` (included) to `stop` (excluded), or raises the RowError of one row,
            counted from `start`.
        on_bad: called with each bad row, counted from 0, and its error.

    Returns:
        (start, stop, table) of each stretch without a bad row, in order.
    """
    done: list[tuple[int, int, pa.Table]] = []
    waiting = [(0, rows)]
    while waiting:
        start, stop = waiting.pop()
        if start == stop:
            continue
        try:
            done.append((start, stop, build(start, stop)))
        except RowError as error:
            bad = start + error.row
            on_bad(bad, error)
            # Halving what follows keeps a batch of nothing but bad rows from costing the square of its length.
            middle = (bad + 1 + stop) // 2
            waiting += [(middle, stop), (bad + 1, middle), (start, bad)]
    return sorted(done, key=lambda stretch: stretch[0])
