"""Lists of acknowledged sends: read, checked, and counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Final

from pyarrow import fs
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from batonmq.spark.audit.acked_lines import ALLOWED, COLUMNS, first_fault, has_torn_end, place_of
from batonmq.spark.audit.kept import Kept
from batonmq.spark.read.storage import locate

_BAD: Final = "_bad_line"
_FILE: Final = "_bad_file"
_ROW: Final = "_bad_row"
_FILES_MAX: Final = 1000
_NUMBERS: Final = ("tinyint", "smallint", "int", "bigint", "float", "double")


@dataclass(slots=True)
class AckedList:
    """The entries of lists with the columns `COLUMNS`, kept by Spark; `count` of them.

    `numbered`: those with a place and a producer's number. `notes`: what was left out.
    """

    entries: DataFrame
    count: int
    numbered: int
    notes: list[str] = field(default_factory=list)


def read_acked(session: SparkSession, patterns: Sequence[str], kept: Kept) -> AckedList:
    """The entries of lists: JSON lines, or Parquet or CSV by the names; folders of one kind.

    A last line without its end, as a killed writer leaves it, is left out with a note. Raises
    ValueError, FileNotFoundError for what is no such list.
    """
    frames = [_read(session, path) for pattern in patterns for path in _paths(pattern)]
    every = kept.keep(reduce(DataFrame.union, frames))
    good = F.col(_FILE).isNull()
    row = every.agg(
        F.count_if(good).alias("count"),
        F.count_if(good & is_numbered()).alias("numbered"),
        F.count_if(~good).alias("bad"),
    ).first()
    assert row is not None, "an aggregate without groups has one row"
    entries = every.where(good).drop(_BAD, _FILE, _ROW)
    notes = _torn(every.where(~good)) if row.bad else []
    return AckedList(entries, row["count"], row.numbered, notes)


def size_of_lists(patterns: Sequence[str]) -> int:
    """The bytes of all files of lists. Raises FileNotFoundError if nothing matches, OSError."""
    size = 0
    for path in (path for pattern in patterns for path in _paths(pattern)):
        storage, inner = locate(path)
        below = inner if _is_file(path) else fs.FileSelector(inner, recursive=True)
        found = storage.file_system.get_file_info(below)
        infos = [found] if isinstance(found, fs.FileInfo) else found
        size += sum(info.size or 0 for info in infos if info.is_file)
    return size


def is_placed() -> Column:
    """Whether an entry names a place; its group is another question."""
    names = ("topic", "queue_id", "queue_offset")
    return reduce(Column.__and__, [F.col(name).isNotNull() for name in names])


def is_numbered() -> Column:
    """Whether an entry can be put in the order in which its producer sent it."""
    return F.col("producer").isNotNull() & F.col("number").isNotNull() & is_placed()


def _torn(bad: DataFrame) -> list[str]:
    """Notes about torn last lines. Raises ValueError if anything else is wrong."""
    files = (
        bad.groupBy(_FILE).agg(F.count("*").alias("lines"), F.min(_ROW).alias("row"))
        .orderBy(_FILE).limit(_FILES_MAX).collect()
    )  # fmt: skip
    notes = []
    for each in files:
        url = each[_FILE]
        path = place_of(url)[1]
        if each.row is not None:
            raise ValueError(f"{path}, row {each.row}: it cannot be used; {ALLOWED}")
        sentence, is_last = first_fault(url)
        if each.lines > 1 or not is_last or not has_torn_end(url):
            raise ValueError(sentence)
        notes.append(f"{path} ends within a line, which is left out: its writer was killed")
    if len(files) == _FILES_MAX:
        raise ValueError(f"{_FILES_MAX} files of the acknowledged list have bad lines: {notes[0]}")
    return notes


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
    row = F.lit(None)
    if any(name.endswith(".parquet") for name in names):
        frame = session.read.parquet(path)
        _check_types(frame, path)
        row = F.col("_metadata.row_index")
    elif any(name.endswith((".csv", ".csv.gz")) for name in names) and (
        columns := session.read.option("header", "true").csv(path).columns
    ):  # without a line there is no header either
        plain = session.read.option("header", "true")
        schema = ", ".join(f"`{name}` string" for name in (*columns, _BAD))
        frame = (
            plain.option("columnNameOfCorruptRecord", _BAD)
            .option("enforceSchema", "false")
            .option("columnPruning", "false")
            .schema(schema)
            .csv(path)
        )
    else:
        schema = ", ".join(f"`{name}` {kind}" for name, kind in (*COLUMNS, (_BAD, "string")))
        frame = session.read.option("columnNameOfCorruptRecord", _BAD).schema(schema).json(path)
    have = set(frame.columns)
    if not have & {"unique_key", "msg_id", "queue_offset"}:
        raise ValueError(f"{path} has the columns {', '.join(frame.columns)}; {ALLOWED}")
    typed = [
        (F.col(name).try_cast(kind) if name in have else F.lit(None).cast(kind)).alias(name)
        for name, kind in COLUMNS
    ]
    bad = F.col(_BAD).isNotNull() if _BAD in have else F.lit(False)
    for name, kind in COLUMNS:
        if name in have and kind != "string":
            bad |= F.col(name).isNotNull() & F.col(name).try_cast(kind).isNull()
    named = [
        reduce(Column.__and__, [F.col(name).isNotNull() for name in which])
        for which in (("unique_key",), ("msg_id",), ("topic", "queue_id", "queue_offset"))
        if set(which) <= have
    ]
    bad |= ~reduce(Column.__or__, named, F.lit(False))
    return frame.select(
        *typed,
        F.when(bad, F.col("_metadata.file_path")).alias(_FILE),
        F.when(bad, row).cast("bigint").alias(_ROW),
        (F.col(_BAD) if _BAD in have else F.lit(None).cast("string")).alias(_BAD),
    )


def _check_types(frame: DataFrame, path: str) -> None:
    types = dict(frame.dtypes)
    for name, kind in COLUMNS:
        theirs = types.get(name, kind)
        fits = theirs == "string" if kind == "string" else theirs in _NUMBERS
        if not fits and theirs != "void":
            wanted = "text" if kind == "string" else "numbers"
            raise ValueError(f"{path}: its column {name} is {theirs}, not {wanted}; {ALLOWED}")


def _is_file(path: str) -> bool:
    storage, inner = locate(path)
    return bool(storage.file_system.get_file_info(inner).is_file)


__all__ = ["AckedList", "is_numbered", "is_placed", "read_acked", "size_of_lists"]
