"""The columns of every table: names, types and their order. `docs/spark.md` explains them.

Arrow types as Spark expects them of a Python data source, all nullable. Times are microseconds in
UTC; where a store keeps milliseconds, no digit is lost. Free of Spark.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
from msgspec.structs import FieldInfo, fields

from batonmq.history.event import TIMES, HistoryEvent
from batonmq.spark.read.arrow_parts import TIMESTAMP

_STRING: Final = pa.string()
_INT: Final = pa.int32()
_LONG: Final = pa.int64()

# Which store a row comes from; `store` is the folder, the others are in its brokerIdentity.
STORE_COLUMNS: Final = (
    ("store", _STRING),
    ("cluster", _STRING),
    ("broker", _STRING),
    ("broker_id", _LONG),
)
#: Behind the columns of a table that is read with mode PERMISSIVE: what was skipped, and why.
CORRUPT: Final = "corrupt"
CORRUPT_TYPE: Final = pa.struct(
    [("file", _STRING), ("offset", _LONG), ("bytes", _LONG), ("reason", _STRING)]
)
PROPERTIES_TYPE: Final = pa.map_(_STRING, _STRING)
#: The table that is no file but a running cluster's; `batonmq.spark.live.columns` has its columns.
LIVE_TABLE: Final = "topic"


@dataclass(frozen=True, slots=True)
class HistoryColumn:
    """A field of HistoryEvent as a column of table `history`.

    `field` and `field_type` are of the line of JSON, `name` and `type` of the table. A row has null
    where the line has `null_for`, and `absent` where the line lacks the field.
    """

    field: str
    field_type: pa.DataType
    name: str
    type: pa.DataType
    null_for: int | None = None
    absent: int | bool | None = None

    @property
    def is_time(self) -> bool:
        return self.type == TIMESTAMP


def _history_column(field: FieldInfo) -> HistoryColumn:
    name = field.name
    if name in TIMES:
        column = "time" if name == "time_ms" else name.removesuffix("_ms") + "_at"
        return HistoryColumn(name, _LONG, column, TIMESTAMP, null_for=0)
    if field.type is str:
        return HistoryColumn(name, _STRING, name, _STRING)
    if field.type is bool:
        return HistoryColumn(name, pa.bool_(), name, pa.bool_(), absent=False)
    if field.type is int:
        number = _INT if name == "part" else _LONG
        if field.default == -1:
            return HistoryColumn(name, number, name, number, null_for=-1)
        absent = None if field.required else field.default
        return HistoryColumn(name, number, name, number, absent=absent)
    ids = pa.list_(_LONG)
    return HistoryColumn(name, ids, name, ids)


#: The fields of an event in their order; `gap` is of a file, not of the event.
HISTORY_COLUMNS: Final = tuple(
    _history_column(field) for field in fields(HistoryEvent) if field.name != "gap"
)

TABLES: Final[dict[str, pa.Schema]] = {
    "messages": pa.schema(
        [
            *STORE_COLUMNS,
            ("topic", _STRING),
            ("queue_id", _INT),
            ("queue_offset", _LONG),
            ("physical_offset", _LONG),
            ("epoch", _LONG),
            ("size", _INT),
            ("sys_flag", _INT),
            ("flag", _INT),
            ("body_crc", _LONG),
            ("born_at", TIMESTAMP),
            ("store_at", TIMESTAMP),
            ("born_host", _STRING),
            ("store_host", _STRING),
            ("reconsume_times", _INT),
            ("prepared_transaction_offset", _LONG),
            ("keys", _STRING),
            ("tags", _STRING),
            ("unique_key", _STRING),
            ("properties", PROPERTIES_TYPE),
            ("body", pa.binary()),
        ]
    ),
    "consumequeue": pa.schema(
        [
            *STORE_COLUMNS,
            ("topic", _STRING),
            ("queue_id", _INT),
            ("queue_offset", _LONG),
            ("physical_offset", _LONG),
            ("size", _INT),
            ("tags_code", _LONG),
            ("epoch", _LONG),
        ]
    ),
    "index": pa.schema(
        [
            *STORE_COLUMNS,
            ("file", _STRING),
            ("entry", _INT),
            ("slot", _INT),
            ("key_hash", _INT),
            ("physical_offset", _LONG),
            ("store_at", TIMESTAMP),
            ("previous_entry", _INT),
            ("epoch", _LONG),
        ]
    ),
    "offsets": pa.schema(
        [
            *STORE_COLUMNS,
            ("group", _STRING),
            ("topic", _STRING),
            ("queue_id", _INT),
            ("offset", _LONG),
            ("max_offset", _LONG),
            ("lag", _LONG),
        ]
    ),
    "epochs": pa.schema(
        [
            *STORE_COLUMNS,
            ("epoch", _LONG),
            ("start_offset", _LONG),
            ("end_offset", _LONG),
            ("confirm_offset", _LONG),
            ("from_backup", pa.bool_()),
        ]
    ),
    "history": pa.schema(
        [
            ("file", _STRING),
            ("controller", _STRING),
            ("line_offset", _LONG),
            *((column.name, column.type) for column in HISTORY_COLUMNS),
        ]
    ),
}


def table_schema(table: str, columns: Sequence[str], *, with_corrupt: bool) -> pa.Schema:
    """The schema of a read: the wanted columns in the wanted order (none named: all).

    With `with_corrupt` also the column `corrupt`, named or not.

    Raises ValueError, which names what is allowed, for an unknown table or column.
    """
    if table not in TABLES:
        raise ValueError(f"table={table!r}: it must be one of {', '.join((*TABLES, LIVE_TABLE))}")
    every = TABLES[table]
    if with_corrupt:
        every = every.append(pa.field(CORRUPT, CORRUPT_TYPE))
    if not columns:
        return every
    unknown = [name for name in columns if name not in every.names]
    if unknown:
        raise ValueError(
            f"columns={','.join(columns)!r}: table {table} has no {', '.join(unknown)}; "
            f"it has {', '.join(every.names)}"
        )
    if len(set(columns)) < len(columns):
        raise ValueError(f"columns={','.join(columns)!r}: a column is named twice")
    if with_corrupt and CORRUPT not in columns:
        columns = (*columns, CORRUPT)  # else a damaged stretch would look like a row
    return pa.schema([every.field(name) for name in columns])
