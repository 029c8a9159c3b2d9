"""What every reader returns, and how one bad row is cut out of a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from presage.datasets.origin import Origin, RowError

Workflow = tuple[str, str]
"""(workflow type, workflow id)."""


@dataclass(frozen=True)
class Source:
    """The rows of one source.

    Args:
        table: conforming rows, not yet checked as workflows.
        origin: where they came from.
        skipped: how many rows were skipped for each reason; empty unless bad rows are skipped.
        spoiled: workflows that lost a row that way. They must not be kept: what is left of one may look whole, and
            its last step would teach a false END.
    """

    table: pa.Table
    origin: Origin
    skipped: Mapping[str, int]
    spoiled: frozenset[Workflow]


class Reader(Protocol):
    """Reads one file into a `Source`."""

    def __call__(self, path: Path, *, skip_bad: bool, progress: Callable[[int], None] | None) -> Source:
        """Read `path`; call `progress` with the number of rows read since its last call."""
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
