"""Which workflows of a trace a store has already, and whether they are the same there.

The ids in the store are read a row group at a time, and other columns only of row groups that hold one of the
workflows, so what is in memory is bounded by the trace, whatever the size of the store.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from presage.datasets.compare import differing
from presage.datasets.manifest import Manifest
from presage.datasets.parts import rows_of
from presage.datasets.schema import concat, with_schema
from presage.datasets.validate import canonical_order, workflow_codes, workflow_count
from presage.errors import TraceError


def not_yet_in(table: pa.Table, root: Path, manifest: Manifest) -> tuple[pa.Table, int]:
    """The workflows that a store lacks, and how many it has already.

    Args:
        table: a valid trace in canonical order.
        root: folder of the store.
        manifest: what is in it.

    Raises:
        TraceError: a workflow is there with other content; a part is damaged.
    """
    found = []
    for name in pc.unique(table["workflow_type"]).to_pylist():
        parts = [part for part in manifest.parts if part.workflow_type == name]
        if parts:
            ids = pc.unique(table["workflow_id"].filter(pc.equal(table["workflow_type"], name)))
            found += [rows for part in parts for rows in rows_of(ids, root, part, manifest.sizes)]
    if not found:
        return table, 0
    stored = concat(found, [str(root)] * len(found))
    keys = ["workflow_type", "workflow_id"]
    codes = workflow_codes(pa.concat_tables([table.select(keys), stored.select(keys)]))
    here, there = codes[: table.num_rows], codes[table.num_rows :]
    again = np.isin(here, there)
    given = table.filter(pa.array(again))
    _check_same(given, here[again], stored.take(pa.array(canonical_order(stored))), np.sort(there), str(root))
    return table.filter(pa.array(~again)), workflow_count(given)


def _check_same(
    given: pa.Table,
    here: NDArray[np.int64],
    stored: pa.Table,
    there: NDArray[np.int64],
    store: str,
) -> None:
    """Both tables in canonical order, each with the code of the workflow of each row."""
    # One schema for both: a column only one of them has is null in the other, which is a difference if it has states.
    schema = concat([stored.slice(0, 0), given.slice(0, 0)], [store, "the trace to append"]).schema
    lengths = [np.bincount(codes, minlength=int(there.max()) + 1) for codes in (there, here)]
    other_length = np.flatnonzero(lengths[0] != lengths[1])
    if len(other_length):
        code = other_length[0]
        row = int(np.flatnonzero(here == code)[0])
        what = f"it has {lengths[0][code]} steps there and {lengths[1][code]} here"
    else:
        rows, columns = differing(with_schema(stored, schema), with_schema(given, schema))
        if not rows.any():
            return
        row = int(np.argmax(rows))
        column = next(name for name, first in columns.items() if first == row)
        what = f"column {column!r} differs"
    raise TraceError(
        f"workflow {given['workflow_id'][row].as_py()!r} ({given['workflow_type'][row].as_py()}) is already in {store} "
        f"with other content: {what}. A workflow is written once, when it has ended: use another store, or give the "
        "new run another workflow_id"
    )
