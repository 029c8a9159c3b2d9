"""The trace: one row a step, its columns, and the conversion of any table to them.

Serving imports this module, so it depends on pyarrow and NumPy only. Text columns are `large_string`, because a million
steps of 4,000 characters exceed the 2 GB of an Arrow `string` chunk.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from presage.datasets.schema.columns import cast_column, cast_state, ranks, state_size
from presage.datasets.schema.source import Origin, origin_of
from presage.errors import TraceError
from presage.wording import letters, nearest

SCHEMA_VERSION: Final = 1
VERSION_KEY: Final = b"presage.schema_version"
TIMESTAMP: Final = pa.timestamp("us", tz="UTC")
STATE_COLUMNS: Final = ("prefill_state", "completion_state")
REQUIRED: Final = ("workflow_type", "workflow_id", "step", "agent")
PREFIX_BLOCK_TOKENS: Final = 64
"""Tokens of a prompt that each id of `prefix_blocks` stands for."""

_COLUMNS: Final[dict[str, pa.DataType]] = {
    "workflow_type": pa.string(),
    "workflow_id": pa.string(),
    "step": pa.int32(),
    "agent": pa.string(),
    "task": pa.string(),
    "parent_steps": pa.list_(pa.int32()),
    "kind": pa.string(),
    "model": pa.string(),
    "state_layer": pa.int32(),
    "input_tokens": pa.int32(),
    "output_tokens": pa.int32(),
    "cached_input_tokens": pa.int32(),
    "prefix_blocks": pa.list_(pa.list_(pa.int32())),
    "finish_reason": pa.string(),
    "tools_called": pa.list_(pa.string()),
    "started_at": TIMESTAMP,
    "ended_at": TIMESTAMP,
    "system_prompt": pa.large_string(),
    "input_text": pa.large_string(),
    "output_text": pa.large_string(),
    "success": pa.bool_(),
    "complete": pa.bool_(),
    "identity_confidence": pa.float32(),
    "step_score": pa.float32(),
}
_AFTER_TEXT: Final = "output_text"  # the state columns stand between the texts and the outcome
_NEVER_NULL: Final = (*REQUIRED, "kind", "complete")
# What plain JSONL calls a column, and what the trace calls it.
ALIASES: Final = {
    "task_id": "task",
    "start_time": "started_at",
    "end_time": "ended_at",
    "stop_reason": "finish_reason",
}
COLUMN_TYPES: Final[Mapping[str, pa.DataType]] = {
    **_COLUMNS,
    **{alias: _COLUMNS[column] for alias, column in ALIASES.items()},
    **dict.fromkeys(STATE_COLUMNS, pa.list_(pa.float16())),
}
"""The type of every column that is read, under any name; a state gets a fixed size later."""
KNOWN_COLUMNS: Final = frozenset(COLUMN_TYPES)
_NAME: Final = re.compile(r"[A-Za-z_][\w.-]{0,39}")


def trace_schema(prefill_state_size: int | None = None, completion_state_size: int | None = None) -> pa.Schema:
    """The Arrow schema of a trace: columns in canonical order, the schema version in the metadata.

    Arguments are the widths of the state columns, of which None leaves one out.
    """
    sizes = dict(zip(STATE_COLUMNS, (prefill_state_size, completion_state_size), strict=True))
    fields: list[pa.Field] = []
    for name, data_type in _COLUMNS.items():
        fields.append(pa.field(name, data_type, nullable=name not in _NEVER_NULL))
        if name == _AFTER_TEXT:
            fields += [pa.field(state, pa.list_(pa.float16(), size)) for state, size in sizes.items() if size]
    return pa.schema(fields, metadata={VERSION_KEY: str(SCHEMA_VERSION).encode()})


def state_sizes(schema: pa.Schema) -> tuple[int | None, int | None]:
    """Widths of the prefill and the completion state of a trace; None if the column is absent."""
    prefill, completion = (
        schema.field(name).type.list_size if name in schema.names else None for name in STATE_COLUMNS
    )
    return prefill, completion


def check_version(metadata: dict[bytes, bytes] | None, source: str) -> bool:
    """Whether a file was written as a trace, by its metadata; False for tables of other programs.

    Raises TraceError if the schema version is not supported.
    """
    version = (metadata or {}).get(VERSION_KEY)
    if version is not None and version != str(SCHEMA_VERSION).encode():
        raise TraceError(
            f"{source}: trace schema version {version.decode(errors='replace')!r}, this release reads version "
            f"{SCHEMA_VERSION}: read it with the release that wrote it, or ingest the original traces again"
        )
    return version is not None


def conform(table: pa.Table, source: str | Origin, sizes: tuple[int | None, int | None] = (None, None)) -> pa.Table:
    """Cast any table with at least the required columns to `trace_schema(...)`; rows keep their order.

    Fills `kind` with "llm" and `complete` with true, accepts `task_id`, `start_time` and `end_time`, adds absent
    columns as nulls and drops unknown ones. A state column is kept only if its width is known.

    Args:
        table: the raw table.
        source: the name for errors, or the origin of the rows.
        sizes: widths of the prefill and the completion state in earlier rows, if any.

    Raises:
        TraceError: a required column or value is missing, a value has the wrong type or does not fit, or a state has
            NaN, infinity or another width than earlier rows.
    """
    origin = origin_of(source, table.num_rows)
    check_columns(table.column_names, origin.name)
    columns = {column: _column(table, column, data_type, origin) for column, data_type in _COLUMNS.items()}
    columns["kind"] = pc.fill_null(columns["kind"], "llm")
    columns["complete"] = pc.fill_null(columns["complete"], True)
    _check_values(columns, origin)
    widths: dict[str, int | None] = dict.fromkeys(STATE_COLUMNS)
    for column, wanted in zip(STATE_COLUMNS, sizes, strict=True):
        size_there = state_size(table.column(column)) if column in table.column_names else None
        if size_there is not None:
            size = widths[column] = wanted or size_there
            columns[column] = cast_state(table.column(column), size, column, origin)
    schema = trace_schema(*widths.values())
    return pa.table([columns[field.name] for field in schema], schema=schema)


def check_columns(names: Sequence[str], source: str) -> None:
    """Raise a TraceError for missing, repeated and misspelt columns."""
    refuse_misspelt(names, source)
    require_columns(names, source, REQUIRED, KNOWN_COLUMNS)


def require_columns(names: Sequence[str], source: str, required: Sequence[str], known: Collection[str]) -> None:
    """Raise a TraceError for a required column that is missing, and for a known one that appears twice."""
    if missing := [column for column in required if column not in names]:
        # Without a header the names may be values, so anything that may be a prompt is omitted.
        given = ", ".join(name if _NAME.fullmatch(name) else "…" for name in names[:20]) or "none"
        raise TraceError(
            f"{source}: no column {' and no column '.join(map(repr, missing))}; found: {given}; expected "
            f"{', '.join(required)}: rename or add them{misspelt(names, missing, known)}"
        )
    if twice := sorted({column for column in names if names.count(column) > 1} & set(known)):
        raise TraceError(f"{source}: column {twice[0]!r} appears twice, expected one: drop or rename the other")


def misspelt(names: Iterable[str], missing: Collection[str], known: Collection[str]) -> str:
    """What unknown names may have meant: "; did you mean 'agent' by 'agent_nme'?", or nothing."""
    meant = {name: nearest(name, missing) for name in names if name not in known and _NAME.fullmatch(name)}
    asked = ", ".join(f"{column!r} by {name!r}" for name, column in meant.items() if column)
    return f"; did you mean {asked}?" if asked else ""


def refuse_misspelt(names: Collection[str], source: str, columns: Collection[str] = KNOWN_COLUMNS) -> None:
    """Raise a TraceError for a name such as "Workflow ID": a missing one of `columns` up to case and punctuation."""
    unknown = sorted(name for name in names if name not in KNOWN_COLUMNS)
    if not unknown:
        return
    present = {ALIASES.get(name, name) for name in names}
    absent = {letters(column): column for column in sorted(columns) if ALIASES.get(column, column) not in present}
    for name in unknown:
        if (meant := absent.get(letters(name))) is not None:
            raise TraceError(f"{source}: column {name!r} is called {meant!r} in a trace: rename it, or drop it")


def _column(table: pa.Table, column: str, data_type: pa.DataType, origin: Origin) -> pa.ChunkedArray:
    """The column, completed from its JSONL spelling; nulls if both are absent."""
    spellings = [
        cast_column(table.column(spelling), data_type, spelling, origin)
        for spelling in (column, *(alias for alias, canonical in ALIASES.items() if canonical == column))
        if spelling in table.column_names
    ]
    if not spellings:
        return pa.chunked_array([pa.nulls(table.num_rows, data_type)])
    return spellings[0] if len(spellings) == 1 else pc.coalesce(*spellings)


def _check_values(columns: dict[str, pa.ChunkedArray], origin: Origin) -> None:
    for column in REQUIRED:
        if columns[column].null_count:
            row = _first(pc.is_null(columns[column]))
            raise origin.bad(row, column, "no value; every step needs one: add it", f"no {column}")
    unknown = pc.invert(pc.is_in(columns["kind"], pa.array(["llm", "tool"])))
    if pc.any(unknown).as_py():
        raise origin.bad(
            _first(unknown), "kind", 'neither "llm" nor "tool": use one of the two, or leave it out', "unknown kind"
        )


def _first(mask: pa.ChunkedArray) -> int:
    return int(np.argmax(mask.to_numpy(zero_copy_only=False)))


def concat(tables: Sequence[pa.Table], names: Sequence[str]) -> pa.Table:
    """Join conforming tables, named for errors; missing state columns become null.

    Raises TraceError if two tables have states of different widths.
    """
    common = CommonSizes()
    for table, name in zip(tables, names, strict=True):
        common.add(state_sizes(table.schema), name)
    schema = trace_schema(*common.sizes)
    return pa.concat_tables([with_schema(table, schema) for table in tables] or [schema.empty_table()])


def with_schema(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """A conforming table under a wider schema; missing state columns are null."""
    if table.schema.equals(schema, check_metadata=True):
        return table
    return pa.concat_tables([schema.empty_table(), table], promote_options="default")


class CommonSizes:
    """The widths of both states in several tables; None if no table has the state."""

    def __init__(self) -> None:
        self.sizes: tuple[int | None, int | None] = (None, None)
        self._owner = ["", ""]

    def add(self, found: tuple[int | None, int | None], name: str) -> None:
        """Add the widths in a table; raise a TraceError that names both if an earlier table has another width."""
        for i, (width, size) in enumerate(zip(self.sizes, found, strict=True)):
            if width is None:
                self._owner[i] = name
            elif size is not None and size != width:
                raise TraceError(
                    f"mixed state sizes in column {STATE_COLUMNS[i]!r}: {width} in {self._owner[i]}, {size} in {name}. "
                    "States of one trace come from one model: keep traces of different models apart"
                )
        self.sizes = (self.sizes[0] or found[0], self.sizes[1] or found[1])


def workflow_codes(table: pa.Table) -> NDArray[np.int64]:
    """The workflow of each row as a number from 0, int64 [rows], in the order of (workflow type, workflow id)."""
    types, ids = ranks(table.column("workflow_type")), ranks(table.column("workflow_id"))
    both = types * (ids.max(initial=0) + 1) + ids
    codes: NDArray[np.int64] = np.unique(both, return_inverse=True)[1].astype(np.int64).reshape(-1)
    return codes


def workflow_count(table: pa.Table) -> int:
    """The number of workflows in a trace."""
    return int(table.group_by(["workflow_type", "workflow_id"]).aggregate([]).num_rows)


def canonical_order(table: pa.Table, codes: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
    """The rows in canonical order, int64 [rows]: sorted by workflow type, workflow id and step, stable.

    `codes` are the `workflow_codes` of the table, if already computed.
    """
    codes = workflow_codes(table) if codes is None else codes
    order: NDArray[np.int64] = np.lexsort((table.column("step").to_numpy(), codes))
    return order


def take_rows(table: pa.Table, rows: NDArray[np.int64]) -> pa.Table:
    """`table.take`, without a copy if `rows` are all rows in order."""
    return table if np.array_equal(rows, np.arange(table.num_rows)) else table.take(pa.array(rows))


_ADDED: Final = frozenset(
    {"finish_reason", "tools_called", "state_layer", "prefix_blocks", "identity_confidence", "step_score"}
)  # later than the first release


def digest(table: pa.Table) -> str:
    """SHA-256 over the content of a conforming table, as 64 hexadecimal digits.

    Equal for equal rows in any order, chunking or row-group layout. Empty state columns, and empty columns that were
    added to the schema later, do not count, so adding them to a store or a release keeps the digest.
    """
    table = take_rows(table, canonical_order(table))
    total = hashlib.sha256(str(table.num_rows).encode())
    for name in table.column_names:
        column = table.column(name)
        optional = pa.types.is_fixed_size_list(column.type) or name in _ADDED
        if optional and column.null_count == len(column):
            continue
        total.update(name.encode() + b"\0" + _column_digest(column))
    return total.hexdigest()


def _column_digest(column: pa.ChunkedArray) -> bytes:
    """Hashes shapes (or validity) and values separately, so that chunk borders do not matter."""
    shapes, values = hashlib.sha256(), hashlib.sha256()
    for chunk in column.chunks:
        data_type = chunk.type
        if pa.types.is_string(data_type) or pa.types.is_large_string(data_type):
            shapes.update(_bytes(pc.binary_length(chunk).cast(pa.int64()).fill_null(-1)))
            _update_text(values, chunk.drop_null())
        elif pa.types.is_list(data_type):
            shapes.update(_bytes(pc.list_value_length(chunk).cast(pa.int64()).fill_null(-1)))
            flat = pc.list_flatten(chunk, recursive=True)
            if pa.types.is_string(flat.type):
                shapes.update(_bytes(pc.binary_length(flat).cast(pa.int64())))
                _update_text(values, flat)
            else:
                values.update(_bytes(flat.cast(pa.int64())))
        elif pa.types.is_fixed_size_list(data_type):
            shapes.update(_bytes(chunk.is_valid().cast(pa.int8())))
            values.update(_bytes(chunk.flatten()))
        else:
            shapes.update(_bytes(chunk.is_valid().cast(pa.int8())))
            wide = pa.float64() if pa.types.is_floating(data_type) else pa.int64()
            values.update(_bytes(chunk.drop_null().cast(wide)))
    return shapes.digest() + values.digest()


def _bytes(array: pa.Array) -> memoryview:
    return np.ascontiguousarray(array.to_numpy(zero_copy_only=False)).data.cast("B") if len(array) else memoryview(b"")


def _update_text(values: hashlib._Hash, chunk: pa.Array) -> None:
    _, offsets, data = chunk.buffers()
    if not len(chunk) or data is None:
        return
    width = np.int64 if pa.types.is_large_string(chunk.type) else np.int32
    bounds = np.frombuffer(offsets, width)[chunk.offset : chunk.offset + len(chunk) + 1]
    values.update(memoryview(data)[int(bounds[0]) : int(bounds[-1])])
