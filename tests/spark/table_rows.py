"""Reads tables and topics without Spark, and separates good rows from damage."""

from pathlib import Path

from batonmq.spark.live.options import TopicOptions
from batonmq.spark.live.topic_read import TopicRead
from batonmq.spark.read.options import ReadOptions
from batonmq.spark.read.reading import Read


def read(path, **options):
    """All rows of a table."""
    return taken(Read(ReadOptions.from_mapping({"path": str(path), **options})))


def topic(options):
    """All rows of a batch read of topics."""
    return taken(TopicRead(TopicOptions.from_mapping(options, streaming=False)))


def taken(read, plan=None):
    """The rows of a read, or of some of its work."""
    rows = []
    plan = read.plan() if plan is None else plan
    for batch in (batch for work in plan for batch in read.run(work)):
        batch.validate(full=True)
        assert batch.schema == read.schema
        rows += batch.to_pylist()
    return rows


def good_and_bad(rows):
    """(numbers of good messages, damaged stretches as (file, offset, bytes))."""
    good = [row["queue_offset"] for row in rows if row["corrupt"] is None]
    bad = [row["corrupt"] for row in rows if row["corrupt"] is not None]
    return good, [(Path(each["file"]).name, each["offset"], each["bytes"]) for each in bad]
