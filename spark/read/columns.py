"""The columns of every table: names, types and their order, and pieces of a buffer as such columns.

`docs/spark.md` explains them. Arrow types as Spark expects them of a Python data source, all
nullable. Times are microseconds in UTC; where a store keeps milliseconds, no digit is lost. Arrow
itself copies the pieces, and not one by one. Free of Spark.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
from msgspec.structs import FieldInfo, fields

from batonmq.history.event import TIME_MS_MAX, TIMES, HistoryEvent
from batonmq.protocol.records.columns import Bools, Int64s

# Spark counts time in microseconds, stores in milliseconds.
TIMESTAMP: Final = pa.timestamp("us", tz="UTC")
_US_PER_MS: Final = 1000
# SQL and Python know times from the year 1 to the year 9999. Spark stores more, and then fails
# where rows are collected; so it does at both ends of that, for the sake of time zones.
_TIME_MS_MIN: Final = -62_104_060_800_000
_LONG: Final = pa.int64()
#: Behind the columns of a table that is read with mode PERMISSIVE: what was skipped, and why.
CORRUPT: Final = "corrupt"
_CORRUPT_TYPE: Final = pa.struct(
    [("file", pa.string()), ("offset", _LONG), ("bytes", _LONG), ("reason", pa.string())]
)
#: The table that is no file but a running cluster's; see `batonmq.spark.live.topic_read`.
LIVE_TABLE: Final = "topic"
KINDS: Final = {
    "string": pa.string(), "int": pa.int32(), "long": _LONG, "time": TIMESTAMP, "bool": pa.bool_(),
    "binary": pa.binary(), "map": pa.map_(pa.string(), pa.string()), "texts": pa.list_(pa.string()),
    "longs": pa.list_(_LONG), "day": pa.date32(),
}  # fmt: skip


def columns_of(text: str) -> pa.Schema:
    """Of `kind: name name ...`, by lines or semicolons."""
    lines = (line.split(":") for line in re.split("[\n;]", text) if line.strip())
    kinds = [(name, KINDS[kind.strip()]) for kind, names in lines for name in names.split()]
    return pa.schema(kinds)


class HistoryColumn(NamedTuple):
    """A field of HistoryEvent as a column of table `history`. A row has null where the event has
    `null_for`; None: nowhere."""

    field: str
    name: str
    type: pa.DataType
    null_for: Any


def _history_column(field: FieldInfo) -> HistoryColumn:
    name = field.name
    if name in TIMES:
        column = "time" if name == "time_ms" else name.removesuffix("_ms") + "_at"
        return HistoryColumn(name, column, TIMESTAMP, 0)
    kinds = {str: "string", bool: "bool", int: "int" if name == "part" else "long"}
    unknown = field.default if field.default in ("", (), -1) else None
    return HistoryColumn(name, name, KINDS[kinds.get(field.type, "longs")], unknown)


#: The fields of an event in their order; `gap` is of a file, not of the event.
HISTORY_COLUMNS: Final = tuple(
    _history_column(field) for field in fields(HistoryEvent) if field.name != "gap"
)

# Which store a row comes from; `store` is the folder, the others are in its brokerIdentity.
_STORE: Final = """
    string: store cluster broker
    long: broker_id
"""
_PLACE: Final = """
    string: topic
    int: queue_id
    long: queue_offset
"""
_RECORD: Final = """
    long: physical_offset epoch
    int: size sys_flag flag
    long: body_crc
    time: born_at store_at
    string: born_host store_host
    int: reconsume_times
    long: prepared_transaction_offset
    string: keys tags unique_key
    map: properties
    binary: body
"""
#: Columns of LIVE_TABLE, which has no folder.
TOPIC: Final = columns_of(_PLACE + "string: cluster broker" + _RECORD)
TABLES: Final[dict[str, pa.Schema]] = {
    "messages": columns_of(_STORE + _PLACE + _RECORD),
    "consumequeue": columns_of(_STORE + """
        string: topic
        int: queue_id
        long: queue_offset physical_offset
        int: size
        long: tags_code epoch
    """),
    "index": columns_of(_STORE + """
        string: file
        int: entry slot key_hash
        long: physical_offset
        time: store_at
        int: previous_entry
        long: epoch
    """),
    "offsets": columns_of(_STORE + """
        string: group topic
        int: queue_id
        long: offset max_offset lag
    """),
    "epochs": columns_of(_STORE + """
        long: epoch start_offset end_offset confirm_offset
        bool: from_backup
    """),
    "history": pa.schema([
        *columns_of("string: file controller; long: line_offset"),
        *((column.name, column.type) for column in HISTORY_COLUMNS),
    ]),
}  # fmt: skip


def table_schema(table: str, columns: Sequence[str], *, with_corrupt: bool) -> pa.Schema:
    """The schema of a read: the wanted columns in the wanted order (none named: all).

    With `with_corrupt` also the column `corrupt`, named or not. Raises ValueError, which names what
    is allowed, for an unknown column.
    """
    every = TABLES[table]
    if with_corrupt:
        every = every.append(pa.field(CORRUPT, _CORRUPT_TYPE))
    always = (CORRUPT,) if with_corrupt else ()
    return wanted_columns(table, every, columns, always) if columns else every


def wanted_columns(
    table: str, every: pa.Schema, columns: Sequence[str], always: Sequence[str] = ()
) -> pa.Schema:
    """Those of `columns` and `always` in that order. Raises ValueError, which names them all."""
    unknown = [name for name in columns if name not in every.names]
    if unknown:
        raise ValueError(
            f"columns={','.join(columns)!r}: table {table} has no {', '.join(unknown)}; "
            f"it has {', '.join(every.names)}"
        )
    if len(set(columns)) < len(columns):
        raise ValueError(f"columns={','.join(columns)!r}: a column is named twice")
    # Without `corrupt` a damaged stretch would look like a row.
    return pa.schema([every.field(name) for name in dict.fromkeys((*columns, *always))])


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
    outside = (values_ms > TIME_MS_MAX) | (values_ms < _TIME_MS_MIN)
    if missing is not None:
        outside = outside | missing
    us = np.where(outside, 0, values_ms) * _US_PER_MS
    return pa.array(us, pa.int64(), mask=outside if outside.any() else None).cast(TIMESTAMP)


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
