"""Messages of BATON_SYS_HISTORY as rows of the table `history`.

What a line leaves out has the value that `spark.history_table` gives it: the same event is the same
row, whether it was read from a file or from the topic. The file's own columns are null here.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_type
from pyspark.sql.types import StructType

from batonmq.history.event import REQUIRED
from batonmq.history.message import HISTORY_AFTER
from batonmq.spark.history.stream_seen import PART_BITS
from batonmq.spark.read.schemas import HISTORY_COLUMNS, TABLES, HistoryColumn

_TIME_MIN_MS: Final = -62_135_596_800_000
_TIME_MAX_MS: Final = 253_402_300_799_999
"""Of the years 1 and 9999."""
_FIELDS: Final = {column.name for column in HISTORY_COLUMNS}

SOURCE_COLUMNS: Final = ("broker", "queue_id", "queue_offset", "store_at", "body", "properties")
INDEX: Final = ("broker", "queue_id", "queue_offset", "log", "position", "after")
OUTPUT: Final = (*TABLES["history"].names, "queue_offset", "store_at", "group", "day")
"""Table history, where and when the event was stored, and what the output is partitioned by:
`group` is the broker group (null for events of the controllers alone), `day` the UTC day."""


def events(messages: DataFrame) -> DataFrame:
    """OUTPUT and INDEX of messages with SOURCE_COLUMNS. `log` is null for what is no event."""
    line = F.from_json(F.col("body").cast("string"), _line_schema())
    parsed = messages.withColumn("line", line)
    named = all_of(F.col(f"line.{name}").isNotNull() for name in REQUIRED)
    of_file = [
        F.lit(None).cast(from_arrow_type(field.type)).alias(field.name)
        for field in TABLES["history"]
        if field.name not in _FIELDS
    ]
    columns = [
        F.when(named, F.col("line.log")).alias("log") if column.name == "log" else _column(column)
        for column in HISTORY_COLUMNS
    ]
    part = F.coalesce("line.part", F.lit(0))
    after = F.element_at("properties", HISTORY_AFTER)
    index_after, part_after = (F.split_part(after, F.lit("-"), F.lit(at)) for at in (1, 2))
    return parsed.select(
        *of_file,
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
    for column in HISTORY_COLUMNS:
        schema.add(column.field, from_arrow_type(column.field_type))
    return schema


def _column(column: HistoryColumn) -> Column:
    value = F.col(f"line.{column.field}")
    if column.null_for is not None:
        value = F.when(value != column.null_for, value)
    if column.is_time:
        value = _moment(value)
    if column.absent is not None:
        value = F.coalesce(value, F.lit(column.absent).cast(from_arrow_type(column.type)))
    return value.alias(column.name)
