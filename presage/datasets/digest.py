"""One name for the content of a trace, whatever its file layout and the order its rows were given in."""

from __future__ import annotations

import hashlib
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from presage.datasets.validate import canonical_order

_ADDED: Final = frozenset({"finish_reason", "state_layer"})
"""Columns that the schema did not have from the start."""


def digest(table: pa.Table) -> str:
    """SHA-256 over the content of a conforming table, as 64 hexadecimal digits.

    Equal for equal rows in any order, chunking or row-group layout. A state column, or one that
    joined the schema later, counts as absent where it has no value: so a table keeps its digest when a store adds the
    column, and when a release does.
    """
    order = canonical_order(table)
    if not np.array_equal(order, np.arange(len(order))):
        table = table.take(pa.array(order))
    total = hashlib.sha256(str(table.num_rows).encode())
    for name in table.column_names:
        column = table.column(name)
        optional = pa.types.is_fixed_size_list(column.type) or name in _ADDED
        if optional and column.null_count == len(column):
            continue
        total.update(name.encode() + b"\0" + _column_digest(column))
    return total.hexdigest()


def _column_digest(column: pa.ChunkedArray) -> bytes:
    """Shapes (or validity) and values are hashed apart, so a chunk border leaves no mark in either stream."""
    shapes, values = hashlib.sha256(), hashlib.sha256()
    for chunk in column.chunks:
        data_type = chunk.type
        if pa.types.is_string(data_type) or pa.types.is_large_string(data_type):
            shapes.update(_bytes(pc.binary_length(chunk).cast(pa.int64()).fill_null(-1)))
            _update_text(values, chunk.drop_null())
        elif pa.types.is_list(data_type):
            shapes.update(_bytes(pc.list_value_length(chunk).cast(pa.int64()).fill_null(-1)))
            values.update(_bytes(chunk.flatten().cast(pa.int64())))
        elif pa.types.is_fixed_size_list(data_type):
            shapes.update(_bytes(chunk.is_valid().cast(pa.int8())))
            values.update(_bytes(chunk.flatten()))
        else:
            shapes.update(_bytes(chunk.is_valid().cast(pa.int8())))
            values.update(_bytes(chunk.drop_null().cast(pa.int64())))
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
