"""The trace store: a Parquet dataset partitioned by workflow type, appended to safely and read lazily.

    store/
      _manifest.json                                 the parts of the store; replacing it, in one rename, commits
      workflow_type=autocoderover/part-<digest>.parquet
      .lock                                          held while writing
      .ingest/                                       what is not committed yet

A writer that fails before the commit leaves the store unchanged; the next writer removes its files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from presage.datasets.schema import canonical_order, concat, take_rows, with_schema, workflow_codes
from presage.datasets.schema.names import NO_NAMES, NameMapping
from presage.datasets.schema.source import Origin, Source
from presage.datasets.store.extend import joined
from presage.datasets.store.parts import Manifest, is_store, load, part_rows, rows_of, unreadable
from presage.errors import TraceError

if TYPE_CHECKING:
    import pyarrow.dataset as ds


_KEYS: Final = ("workflow_type", "workflow_id", "step")


def open_store(store: str | Path) -> ds.Dataset:
    """The store as a lazy Arrow dataset with the schema of the trace; rows come part by part, not in canonical order.

    A filter on `workflow_type` opens only the parts of that type. Raises TraceError if there is no store, its manifest
    or a part is missing or damaged, or its version is unknown.
    """
    import pyarrow.dataset as ds  # brings in pandas
    import pyarrow.fs

    root = Path(store)
    manifest = load(root)
    return ds.FileSystemDataset.from_paths(
        [str(root / part.path) for part in manifest.parts],
        schema=manifest.schema,
        format=ds.ParquetFileFormat(),
        filesystem=pyarrow.fs.LocalFileSystem(),
        partitions=[ds.field("workflow_type") == part.workflow_type for part in manifest.parts],
    )


def names_of(paths: Sequence[str | Path]) -> NameMapping:
    """The mapping that has folded the names of the stores among the paths; raises TraceError if two have different
    ones, or as `open_store`."""
    mappings = {path: names for path in paths if is_store(path) and (names := load(Path(path)).names)}
    if len(set(mappings.values())) > 1:
        told = "; ".join(f"{path} by {names}" for path, names in mappings.items())
        raise TraceError(
            f"names were folded differently: {told}. Read the stores one by one, or ingest the original traces into "
            "one store"
        )
    return next(iter(mappings.values()), NO_NAMES)


def read_store(
    store: str | Path, workflow_types: Sequence[str] | None = None, columns: Sequence[str] | None = None
) -> pa.Table:
    """Read a store in canonical order; if given, only some workflow types, and some columns in the order given.

    Raises TraceError as `open_store`, or if a part is damaged, or a workflow type or a column is not in the store.
    """
    dataset = open_store(store)
    unknown = [column for column in columns or () if column not in dataset.schema.names]
    if unknown:
        raise TraceError(f"{store}: no column {unknown[0]!r}; the store has: {', '.join(dataset.schema.names)}")
    stored_types = {part.workflow_type for part in load(Path(store)).parts}
    absent = sorted(set(workflow_types or ()) - stored_types)
    if absent:
        raise TraceError(f"{store}: no workflow type {absent[0]!r}; the store has: {', '.join(sorted(stored_types))}")
    only = None if workflow_types is None else pc.field("workflow_type").isin(list(workflow_types))
    wanted = list(dataset.schema.names if columns is None else columns)
    try:
        table = dataset.to_table(columns=list(dict.fromkeys([*wanted, *_KEYS])), filter=only)
    except (pa.ArrowException, OSError) as error:
        raise unreadable(Path(store), error) from error
    return take_rows(table, canonical_order(table)).select(wanted)


def scan_store(store: str | Path) -> Iterator[Source]:
    """A store as chunks of bounded memory, part by part; raises TraceError as `open_store`, or if a part is damaged."""
    root, first = Path(store), 1
    manifest = load(root)
    notices = manifest.notices
    for part in manifest.parts:
        reported = 0
        for table, position in part_rows(root, part, manifest.sizes):
            origin = Origin.of(str(root), table.num_rows, first=first)
            yield Source(table, origin, read_bytes=position - reported, notices=notices)
            reported, first, notices = position, first + table.num_rows, {}


@dataclass(frozen=True)
class StoreComparison:
    """Workflows of a source against a store.

    Attributes:
        fresh: what to write: workflows that the store lacks, and those that have more now, as they are then.
        present: number of workflows that the store has as they are.
        extended: ids of the workflows in `fresh` that replace one of the store, by workflow type.
        refused: number of workflows that the store has with other content.
    """

    fresh: pa.Table
    present: int = 0
    extended: Mapping[str, list[str]] = field(default_factory=dict)
    refused: int = 0


def against(table: pa.Table, root: Path, manifest: Manifest, skip_bad: bool = False) -> StoreComparison:
    """Compare a valid trace in canonical order with a store.

    Raises TraceError if the store has a workflow with other content, unless `skip_bad`, or if a part is damaged.
    """
    parts_found = []
    for name in pc.unique(table["workflow_type"]).to_pylist():
        parts = [part for part in manifest.parts if part.workflow_type == name]
        if parts:
            ids = pc.unique(table["workflow_id"].filter(pc.equal(table["workflow_type"], name)))
            parts_found += [rows for part in parts for rows in rows_of(ids, root, part, manifest.sizes)]
    if not parts_found:
        return StoreComparison(table)
    stored = concat(parts_found, [str(root)] * len(parts_found))
    stored = stored.take(pa.array(canonical_order(stored)))
    keys = ["workflow_type", "workflow_id"]
    codes = workflow_codes(pa.concat_tables([table.select(keys), stored.select(keys)]))
    here, there = codes[: table.num_rows], codes[table.num_rows :]
    again = np.isin(here, there)
    given, here = table.filter(pa.array(again)), here[again]
    # One schema for both: a column only one of them has is null in the other, which is a difference if it has states.
    schema = concat([stored.slice(0, 0), given.slice(0, 0)], [str(root), "the trace to append"]).schema
    both = pa.concat_tables([with_schema(stored, schema), with_schema(given, schema)])
    unlike = _unlike(both, here, there)
    present = len(np.unique(here)) - len(unlike)
    new = table.filter(pa.array(~again))
    if not len(unlike):
        return StoreComparison(new, present)
    edges = [
        np.searchsorted(side_codes, unlike, side) + shift
        for side_codes, shift in ((there, 0), (here, len(there)))
        for side in ("left", "right")
    ]
    parts_of = [(range(a, b), range(c, d)) for a, b, c, d in zip(*edges, strict=True)]
    rows, conflict, unchanged = joined(both, parts_of)
    if conflict.any() and not skip_bad:
        old, now = parts_of[int(np.argmax(conflict))]
        what = f"it has {len(old)} steps there and {len(now)} here"
        if len(old) == len(now):
            _, columns = differing(*(both.slice(rows[0], len(rows)) for rows in (old, now)))
            what = f"column {next(iter(columns))!r} differs"
        raise TraceError(
            f"workflow {both['workflow_id'][now[0]].as_py()!r} ({both['workflow_type'][now[0]].as_py()}) is already in "
            f"{root} with other content: {what}. A workflow with times may go on; what is known of its steps stays: "
            "use another store, give the new run another workflow_id, or leave such workflows out with --skip-bad"
        )
    extended: dict[str, list[str]] = {}
    for number in np.flatnonzero(~conflict & ~unchanged):
        row = parts_of[number][0][0]
        extended.setdefault(both["workflow_type"][row].as_py(), []).append(both["workflow_id"][row].as_py())
    fresh = concat([new, rows], ["the trace to append"] * 2)
    fresh = take_rows(fresh, canonical_order(fresh))
    return StoreComparison(fresh, present + int(unchanged.sum()), extended, int(conflict.sum()))


def _unlike(both: pa.Table, here: NDArray[np.int64], there: NDArray[np.int64]) -> NDArray[np.int64]:
    """The codes of the workflows, in order, whose rows in `both`, first those there, then those here, differ."""
    counts = [np.bincount(codes, minlength=int(there.max()) + 1) for codes in (there, here)]
    as_long = (counts[0] == counts[1])[there], (counts[0] == counts[1])[here]
    rows, _ = differing(
        both.slice(0, len(there)).filter(pa.array(as_long[0])), both.slice(len(there)).filter(pa.array(as_long[1]))
    )
    return np.unique(np.concatenate([here[~as_long[1]], here[as_long[1]][rows]]))


def differing(one: pa.Table, other: pa.Table) -> tuple[NDArray[np.bool_], dict[str, int]]:
    """Which rows of two tables of equal length and schema differ, bool [rows], and the first of each such column."""
    rows = np.zeros(one.num_rows, bool)
    columns: dict[str, int] = {}
    for name in one.column_names:
        left, right = one[name], other[name]
        if left.equals(right):
            continue
        if pa.types.is_nested(left.type):  # Arrow compares no lists; few are looked at, since this ends in an error
            differs = np.array([left[row] != right[row] for row in range(len(left))])
        else:
            same = pc.or_(pc.fill_null(pc.equal(left, right), False), pc.and_(pc.is_null(left), pc.is_null(right)))
            differs = ~same.to_numpy()
        columns[name] = int(np.argmax(differs))
        rows |= differs
    return rows, columns
