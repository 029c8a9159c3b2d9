"""Casting single columns to the types of the trace, each refusal naming its row.

Casts are Arrow's, over whole columns. Only where one fails is the first row that fails looked for, by halving.
Values never enter a message: a column may hold a prompt.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from presage.datasets.origin import Origin
from presage.errors import TraceError

_YEAR_10000_S = 253_402_300_800


def cast_column(column: pa.ChunkedArray, target: pa.DataType, name: str, origin: Origin) -> pa.ChunkedArray:
    """Cast a column of a raw table to its type in the trace.

    Strings come from strings; whole numbers from integers, or floats without a fraction; booleans from booleans;
    timestamps from timestamps (without zone: UTC), ISO 8601 strings with a zone, or epoch seconds.

    Raises:
        TraceError: the column's type cannot be meant, or a value does not fit; names the first such row.
    """
    source = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    if pa.types.is_null(source):
        return pa.chunked_array([pa.nulls(len(column), target)])
    if not _may_become(source, target):
        row = int(np.argmax(column.is_valid().to_numpy(zero_copy_only=False))) if len(column) else 0
        if column.null_count == len(column):
            return pa.chunked_array([pa.nulls(len(column), target)])
        raise _wrong_type(row, name, f"type {source}, {wanted(target)} is wanted", origin)
    if pa.types.is_timestamp(target) and _is_number(source):
        return _from_epoch_s(column, name, origin, target)
    try:
        return _cast(column, target)
    except pa.ArrowInvalid:
        row = _first_failure(column, lambda part: _cast(part, target))
        raise origin.bad(
            row, name, f"the value does not fit; {wanted(target)} is wanted: correct it", f"{name} does not fit"
        ) from None


def _wrong_type(row: int, name: str, message: str, origin: Origin) -> TraceError:
    """Of the whole column: no row can be skipped to mend it, so this is no RowError."""
    return TraceError(f'{origin.at(row)}, column "{name}": {message}: convert the column')


def wanted(target: pa.DataType) -> str:
    """A column type in words."""
    if pa.types.is_int32(target):
        return "a whole number of at most 32 bits"
    if pa.types.is_boolean(target):
        return "true or false"
    if pa.types.is_timestamp(target):
        return "a time (ISO 8601 with a zone, or epoch seconds)"
    if pa.types.is_list(target):
        return "a list of whole numbers"
    return "a string"


def _is_string(source: pa.DataType) -> bool:
    return bool(pa.types.is_string(source) or pa.types.is_large_string(source) or pa.types.is_string_view(source))


def _is_number(source: pa.DataType) -> bool:
    return bool(pa.types.is_integer(source) or pa.types.is_floating(source))


def _is_list(source: pa.DataType) -> bool:
    return bool(pa.types.is_list(source) or pa.types.is_large_list(source) or pa.types.is_fixed_size_list(source))


def _may_become(source: pa.DataType, target: pa.DataType) -> bool:
    if pa.types.is_int32(target):
        return _is_number(source)
    if pa.types.is_boolean(target):
        return bool(pa.types.is_boolean(source))
    if pa.types.is_timestamp(target):
        return bool(pa.types.is_timestamp(source)) or _is_string(source) or _is_number(source)
    if pa.types.is_list(target):
        return _is_list(source) and (_is_number(source.value_type) or pa.types.is_null(source.value_type))
    return _is_string(source)


def _cast(column: pa.ChunkedArray, target: pa.DataType) -> pa.ChunkedArray:
    if pa.types.is_timestamp(target) and pa.types.is_timestamp(column.type) and column.type.tz is None:
        column = pc.assume_timezone(column, "UTC")
    if pa.types.is_timestamp(target) and pa.types.is_timestamp(column.type):
        return column.cast(target, safe=False)  # nanoseconds are cut to microseconds
    return column.cast(target)


def _first_failure(column: pa.ChunkedArray, cast: Callable[[pa.ChunkedArray], pa.ChunkedArray]) -> int:
    """The first row whose cast fails, given that the cast of the whole column does."""
    low, high = 0, len(column)
    while high - low > 1:
        middle = (low + high) // 2
        try:
            cast(column.slice(low, middle - low))
        except pa.ArrowInvalid:
            high = middle
        else:
            low = middle
    return low


def _from_epoch_s(column: pa.ChunkedArray, name: str, origin: Origin, target: pa.DataType) -> pa.ChunkedArray:
    valid = column.is_valid().to_numpy(zero_copy_only=False)
    seconds = pc.fill_null(column.cast(pa.float64(), safe=False), 0.0).to_numpy()
    # Milliseconds by mistake land past the year 10000, so they are caught here and not taken for a date.
    bad = valid & ~((seconds >= 0) & (seconds < _YEAR_10000_S))
    if bad.any():
        message = "not a time in epoch seconds between 1970 and the year 10000: give seconds, not milliseconds"
        raise origin.bad(int(np.argmax(bad)), name, message, f"{name} out of range")
    return pa.chunked_array([pa.array(np.round(seconds * 1e6).astype(np.int64), mask=~valid).cast(target)])


def state_size(column: pa.ChunkedArray) -> int | None:
    """The width of a state column: of its type, else of its first row that has a state; None if there is none."""
    if pa.types.is_fixed_size_list(column.type):
        return int(column.type.list_size)
    if not _is_list(column.type) or column.null_count == len(column):
        return None
    row = int(np.argmax(column.is_valid().to_numpy(zero_copy_only=False)))
    return len(column[row])


def cast_state(column: pa.ChunkedArray, size: int, name: str, origin: Origin) -> pa.ChunkedArray:
    """Cast a column of lists of floats to `fixed_size_list<float16>[size]`; null rows stay null.

    Raises:
        TraceError: a row has another width, holds a null, NaN or infinity, or a value past float16 (±65504).
    """
    if not _is_list(column.type) or not pa.types.is_floating(column.type.value_type):
        if _is_list(column.type) and _is_number(column.type.value_type):
            column = column.cast(pa.list_(pa.float64()))
        else:
            row = int(np.argmax(column.is_valid().to_numpy(zero_copy_only=False)))
            raise _wrong_type(row, name, f"type {column.type}, a list of numbers is wanted", origin)
    chunks, start = [], 0
    for chunk in column.chunks:
        chunks.append(_cast_state_chunk(chunk, size, name, origin, start))
        start += len(chunk)
    return pa.chunked_array(chunks, type=pa.list_(pa.float16(), size))


def _cast_state_chunk(chunk: pa.Array, size: int, name: str, origin: Origin, start: int) -> pa.Array:
    null = chunk.is_null().to_numpy(zero_copy_only=False)
    rows = np.flatnonzero(~null)
    if not pa.types.is_fixed_size_list(chunk.type):
        lengths = pc.list_value_length(chunk).fill_null(size).to_numpy()
        if size == 0 or (lengths != size).any():
            at = int(np.argmax(lengths != size)) if size else int(rows[0])
            message = (
                f"a state of {lengths[at]} numbers where the rows before have {size}: mixed state sizes. "
                "States of one trace come from one model and are never empty: drop the column or repair the row"
            )
            raise origin.bad(start + at, name, message, f"{name} of another size")
    flat = chunk.flatten()  # skips null rows, so it is [rows with a state × size]
    if flat.null_count:
        at = int(rows[int(np.argmax(flat.is_null().to_numpy(zero_copy_only=False))) // size])
        raise origin.bad(start + at, name, "a null inside the state; numbers are wanted", f"null inside {name}")
    values: NDArray[np.generic] = flat.to_numpy(zero_copy_only=False)
    with np.errstate(over="ignore"):
        halves = values.astype(np.float16, copy=False)
    # All exponent bits set is NaN or infinity; on the bits this is several times faster than isfinite on float16.
    broken = (halves.view(np.uint16) & 0x7C00) == 0x7C00
    if broken.any():
        at = int(rows[int(np.argmax(broken)) // size])
        message = (
            "NaN, infinity, or a number past ±65504 in the state, which float16 cannot hold: record the hidden state "
            "after the last norm, or leave the state of this row out"
        )
        raise origin.bad(start + at, name, message, f"{name} not finite")
    if pa.types.is_fixed_size_list(chunk.type) and chunk.type.value_type == pa.float16():
        return chunk
    if not null.any():
        return pa.FixedSizeListArray.from_arrays(pa.array(halves), size)
    filled = np.zeros((len(chunk), size), np.float16)
    filled[rows] = halves.reshape(-1, size)
    return pa.FixedSizeListArray.from_arrays(pa.array(filled.reshape(-1)), size, mask=pa.array(null))
