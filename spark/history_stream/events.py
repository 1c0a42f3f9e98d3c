"""Messages of BATON_SYS_HISTORY as rows of the table `history`.

What a line leaves out has the value that `spark.history_table` gives it: the same event is the same
row, whether it was read from a file or from the topic. The file's own columns are null here.
"""

from __future__ import annotations

from typing import Final

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_type
from pyspark.sql.types import LongType, StructType

from protocol.history_message import HISTORY_AFTER
from spark.history_stream.seen import PART_BITS
from spark.schemas import TABLES

_OF_FILE: Final = ("file", "controller", "line_offset")
_TIME_MIN_MS: Final = -62_135_596_800_000
_TIME_MAX_MS: Final = 253_402_300_799_999
"""Of the years 1 and 9999."""
_ZERO_LEFT_OUT: Final = (
    "part", "broker_id", "master_epoch", "sync_state_set_epoch", "controller_epoch",
    "master_before",
)  # fmt: skip
_UNKNOWN_IS_MINUS_ONE: Final = ("max_offset", "confirm_offset", "silent_ms")

SOURCE_COLUMNS: Final = ("broker", "queue_id", "queue_offset", "store_at", "body", "properties")
INDEX: Final = ("broker", "queue_id", "queue_offset", "log", "position", "after")
OUTPUT: Final = (*TABLES["history"].names, "queue_offset", "store_at", "group", "day")
"""Table history, where and when the event was stored, and what the output is partitioned by:
`group` is the broker group (null for events of the controllers alone), `day` the UTC day."""


def events(messages: DataFrame) -> DataFrame:
    """OUTPUT and INDEX of messages with SOURCE_COLUMNS. `log` is null for what is no event."""
    line = F.from_json(F.col("body").cast("string"), _line_schema())
    parsed = messages.withColumn("line", line)
    named = all_of(
        F.col(f"line.{name}").isNotNull() for name in ("log", "raft_index", "time_ms", "kind")
    )
    columns = [
        F.when(named, F.col("line.log")).alias("log") if field.name == "log" else _column(field)
        for field in TABLES["history"]
    ]
    part = F.coalesce("line.part", F.lit(0))
    after = F.element_at("properties", HISTORY_AFTER)
    index_after, part_after = (F.split_part(after, F.lit("-"), F.lit(at)) for at in (1, 2))
    return parsed.select(
        *columns,
        F.col("broker"),
        F.col("queue_id").cast("bigint").alias("queue_id"),
        "queue_offset",
        "store_at",
        _position(F.col("line.raft_index"), part).alias("position"),
        _position(index_after.try_cast("bigint"), part_after.try_cast("int")).alias("after"),
        F.col("line.broker_name").alias("group"),
        F.to_date(_moment(F.col("line.time_ms"))).alias("day"),
    )


def _moment(time_ms: Column) -> Column:
    """Null for what no timestamp can hold: anybody may send to the topic of a Java broker."""
    return F.timestamp_millis(F.when(time_ms.between(_TIME_MIN_MS, _TIME_MAX_MS), time_ms))


def _position(raft_index: Column, part: Column) -> Column:
    return F.shiftleft(raft_index, PART_BITS) + part


def all_of(conditions: object) -> Column:
    """Whether all of them hold."""
    joined = F.lit(True)
    for each in conditions:  # type: ignore[attr-defined]
        joined = joined & each
    return joined


def _line_schema() -> StructType:
    schema = StructType()
    for field in TABLES["history"]:
        if field.name not in _OF_FILE:
            kind = LongType() if _is_time(field) else from_arrow_type(field.type)
            schema.add(_in_line(field), kind)
    return schema


def _is_time(field: pa.Field) -> bool:
    return pa.types.is_timestamp(field.type)


def _in_line(field: pa.Field) -> str:
    """`time` and `proposed_at` stand there as `time_ms` and `proposed_ms`."""
    return field.name.removesuffix("_at") + "_ms" if _is_time(field) else str(field.name)


def _column(field: pa.Field) -> Column:
    name = str(field.name)
    if name in _OF_FILE:
        return F.lit(None).cast(from_arrow_type(field.type)).alias(name)
    value = F.col(f"line.{_in_line(field)}")
    if _is_time(field):
        value = _moment(F.when(value != 0, value))
    elif name in _UNKNOWN_IS_MINUS_ONE:
        value = F.when(value != -1, value)
    elif name in _ZERO_LEFT_OUT:
        value = F.coalesce(value, F.lit(0).cast(from_arrow_type(field.type)))
    elif name == "unclean":
        value = F.coalesce(value, F.lit(False))
    return value.alias(name)


__all__ = ["INDEX", "OUTPUT", "SOURCE_COLUMNS", "all_of", "events"]
