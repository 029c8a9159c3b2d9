"""Is a workflow that was met twice the same workflow? Content is compared a column at a time, over many workflows."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from presage.datasets.source import Origin
from presage.datasets.validate import workflow_codes


def differing(one: pa.Table, other: pa.Table) -> tuple[NDArray[np.bool_], dict[str, int]]:
    """Which rows differ between two tables of equal length and schema.

    Returns:
        bool [rows], and for each column that differs the first row where it does.
    """
    rows = np.zeros(one.num_rows, bool)
    columns: dict[str, int] = {}
    for name in one.column_names:
        left, right = one[name], other[name]
        if left.equals(right):
            continue
        if pa.types.is_nested(left.type):  # Arrow compares no lists; few are looked at, since this ends in an error
            found = np.array([left[row] != right[row] for row in range(len(left))])
        else:
            same = pc.or_(pc.fill_null(pc.equal(left, right), False), pc.and_(pc.is_null(left), pc.is_null(right)))
            found = ~same.to_numpy()
        columns[name] = int(np.argmax(found))
        rows |= found
    return rows, columns


def drop_repeats(table: pa.Table, origin: Origin) -> tuple[pa.Table, Origin, int]:
    """Leave out every workflow of a source that an earlier source has with the same content.

    One that a source before has with other content stays, for the checks to name.

    Args:
        table: a conforming table in any order.
        origin: of its rows.

    Returns:
        The remaining rows, their origin, and how many times a workflow was left out.
    """
    if len(origin.names) < 2 or not table.num_rows:
        return table, origin, 0
    codes, steps = workflow_codes(table), table["step"].to_numpy()
    pairs, pair = np.unique(codes * len(origin.names) + origin.sources, return_inverse=True)
    code_of_pair = pairs // len(origin.names)
    begins = np.searchsorted(code_of_pair, code_of_pair)
    turn = (np.arange(len(pairs)) - begins)[pair]  # 0 for the rows of the first source that has the workflow
    keep = np.ones(table.num_rows, bool)
    repeats = 0
    for nth in range(1, int(turn.max()) + 1):
        later = np.flatnonzero(turn == nth)
        first = np.flatnonzero((turn == 0) & np.isin(codes, codes[later]))
        counts = [np.bincount(codes[rows], minlength=codes.max() + 1) for rows in (first, later)]
        equally_long = (counts[0] == counts[1])[codes]
        first, aligned = first[equally_long[first]], later[equally_long[later]]
        first, aligned = (rows[np.lexsort((steps[rows], codes[rows]))] for rows in (first, aligned))
        unlike, _ = differing(table.take(pa.array(first)), table.take(pa.array(aligned)))
        same = np.setdiff1d(codes[aligned], codes[aligned][unlike])
        keep[later[np.isin(codes[later], same)]] = False
        repeats += len(same)
    if keep.all():
        return table, origin, 0
    return table.filter(pa.array(keep)), origin.filtered(keep), repeats
