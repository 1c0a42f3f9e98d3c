"""Lists of what producers were told: where they lie, which columns they have."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Final

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.storagelevel import StorageLevel

from spark.storage import locate

#: Columns of a list, any of which may be absent; others are ignored.
COLUMNS: Final = (
    ("topic", "string"),
    ("broker", "string"),
    ("queue_id", "int"),
    ("queue_offset", "bigint"),
    ("unique_key", "string"),
    ("msg_id", "string"),
    ("body_crc", "bigint"),
    ("producer", "string"),
    ("number", "bigint"),
)
_BAD: Final = "_bad_line"


def read_acked(session: SparkSession, patterns: Sequence[str]) -> DataFrame:
    """The entries of lists: JSON lines, or Parquet or CSV by the names; folders of one kind.

    Raises ValueError, FileNotFoundError for what is no such list.
    """
    frames = [_read(session, path) for pattern in patterns for path in _paths(pattern)]
    entries = reduce(DataFrame.union, frames).persist(StorageLevel.DISK_ONLY)
    bad = entries.where(F.col(_BAD).isNotNull()).select(_BAD).limit(1).collect()
    if bad:
        raise ValueError(
            f"the acknowledged list has a line that is no JSON object of its columns: "
            f"{bad[0][0][:120]!r}; there are {', '.join(name for name, _ in COLUMNS)}"
        )
    placed = is_placed() & F.col("topic").isNotNull()
    useless = ~(F.col("unique_key").isNotNull() | placed | F.col("msg_id").isNotNull())
    if entries.where(useless).limit(1).collect():
        raise ValueError(
            "the acknowledged list has an entry without unique_key, without msg_id, and without "
            "topic, queue_id and queue_offset: one of these must be there"
        )
    return entries.drop(_BAD)


def is_placed() -> Column:
    return F.col("queue_id").isNotNull() & F.col("queue_offset").isNotNull()


def _paths(pattern: str) -> list[str]:
    storage, inner = locate(pattern)
    found = storage.glob(inner)
    if not found or not all(storage.exists(path) for path in found):
        raise FileNotFoundError(f"{pattern}: nothing matches")
    scheme = pattern.partition("://")[0] + "://" if "://" in pattern else "file://"
    return [f"{scheme}{path}" for path in found]


def _read(session: SparkSession, path: str) -> DataFrame:
    storage, inner = locate(path)
    names = (
        [path, *(str(info.path) for info in storage.children(inner))]
        if not _is_file(path)
        else [path]
    )
    reader = session.read
    if any(name.endswith(".parquet") for name in names):
        frame = reader.parquet(path)
    elif any(name.endswith((".csv", ".csv.gz")) for name in names):
        frame = reader.option("header", "true").csv(path)
    else:
        schema = ", ".join(f"`{name}` {kind}" for name, kind in (*COLUMNS, (_BAD, "string")))
        frame = reader.option("columnNameOfCorruptRecord", _BAD).schema(schema).json(path)
    have = set(frame.columns)
    if not have & {"unique_key", "msg_id", "queue_offset"}:
        raise ValueError(
            f"{path} has the columns {', '.join(frame.columns)}; an acknowledged list has "
            "unique_key, or msg_id, or topic, queue_id and queue_offset"
        )
    return frame.select(
        *(
            (F.col(name) if name in have else F.lit(None)).cast(kind).alias(name)
            for name, kind in (*COLUMNS, (_BAD, "string"))
        )
    )


def _is_file(path: str) -> bool:
    storage, inner = locate(path)
    return bool(storage.file_system.get_file_info(inner).is_file)


__all__ = ["COLUMNS", "is_placed", "read_acked"]
