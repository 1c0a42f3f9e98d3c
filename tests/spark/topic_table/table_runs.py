"""Batches of a topic as the query hands them over, without Spark; what a table has."""

import json
import uuid
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa

from batonmq.spark.topic_table.rows import MESSAGE, OWN
from batonmq.spark.topic_table.stream import TablePlan, TopicStream
from batonmq.spark.topic_table.table_formats import open_table, read_rows

BEGIN = datetime(2026, 11, 28, 23, 59, 59, 500_000, tzinfo=UTC)


def messages(bodies, *, first=0, queue=0, at=BEGIN):
    """A message stored every 100 ms."""
    count = len(bodies)
    times = pa.array([at + timedelta(milliseconds=100 * n) for n in range(count)],
                     pa.timestamp("us", "Etc/UTC"))  # fmt: skip
    offsets = range(first, first + count)
    columns = {
        "broker": pa.array(["broker-a"] * count), "queue_id": pa.array([queue] * count, pa.int32()),
        "queue_offset": pa.array(offsets), "physical_offset": pa.array([1000 * o for o in offsets]),
        "epoch": pa.array([1] * count), "store_at": times, "born_at": times,
        "keys": pa.array([f"k{o}" for o in offsets]), "tags": pa.array([None] * count, pa.string()),
        "unique_key": pa.array([f"u{queue}-{o}" for o in offsets]),
        "body": pa.array(bodies, pa.binary()),
    }  # fmt: skip
    assert set(columns) == {*MESSAGE.values(), "body"}
    return pa.record_batch(columns)


def checkpoint_of(stream):
    return Path(stream.checkpoint.removeprefix("file://"))


def begin(stream, batch=None, *, done=False):
    """What Spark writes before a query begins, before it reads a batch, and when that is done."""
    folder = checkpoint_of(stream)
    (folder / "offsets").mkdir(parents=True, exist_ok=True)
    if not (folder / "metadata").exists():
        (folder / "metadata").write_text(json.dumps({"id": str(uuid.uuid4())}))
    if batch is not None:
        (folder / "offsets" / str(batch)).touch()
    if done:
        (folder / "commits").mkdir(exist_ok=True)
        (folder / "commits" / str(batch)).touch()


class Batch:
    """A batch of the query, its messages in as many tasks as there are parts."""

    def __init__(self, *parts):
        self.parts = parts

    def mapInArrow(self, function, schema):
        assert schema == "report binary"
        self.rows = [
            (row["report"],)
            for part in self.parts
            for batch in function(iter([part]))
            for row in batch.to_pylist()
        ]
        return self

    def collect(self):
        return self.rows


class Runs:
    """Tables below a folder, and runs over them."""

    def __init__(self, folder, form="delta"):
        self.folder, self.form, self.said = folder, form, []
        self.catalog = {}
        if form == "iceberg":
            folder.mkdir(parents=True, exist_ok=True)
            self.catalog = {"type": "sql", "uri": f"sqlite:///{folder}/catalog.db",
                            "warehouse": f"file://{folder}/warehouse"}  # fmt: skip

    def table(self, name="t"):
        place = str(self.folder / name) if self.form == "delta" else f"lake.{name}"
        return open_table(place, self.form, self.catalog)

    def run(self, name="t", **plan):
        given = {"name_servers": "h:1", "topic": "Orders", "checkpoint": "", **plan}
        return TopicStream(self.table(name), TablePlan(**given), self.said.append)

    def begun(self, *given, **plan):
        """A run whose query Spark has begun."""
        stream = self.run(*given, **plan)
        begin(stream)
        return stream

    def rows(self, name="t", table=None):
        """The rows, by queue and offset; none of a table that is not there yet."""
        table = table or self.table(name)
        if table.about() is None:
            return []
        columns = pa.schema([*OWN, *(each.remove_metadata() for each in table.fields())])
        found = [
            row
            for file in table.files()
            for batch in read_rows(file, columns)
            for row in batch.to_pylist()
        ]
        return sorted(found, key=lambda row: (row["_queue_id"], row["_queue_offset"]))
