"""The streaming query: each batch of the topic becomes one commit of the output.

Spark's checkpoint says which offsets come next, the output's own note which events are in it. The
second one decides: a batch that comes again, also under a new checkpoint, finds its events read.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Final

import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

from protocol.topic_name import HISTORY_TOPIC
from spark.history_stream.events import INDEX, OUTPUT, SOURCE_COLUMNS, events
from spark.history_stream.output import StreamOutput
from spark.history_stream.seen import Queue, Seen, Taken

LOOK_S: Final = 0.5


@dataclass(slots=True)
class Counts:
    """What a run has done so far."""

    batches: int = 0
    events: int = 0
    repeats: int = 0
    files: int = 0


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """`trigger` None: what is there now, and no more. Others as the job's options."""

    name_servers: str
    checkpoint: str
    events_max: int
    trigger: str | None


class HistoryStream:
    """One run. `tell` gets a line for each batch that brought something."""

    def __init__(self, output: StreamOutput, tell: Callable[[str], None]) -> None:
        self.counts = Counts()
        self._output = output
        self._tell = tell
        self._batch = threading.Lock()

    def run(self, session: SparkSession, plan: StreamPlan, stopping: threading.Event) -> None:
        """Until all is read (`trigger` None), or `stopping` is set: then after the present batch.

        Raises what the query failed with.
        """
        query = self._start(session, plan)
        try:
            while not query.awaitTermination(LOOK_S):
                if stopping.is_set():
                    with self._batch:
                        query.stop()
        except BaseException:
            query.stop()
            raise

    def _start(self, session: SparkSession, plan: StreamPlan) -> StreamingQuery:
        messages = (
            session.readStream.format("batonmq")
            .option("table", "topic")
            .option("topic", HISTORY_TOPIC)
            .option("nameServers", plan.name_servers)
            .option("startingOffsets", "earliest")
            .option("columns", ",".join(SOURCE_COLUMNS))
            .option("maxOffsetsPerTrigger", str(plan.events_max))
            .load()
        )
        writer = (
            events(messages)
            .writeStream.queryName("stream_history")
            .option("checkpointLocation", plan.checkpoint)
            .foreachBatch(self._take)
        )
        if plan.trigger is None:
            return writer.trigger(availableNow=True).start()
        return writer.trigger(processingTime=plan.trigger).start()

    def _take(self, batch: DataFrame, _: int) -> None:
        with self._batch:
            batch.persist()  # looked at twice
            try:
                self._commit(batch)
            finally:
                batch.unpersist()

    def _commit(self, batch: DataFrame) -> None:
        index = batch.select(*INDEX, "time").toArrow()
        # What is read counts once it is committed: a copy until then.
        seen = Seen.from_json(self._output.seen.to_json())
        taken = seen.take(index)
        files = 0
        if taken.fresh:
            _write(batch.where(_new(taken)), str(self._output.begin()))
            files = self._output.commit(seen, taken.fresh)
            newest = pc.max(index["time"]).as_py()
            self._tell_batch(taken, newest.timestamp())
        self._count(taken, files)

    def _count(self, taken: Taken, files: int) -> None:
        self.counts.batches += 1
        self.counts.events += taken.fresh
        self.counts.repeats += taken.repeats
        self.counts.files += files

    def _tell_batch(self, taken: Taken, newest_s: float) -> None:
        repeats = f", {taken.repeats} repeats" if taken.repeats else ""
        self._tell(
            f"{taken.fresh} events{repeats}; {self._output.rows} in all; "
            f"the newest is {max(0.0, time.time() - newest_s):.0f} s old"
        )


def _write(rows: DataFrame, folder: str) -> None:
    """One file for each broker group and day, in the order of the log."""
    (
        rows.select(*OUTPUT)
        .repartition("group", "day")
        .sortWithinPartitions("group", "day", "log", "raft_index", "part")
        .write.partitionBy("group", "day")
        .parquet(folder)
    )


def _new(taken: Taken) -> Column:
    """The rows that are new."""
    return F.col("log").isNotNull() & reduce(
        or_, (_in(queue, ranges) for queue, ranges in taken.ranges.items())
    )


def _in(queue: Queue, ranges: list[tuple[int, int]]) -> Column:
    offset = F.col("queue_offset")
    places = reduce(or_, ((offset >= begin) & (offset < end) for begin, end in ranges))
    return (F.col("broker") == queue[0]) & (F.col("queue_id") == queue[1]) & places


__all__ = ["Counts", "HistoryStream", "StreamPlan"]
