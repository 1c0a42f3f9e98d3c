"""What is read: the histories of all controllers and the epoch files of all brokers, as they are.

A line that is no event, or a file that cannot be read, stays in these frames as a row whose column
`corrupt` has the reason: the job makes it a finding and continues.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema

from batonmq.history.file import controller_of
from batonmq.spark.options import ReadOptions
from batonmq.spark.reading import Read, Work
from batonmq.spark.schemas import CORRUPT, TABLES, table_schema
from batonmq.spark.selection import Selection
from batonmq.spark.store_facts import StoreFacts

CONTROLLERS_MAX: Final = 63
"""As many as a bit mask of 64 bits has room for."""
STREAM: Final = "stream"
"""The controller of an event that was read without its name."""


def told_in_files(session: SparkSession, paths: Sequence[str], *, small: bool = False) -> DataFrame:
    """The table `history` of those files, damaged lines too. Raises OSError, ValueError.

    `small`: they are read here, not in Python processes of Spark.
    """
    read = Read(_options("history", paths), Selection())
    return _rows(session, read, read.plan(), small)


def told_in_parquet(session: SparkSession, paths: Sequence[str]) -> DataFrame:
    """The same of Parquet folders with the columns of table `history`, some of them may be missing.

    Raises ValueError for a folder that has not even what names an event.
    """
    try:
        found = session.read.parquet(*paths)
    except AnalysisException as error:
        raise ValueError(
            f"--history-parquet {','.join(paths)}: no Parquet files are there; it must be what "
            "stream_history writes, or the table history"
        ) from error
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
    """The names of the controllers whose histories these paths match. Raises OSError."""
    plan = Read(_options("history", paths), Selection()).plan()
    files = {getattr(part, "path", "") for work in plan for part in work.parts}
    return sorted({controller_of(file) or file for file in files})


def controllers_in(lines: DataFrame) -> list[str]:
    """The names of the controllers in a frame. Raises ValueError if these are too many."""
    rows = lines.select("controller").distinct().limit(CONTROLLERS_MAX + 1).collect()
    return sorted(row.controller for row in rows)


@dataclass(frozen=True, slots=True)
class EpochFiles:
    """`rows`: the table `epochs` of stores, unreadable files too.

    What is not in it: `without_list`, the stores (folder, broker or None) that have no epoch file.
    What cannot be compared: `unnamed`, the folders of stores with a list and no brokerIdentity.
    """

    rows: DataFrame
    without_list: tuple[tuple[str, str | None], ...] = ()
    unnamed: tuple[str, ...] = ()


def epoch_files(session: SparkSession, paths: Sequence[str], *, small: bool = False) -> EpochFiles:
    """The epoch files of those stores; of none without paths. Raises OSError, ValueError.

    `small`: they are read here, not in Python processes of Spark.
    """
    if not paths:
        schema = from_arrow_schema(table_schema("epochs", (), with_corrupt=True))
        return EpochFiles(session.createDataFrame([], schema))
    read = Read(_options("epochs", paths), Selection())
    plan = read.plan()
    stores = [part for work in plan for part in work.parts if isinstance(part, StoreFacts)]
    bare = [facts for facts in stores if not facts.epochs and not facts.epochs_fault]
    return EpochFiles(
        _rows(session, read, plan, small),
        tuple((facts.path, facts.broker) for facts in bare),
        tuple(facts.path for facts in stores if facts.epochs and facts.broker is None),
    )


def _options(table: str, paths: Sequence[str]) -> ReadOptions:
    return ReadOptions.from_mapping(
        {"table": table, "mode": "PERMISSIVE", "paths": json.dumps(list(paths))}
    )


def _rows(session: SparkSession, read: Read, plan: Sequence[Work], small: bool) -> DataFrame:
    if small:
        # A batch without rows would end the stream for Spark: all behind it would be lost.
        batches = [batch for work in plan for batch in read.run(work) if batch.num_rows]
        if not batches:
            return session.createDataFrame([], from_arrow_schema(read.schema))
        return session.createDataFrame(pa.Table.from_batches(batches, read.schema))
    return (
        session.read.format("batonmq")
        .option("table", read.options.table)
        .option("mode", "PERMISSIVE")
        .option("paths", json.dumps(list(read.options.paths)))
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
    "EpochFiles",
    "controllers_in",
    "controllers_in_files",
    "epoch_files",
    "told_in_files",
    "told_in_parquet",
]
