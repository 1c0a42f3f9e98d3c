"""Pieces of a buffer as Arrow columns, copied by Arrow itself and not one by one. Free of Spark."""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from batonmq.spark.read.record_columns import Bools, Int64s

# Spark counts time in microseconds, stores in milliseconds.
TIMESTAMP: Final = pa.timestamp("us", tz="UTC")
_US_PER_MS: Final = 1000
# SQL and Python know times from the year 1 to the year 9999. Spark stores more, and then fails
# where rows are collected; so it does at both ends of that, for the sake of time zones.
_MS_MIN: Final = -62_104_060_800_000
_MS_MAX: Final = 253_370_764_799_999


def binaries(buffer: "bytes | pa.Buffer", at: Int64s, length: Int64s) -> pa.Array:
    """The pieces [at, at + length) as a binary column; `at` ascends, pieces do not overlap.

    Arrow sees the buffer as an array of gaps and pieces in turn and takes every second element, so
    each piece is one memcpy. The buffer must be below 2 GiB.
    """
    count = len(at)
    edges = np.empty(2 * count + 1, np.int32)
    edges[0:-1:2] = at
    edges[1::2] = at + length
    edges[-1] = edges[-2] if count else 0
    # element 2i is piece i, element 2i + 1 the gap behind it
    data = buffer if isinstance(buffer, pa.Buffer) else pa.py_buffer(buffer)
    everything = pa.Array.from_buffers(pa.binary(), 2 * count, [None, pa.py_buffer(edges), data])
    return everything.take(pa.array(np.arange(0, 2 * count, 2, dtype=np.int32)))


def texts(column: pa.Array) -> pa.Array:
    """A binary column as strings; what is no UTF-8 is replaced, as in the broker."""
    try:
        return column.cast(pa.string())
    except pa.ArrowInvalid:
        decoded = [
            None if raw is None else raw.decode("utf-8", "replace") for raw in column.to_pylist()
        ]
        return pa.array(decoded, pa.string())


def integers_or_null(values: Int64s, missing: Bools, kind: pa.DataType) -> pa.Array:
    """A column of numbers that fit `kind`, null where `missing`."""
    return pa.array(values, pa.int64(), mask=missing).cast(kind)


def timestamps(values_ms: Int64s, missing: Bools | None = None) -> pa.Array:
    """Milliseconds since 1970 as timestamps in UTC, null where `missing`.

    A time outside the years 2 to 9998 (a client may write any number into a record) is null, too.
    """
    outside = (values_ms > _MS_MAX) | (values_ms < _MS_MIN)
    if missing is not None:
        outside = outside | missing
    us = np.where(outside, 0, values_ms) * _US_PER_MS
    return pa.array(us, pa.int64(), mask=outside if outside.any() else None).cast(TIMESTAMP)


def take_or_null(values: pa.Array, which: Int64s) -> pa.Array:
    """`values[which]`, null where `which` is negative."""
    return values.take(pa.array(which, pa.int64(), mask=which < 0))


def batch_of(schema: pa.Schema, rows: int, columns: Mapping[str, Any]) -> pa.RecordBatch:
    """The columns of a schema, in its types: of arrays and lists, and of texts and numbers that
    all rows have. What is not among `columns` is null."""
    arrays = []
    for name, kind in zip(schema.names, schema.types, strict=True):
        values = columns.get(name)
        if values is None:
            values = pa.nulls(rows, kind)
        elif isinstance(values, str | int):
            values = pa.repeat(pa.scalar(values, kind), rows)
        elif isinstance(values, list):
            values = pa.array(values, kind)
        elif not isinstance(values, pa.Array):
            values = pa.array(values)
        arrays.append(values if values.type == kind else values.cast(kind))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def is_any_of(column: pa.Array, wanted: frozenset[str]) -> Bools:
    """Which rows of a string column hold one of the wanted texts; null is none of them."""
    found = pc.is_in(column, value_set=pa.array(sorted(wanted), pa.string()))
    result: npt.NDArray[np.bool_] = found.to_numpy(zero_copy_only=False).astype(np.bool_)
    return result
