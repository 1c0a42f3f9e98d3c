"""Reads a table without Spark, and tells good rows from damage."""

from pathlib import Path

from batonmq.spark.read.options import ReadOptions
from batonmq.spark.read.reading import Read


def read(path, **options):
    """All rows of a table."""
    work = Read(ReadOptions.from_mapping({"path": str(path), **options}))
    rows = []
    for batch in (batch for each in work.plan() for batch in work.run(each)):
        batch.validate(full=True)
        assert batch.schema == work.schema
        rows += batch.to_pylist()
    return rows


def told(rows):
    """(numbers of good messages, damaged stretches as (file, offset, bytes))."""
    good = [row["queue_offset"] for row in rows if row["corrupt"] is None]
    bad = [row["corrupt"] for row in rows if row["corrupt"] is not None]
    return good, [(Path(each["file"]).name, each["offset"], each["bytes"]) for each in bad]
