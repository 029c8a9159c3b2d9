"""What every reader gives, and how one bad row is cut out of a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from presage.datasets.origin import Origin, RowError

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
        """Read `path`; call `progress` with the number of rows read since its last call.

        Nothing is read before the first chunk is asked for, and errors come where they are met. A source without a
        single row may give no chunk.
        """
        ...


class JoiningReader(Protocol):
    """A `Reader` of a format whose workflows may be spread over files: takes several paths as one source too."""

    def __call__(
        self, path: Path | Sequence[Path], *, skip_bad: bool, progress: Callable[[int], None] | None
    ) -> Iterator[Source]:
        """As `Reader`."""
        ...


def salvage(
    rows: int, build: Callable[[int, int], pa.Table], on_bad: Callable[[int, RowError], None]
) -> list[tuple[int, int, pa.Table]]:
    """Build a table from all rows but the bad ones.

    Args:
        rows: number of rows.
        build: makes the table of the rows `start` (included) to `stop` (excluded), or raises the RowError of one row,
            counted from `start`.
        on_bad: told of each bad row, counted from 0.

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
