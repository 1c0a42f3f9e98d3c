"""What is read: the histories of all controllers and the epoch files of all brokers, as told.

A line that is no event, or a file that cannot be read, stays in these frames as a row whose column
`corrupt` says why: the job tells it as a finding and goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema

from spark.history_table import controller_of
from spark.options import ReadOptions
from spark.reading import Read
from spark.schemas import CORRUPT, TABLES, table_schema
from spark.selection import Selection

CONTROLLERS_MAX: Final = 63
"""As many as a bit mask of 64 bits has room for."""
STREAM: Final = "stream"
"""Who tells an event that was read without the name of its controller."""


def told_in_files(session: SparkSession, paths: Sequence[str], *, small: bool = False) -> DataFrame:
    """The table `history` of those files, damaged lines too. Raises OSError, ValueError.

    `small`: they are read here, not in Python processes of Spark.
    """
    return _read(session, "history", paths, small)


def told_in_parquet(session: SparkSession, paths: Sequence[str]) -> DataFrame:
    """The same of Parquet folders with the columns of table `history`, some of them may be missing.

    Raises ValueError for a folder that has not even what names an event.
    """
    found = session.read.parquet(*paths)
    wanted = from_arrow_schema(table_schema("history", (), with_corrupt=True))
    needed = {"log", "raft_index", "time", "kind"} - set(found.columns)
    if needed:
        raise ValueError(
            f"--history-parquet {','.join(paths)}: no column {', '.join(sorted(needed))}; it must "
            "be what stream_history writes, or the table history"
        )
    columns = [
        (F.col(field.name) if field.name in found.columns else F.lit(None))
        .cast(field.dataType)
        .alias(field.name)
        for field in wanted
    ]
    return found.select(columns).withColumn("controller", F.coalesce("controller", F.lit(STREAM)))


def controllers_in_files(paths: Sequence[str]) -> list[str]:
    """The names of the controllers whose histories these paths stand for. Raises OSError."""
    plan = Read(_options("history", paths), Selection()).plan()
    files = {getattr(part, "path", "") for work in plan for part in work.parts}
    return sorted({controller_of(file) or file for file in files})


def controllers_in(told: DataFrame) -> list[str]:
    """The names of the controllers in a frame. Raises ValueError if these are too many."""
    rows = told.select("controller").distinct().limit(CONTROLLERS_MAX + 1).collect()
    return sorted(row.controller for row in rows)


def epoch_files(session: SparkSession, paths: Sequence[str], *, small: bool = False) -> DataFrame:
    """The table `epochs` of those stores, unreadable files too. Raises OSError, ValueError.

    `small`: they are read here, not in Python processes of Spark.
    """
    return _read(session, "epochs", paths, small)


def no_epoch_files(session: SparkSession) -> DataFrame:
    """The table `epochs` of no store at all."""
    schema = from_arrow_schema(table_schema("epochs", (), with_corrupt=True))
    return session.createDataFrame([], schema)


def _options(table: str, paths: Sequence[str]) -> ReadOptions:
    return ReadOptions.from_mapping(
        {"table": table, "mode": "PERMISSIVE", "paths": ",".join(paths)}
    )


def _read(session: SparkSession, table: str, paths: Sequence[str], small: bool) -> DataFrame:
    read = Read(_options(table, paths), Selection())
    plan = read.plan()  # what is missing is told before Spark is
    if small:
        rows = pa.Table.from_batches(
            [batch for work in plan for batch in read.run(work)], read.schema
        )
        return session.createDataFrame(rows)
    return (
        session.read.format("batonmq")
        .option("table", table)
        .option("mode", "PERMISSIVE")
        .option("paths", ",".join(paths))
        .load()
    )


EVENT_FIELDS: Final = tuple(
    name for name in TABLES["history"].names if name not in ("file", "controller", "line_offset")
)

__all__ = [
    "CONTROLLERS_MAX",
    "CORRUPT",
    "EVENT_FIELDS",
    "STREAM",
    "controllers_in",
    "controllers_in_files",
    "epoch_files",
    "no_epoch_files",
    "told_in_files",
    "told_in_parquet",
]
