"""Chunks of rows, as yielded by every reader, and the origin of each row for error messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from presage.datasets.schema.names import NameMapping
from presage.errors import TraceError


class RowError(TraceError):
    """A row, from 0, of a table violates the schema; `reason` is a short phrase for counting with `--skip-bad`."""

    def __init__(self, message: str, *, row: int, reason: str) -> None:
        super().__init__(message)
        self.row = row
        self.reason = reason


@dataclass(frozen=True)
class Origin:
    """The source of each row of a table, twelve bytes a row."""

    names: tuple[str, ...]  # of the sources, as given by the user
    sources: NDArray[np.int32]  # [rows], index into `names`
    places: NDArray[np.int64]  # [rows], the line, else the number in the source, from 1; in a data frame from 0
    lined: tuple[bool, ...]  # for each source, whether `places` are lines

    @classmethod
    def of(cls, name: str, rows: int, lines: NDArray[np.int64] | None = None, *, first: int = 1) -> Origin:
        """The origin of rows of one source: their `lines`, int64 [rows], else numbers from `first` on."""
        places = np.arange(first, first + rows) if lines is None else lines
        return cls((name,), np.zeros(rows, np.int32), places, (lines is not None,))

    @classmethod
    def join(cls, origins: Sequence[Origin]) -> Origin:
        """The origin of the joined tables of different sources."""
        starts = np.cumsum([0, *(len(origin.names) for origin in origins)], dtype=np.int32)
        return cls(
            tuple(name for origin in origins for name in origin.names),
            np.concatenate([origin.sources + start for origin, start in zip(origins, starts[:-1], strict=True)]),
            np.concatenate([origin.places for origin in origins]),
            tuple(lined for origin in origins for lined in origin.lined),
        )

    @classmethod
    def chunks(cls, origins: Sequence[Origin]) -> Origin:
        """The origin of the joined chunks of one source, at least one."""
        first = origins[0]
        places = np.concatenate([origin.places for origin in origins])
        return cls(first.names, np.zeros(len(places), np.int32), places, first.lined)

    @property
    def name(self) -> str:
        """The distinct names of all sources."""
        return ", ".join(dict.fromkeys(self.names))

    def part(self, rows: slice | NDArray[np.bool_]) -> Origin:
        """The origin of some of the rows: a range, or a mask, bool [rows]."""
        return Origin(self.names, self.sources[rows], self.places[rows], self.lined)

    def first(self, rows: NDArray[np.int64]) -> int:
        """The earliest of some rows, int64 [n]: by source, then by place."""
        return int(rows[np.lexsort((self.places[rows], self.sources[rows]))[0]])

    def at(self, row: int) -> str:
        """`"traces.jsonl, line 17"` or `"traces.parquet, row 17"`; `row` counts from 0."""
        source = self.sources[row]
        return f"{self.names[source]}, {'line' if self.lined[source] else 'row'} {self.places[row]}"

    def bad(self, row: int, column: str, message: str, reason: str) -> RowError:
        """An error for a row and column; `message` names the value found, the value expected and the remedy."""
        return RowError(f'{self.at(row)}, column "{column}": {message}', row=row, reason=reason)


def origin_of(source: str | Origin, rows: int) -> Origin:
    """The origin of rows that are given with it, or with the name of their source."""
    return source if isinstance(source, Origin) else Origin.of(source, rows)


Workflow = tuple[str, str]
"""(workflow type, workflow id)."""


@dataclass(frozen=True)
class Source:
    """A chunk of the rows of one source, at most some ten thousand rows or some dozen MiB.

    A workflow may span several chunks, and any chunk may mark it as spoiled.

    Args:
        table: conforming rows; whole workflows are validated later.
        origin: all chunks of a source have one name, because a workflow from two sources is an error.
        skipped: number of rows skipped since the last chunk, by reason.
        spoiled: workflows that lost a row. They are dropped as a whole, because the rest may look complete, and its
            last step would train a false END.
        read_bytes: bytes on disk read since the last chunk, for progress; 0 if unknown.
        notices: number of things that were not read, or were mended, since the last chunk, by what they were.
    """

    table: pa.Table
    origin: Origin
    skipped: Mapping[str, int] = field(default_factory=dict)
    spoiled: frozenset[Workflow] = frozenset()
    read_bytes: int = 0
    notices: Mapping[str, int] = field(default_factory=dict)

    def folded(self, names: NameMapping) -> Source:
        """The chunk with its names folded; raises ConfigurationError for one that folds to no name."""
        spoiled = frozenset((names.workflow_type(kind), workflow_id) for kind, workflow_id in self.spoiled)
        return replace(self, table=names.table(self.table), spoiled=spoiled) if names else self


def named(paths: Sequence[Path]) -> str:
    """The name of a source of one path or several."""
    more = len(paths) - 1
    return f"{paths[0]}{f' and {more} more' if more else ''}"


Reader = Callable[[Path, bool], Iterator[Source]]
"""Reads a file or a folder as chunks, lazily: it starts, and raises errors, as chunks are consumed, and may yield none.

With the second argument, `skip_bad`, it counts bad rows instead of raising, and marks their workflows as spoiled. It
raises a `TraceError` if the file cannot be read or is cut, a column is missing or misspelt, or a value is missing or of
a wrong type; the message names the line or row and the column."""

JoiningReader = Callable[[Path | Sequence[Path], bool], Iterator[Source]]
"""A `Reader` of a format whose workflows may be spread over files; accepts several files of one source, and
`parents_elsewhere` by name."""


def salvage(
    rows: int, build: Callable[[int, int], pa.Table], on_bad: Callable[[int, RowError], None]
) -> list[tuple[int, int, pa.Table]]:
    """Build tables of all rows but the bad ones: (start, stop, table) of each range of good rows, in order.

    `build` makes the table of the rows from start to stop (excluded), or raises a RowError that counts from start.
    `on_bad` is called with the number of each bad row, from 0, and its error.
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
    return sorted(done, key=lambda run: run[0])
