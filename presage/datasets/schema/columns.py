"""Casts of single columns to the types of the trace; an error names the first bad row.

Arrow casts whole columns; the first bad row is then found by bisection. Error messages never contain values, because a
column may hold a prompt.
"""

from __future__ import annotations

import datetime as dt
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from presage.datasets.schema.source import Origin
from presage.errors import TraceError

_YEAR_10000_S = 253_402_300_800
_EPOCH: Final = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_MICROSECOND: Final = dt.timedelta(microseconds=1)

REFUSALS: Final = (OverflowError, TypeError, UnicodeEncodeError, pa.ArrowException)
"""Errors of Arrow for Python values of a wrong type."""


def dictionary_encoded(column: pa.ChunkedArray) -> pa.DictionaryArray:
    """A column of strings as indices into its distinct values, in one chunk."""
    encoded = column.combine_chunks().dictionary_encode()
    return encoded.unify_dictionaries().combine_chunks() if isinstance(encoded, pa.ChunkedArray) else encoded


def ranks(column: pa.ChunkedArray) -> NDArray[np.int64]:
    """The rank of each string among the sorted distinct ones, -1 for null; int64 [rows]."""
    encoded = dictionary_encoded(column)
    places = np.full(len(encoded.dictionary) + 1, -1)  # the last is that of null
    places[pc.array_sort_indices(encoded.dictionary).to_numpy()] = np.arange(len(encoded.dictionary))
    rank_of_row: NDArray[np.int64] = places[pc.fill_null(encoded.indices, -1).to_numpy(zero_copy_only=False)]
    return rank_of_row


def hashes(column: pa.ChunkedArray) -> NDArray[np.uint64]:
    """A 32-bit hash of each string, the same in every process; uint64 [rows]."""
    encoded = dictionary_encoded(column)
    of_value = np.array([zlib.crc32(value.encode()) for value in encoded.dictionary.to_pylist()], np.uint64)
    hash_of_row: NDArray[np.uint64] = of_value[encoded.indices.to_numpy(zero_copy_only=False)]
    return hash_of_row


def cast_column(column: pa.ChunkedArray, target: pa.DataType, name: str, origin: Origin) -> pa.ChunkedArray:
    """Cast a column of a raw table to its type in the trace.

    Accepts strings for strings; numbers without a fraction for whole numbers; booleans, 1 and 0 for booleans;
    timestamps, ISO 8601 strings (both UTC if they have no zone) or epoch seconds for times. NaN is a missing value.
    Raises TraceError, which names the first such row, if the column has a wrong type, or a value does not fit.
    """
    column = _plain(column)
    source = column.type
    if column.null_count == len(column):
        return pa.chunked_array([pa.nulls(len(column), target)])
    kind = KINDS[target]
    if not kind.accepts(source):
        row = int(np.argmax(column.is_valid().to_numpy(zero_copy_only=False)))
        raise _wrong_type(row, name, f"type {source}, expected {kind.words}", origin)
    if pa.types.is_timestamp(target) and _is_number(source):
        return _from_epoch_s(column, name, origin, target)
    try:
        return _cast(column, target)
    except pa.ArrowInvalid:
        row = first_failure(column, lambda part: _cast(part, target))
        message = f"the value does not fit; expected {kind.words}: correct it"
        raise origin.bad(row, name, message, f"{name} does not fit") from None


def _wrong_type(row: int, name: str, message: str, origin: Origin) -> TraceError:
    """A TraceError instead of a RowError: the whole column is wrong, so skipping rows does not help."""
    return TraceError(f'{origin.at(row)}, column "{name}": {message}: convert the column')


def is_text(source: pa.DataType) -> bool:
    """Whether a column type is a string, of any kind."""
    return bool(pa.types.is_string(source) or pa.types.is_large_string(source) or pa.types.is_string_view(source))


def _is_number(source: pa.DataType) -> bool:
    return bool(pa.types.is_integer(source) or pa.types.is_floating(source) or pa.types.is_decimal(source))


def _is_list(source: pa.DataType) -> bool:
    return bool(pa.types.is_list(source) or pa.types.is_large_list(source) or pa.types.is_fixed_size_list(source))


def _is_numbers(source: pa.DataType) -> bool:
    return _is_list(source) and (_is_number(source.value_type) or bool(pa.types.is_null(source.value_type)))


def _is_texts(source: pa.DataType) -> bool:
    return _is_list(source) and (is_text(source.value_type) or bool(pa.types.is_null(source.value_type)))


def _is_number_lists(source: pa.DataType) -> bool:
    return _is_list(source) and (_is_numbers(source.value_type) or bool(pa.types.is_null(source.value_type)))


class ColumnKind(NamedTuple):
    """What the values of a column may be in each kind of source."""

    words: str
    accepts: Callable[[pa.DataType], bool]  # Arrow types that are cast
    json: Any  # the annotation of its values, for msgspec
    arrow: tuple[pa.DataType, ...]  # types that hold Python values until the cast, the first that accepts them all


_TEXT: Final = ColumnKind("a string", is_text, str, (pa.large_string(),))
KINDS: Final[Mapping[pa.DataType, ColumnKind]] = {
    pa.string(): _TEXT,
    pa.large_string(): _TEXT,
    pa.int32(): ColumnKind("a whole number of at most 32 bits", _is_number, int | float, (pa.float64(),)),
    pa.float32(): ColumnKind("a number", _is_number, int | float, (pa.float64(),)),
    pa.bool_(): ColumnKind(
        "true or false",
        lambda source: bool(pa.types.is_boolean(source)) or _is_number(source),
        bool | int | float,
        (pa.bool_(), pa.float64()),
    ),
    pa.timestamp("us", tz="UTC"): ColumnKind(
        "a time (ISO 8601, or epoch seconds)",
        lambda source: bool(pa.types.is_timestamp(source)) or is_text(source) or _is_number(source),
        str | int | float,
        (pa.float64(), pa.large_string()),
    ),
    pa.list_(pa.string()): ColumnKind("a list of strings", _is_texts, list[str], (pa.list_(pa.string()),)),
    pa.list_(pa.int32()): ColumnKind("a list of whole numbers", _is_numbers, list[int], (pa.list_(pa.float64()),)),
    pa.list_(pa.list_(pa.int32())): ColumnKind(
        "a list of lists of whole numbers", _is_number_lists, list[list[int]], (pa.list_(pa.list_(pa.float64())),)
    ),
    pa.list_(pa.float16()): ColumnKind("a list of numbers", _is_numbers, list[int | float], (pa.list_(pa.float64()),)),
}


def _plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Categories as their values, views as strings, and NaN as null."""
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if pa.types.is_string_view(column.type):
        column = column.cast(pa.large_string())
    if pa.types.is_floating(column.type) and pc.any(nan := pc.is_nan(column)).as_py():
        column = pc.if_else(nan, None, column)
    return column


def _cast(column: pa.ChunkedArray, target: pa.DataType) -> pa.ChunkedArray:
    if pa.types.is_boolean(target) and _is_number(column.type):
        numbers = column.cast(pa.float64(), safe=False)
        if not pc.all(pc.or_(pc.equal(numbers, 0), pc.equal(numbers, 1)), min_count=0).as_py():
            raise pa.ArrowInvalid("neither 0 nor 1")
        return numbers.cast(target)
    if pa.types.is_timestamp(target) and is_text(column.type):
        return _from_iso(column, target)
    if pa.types.is_timestamp(target) and column.type.tz is None:
        column = pc.assume_timezone(column, "UTC")
    if pa.types.is_timestamp(target):
        return column.cast(target, safe=False)  # nanoseconds are cut to microseconds
    return column.cast(target)


def _from_iso(column: pa.ChunkedArray, target: pa.DataType) -> pa.ChunkedArray:
    """Arrow parses strings with a zone and up to six decimals; Python, 20 times slower, parses the others."""
    try:
        return column.cast(target)
    except pa.ArrowInvalid:
        moments = [None if text is None else _iso_us(text) for text in column.to_pylist()]
        return pa.chunked_array([pa.array(moments, pa.int64()).cast(target)])


def _iso_us(text: str) -> int:
    text = text.strip()
    if text[4:5] != "-" or text[7:8] != "-":  # Python takes some numbers for a date
        raise pa.ArrowInvalid("no ISO 8601")
    try:
        return utc_us(text)
    except ValueError:
        raise pa.ArrowInvalid("no ISO 8601") from None


def utc_us(text: str) -> int:
    """Microseconds since 1970 of an ISO 8601 time, truncated; UTC if there is no zone."""
    moment = dt.datetime.fromisoformat(text)
    aware = moment if moment.tzinfo is not None else moment.replace(tzinfo=dt.UTC)
    return (aware - _EPOCH) // _MICROSECOND


def first_failure(column: pa.ChunkedArray, cast: Callable[[pa.ChunkedArray], object]) -> int:
    """The first row whose cast raises ArrowInvalid; the cast of the whole column must raise it."""
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


def first_refused(values: Sequence[Any], arrow_type: pa.DataType, *, from_pandas: bool = False) -> int:
    """The first value that Arrow rejects for this type; Arrow must reject all of them together."""
    for row, value in enumerate(values):
        try:
            pa.array([value], arrow_type, from_pandas=from_pandas)
        except REFUSALS:
            return row
    raise AssertionError("every value fits on its own, so the column does")


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
    """The width of a state column, by its type or its first state; None without a state, 0 if not lists."""
    if pa.types.is_fixed_size_list(column.type):
        return int(column.type.list_size)
    if column.null_count == len(column):
        return None
    if not _is_list(column.type):
        return 0
    row = int(np.argmax(column.is_valid().to_numpy(zero_copy_only=False)))
    return len(column[row])


def cast_state(column: pa.ChunkedArray, size: int, name: str, origin: Origin) -> pa.ChunkedArray:
    """Cast a column of lists of floats to `fixed_size_list<float16>[size]`; null rows stay null.

    Raises TraceError for a row of another width, with a null, NaN or infinity, or a value past float16 (±65504).
    """
    if not _is_list(column.type) or not pa.types.is_floating(column.type.value_type):
        if _is_list(column.type) and _is_number(column.type.value_type):
            column = column.cast(pa.list_(pa.float64()))
        else:
            row = int(np.argmax(column.is_valid().to_numpy(zero_copy_only=False)))
            raise _wrong_type(row, name, f"type {column.type}, expected a list of numbers", origin)
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
            row = int(np.argmax(lengths != size)) if size else int(rows[0])
            message = (
                f"a state of {lengths[row]} numbers where the rows before have {size}: mixed state sizes. "
                "States of one trace come from one model and are never empty: drop the column or repair the row"
            )
            raise origin.bad(start + row, name, message, f"{name} of another size")
    flat = chunk.flatten()  # skips null rows, so it is [rows with a state × size]
    if flat.null_count:
        row = int(rows[int(np.argmax(flat.is_null().to_numpy(zero_copy_only=False))) // size])
        raise origin.bad(start + row, name, "a null inside the state; expected numbers", f"null inside {name}")
    values: NDArray[np.generic] = flat.to_numpy(zero_copy_only=False)
    with np.errstate(over="ignore"):
        halves = values.astype(np.float16, copy=False)
    # All exponent bits set is NaN or infinity; on the bits this is several times faster than isfinite on float16.
    broken = (halves.view(np.uint16) & 0x7C00) == 0x7C00
    if broken.any():
        row = int(rows[int(np.argmax(broken)) // size])
        message = (
            "NaN, infinity, or a number past ±65504 in the state, which float16 cannot hold: record the hidden state "
            "after the last norm, or leave the state of this row out"
        )
        raise origin.bad(start + row, name, message, f"{name} not finite")
    if pa.types.is_fixed_size_list(chunk.type) and chunk.type.value_type == pa.float16():
        return chunk
    if not null.any():
        return pa.FixedSizeListArray.from_arrays(pa.array(halves), size)
    filled = np.zeros((len(chunk), size), np.float16)
    filled[rows] = halves.reshape(-1, size)
    return pa.FixedSizeListArray.from_arrays(pa.array(filled.reshape(-1)), size, mask=pa.array(null))
