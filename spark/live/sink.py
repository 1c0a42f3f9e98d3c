"""The sink as Spark sees it: each task sends its rows, the driver counts what was acknowledged.

At least once: a task, or a batch of a stream, that is done again sends its rows again, each under
the unique key that it had: job, batch, partition, place in it, and a hash of the row.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import uuid
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self, TypeVar

import pyarrow as pa
import uvloop
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from batonmq.spark.live.options import SinkOptions, check_columns
from batonmq.spark.live.sink_sender import AckFile, SinkError, SinkSender, row_of, write_committed

log = logging.getLogger(__name__)

_QUERY_ID: Final = "sql.streaming.queryId"
_BATCH_ID: Final = "streaming.sql.batchId"


@dataclass(frozen=True)
class Sent(WriterCommitMessage):
    """How many messages of a partition were acknowledged."""

    job: str
    partition: int
    messages: int


class TopicWriter(DataSourceArrowWriter):
    """A batch write. Its keys begin with an id that is new for each write."""

    def __init__(self, options: SinkOptions, schema: StructType, overwrite: bool) -> None:
        _check(options, schema, overwrite)
        self._options = options
        self._job = uuid.uuid4().hex[:12]

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Sent:
        return _send(self._options, self._job, 0, iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        _committed(self._options, messages, 0)

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        _aborted(messages, 0)


class TopicStreamWriter(DataSourceStreamArrowWriter):
    """A stream's writes. Its keys begin with the query's id, which a restart keeps."""

    def __init__(self, options: SinkOptions, schema: StructType, overwrite: bool) -> None:
        _check(options, schema, overwrite)
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Sent:
        context = TaskContext.get()
        query_id = context.getLocalProperty(_QUERY_ID) if context is not None else None
        batch_id = context.getLocalProperty(_BATCH_ID) if context is not None else None
        if not query_id or not batch_id:
            raise SinkError("Spark does not pass the query and the batch to the task")
        job = uuid.UUID(query_id).hex[:12]
        return _send(self._options, job, int(batch_id), iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        _committed(self._options, messages, batchId)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        _aborted(messages, batchId)


def _check(options: SinkOptions, schema: StructType, overwrite: bool) -> None:
    if overwrite:
        raise ValueError(
            "a topic cannot be overwritten: use mode append (a stream: output mode append)"
        )
    check_columns({f.name: f.dataType.simpleString() for f in schema.fields}, options)


def _send(options: SinkOptions, job: str, batch_id: int, batches: Iterator[pa.RecordBatch]) -> Sent:
    """Sends one partition. Raises SinkError; what was acknowledged until then is written down."""
    context = TaskContext.get()
    partition = context.partitionId() if context is not None else 0
    prefix = f"{job}-{batch_id}-{partition}-"
    with AckFile(options.ack_folder, f"acks-{prefix}") as report, LoopThread() as loop:
        sender = SinkSender(options, report.add)
        number = 0
        try:
            loop.run(sender.start())
            # Requests continue while Spark makes the next batch, however long that takes.
            for batch in batches:
                rows = []
                for values in batch.to_pylist():
                    rows.append(row_of(number, prefix, values, options.topic))
                    number += 1
                loop.run(sender.add(rows))
            loop.run(sender.finish())
        finally:
            loop.run(sender.close())
    return Sent(job, partition, report.count)


def _committed(
    options: SinkOptions, messages: Sequence[WriterCommitMessage | None], batch_id: int
) -> None:
    sent = [message for message in messages if isinstance(message, Sent)]
    count = sum(each.messages for each in sent)
    job = sent[0].job if sent else "none"
    log.info("sink_committed job=%s batch=%d messages=%d", job, batch_id, count)
    if options.ack_folder and sent:
        partitions = {str(each.partition): each.messages for each in sent}
        told = {"messages": count, "partitions": partitions}
        write_committed(options.ack_folder, job, batch_id, told)


def _aborted(messages: Sequence[WriterCommitMessage | None], batch_id: int) -> None:
    sent = [message for message in messages if isinstance(message, Sent)]
    log.warning(
        "sink_aborted batch=%d partitions_done=%d messages_acknowledged_there=%d",
        batch_id,
        len(sent),
        sum(each.messages for each in sent),
    )


T = TypeVar("T")


class LoopThread:
    """`with LoopThread() as loop: loop.run(work())`. Tasks left by `run` continue in between.

    On a stopped loop, replies stay in the sockets while deadlines pass; when it continues, it
    handles the deadlines first.
    """

    def __init__(self) -> None:
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sink", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Waits for it; raises what it raises."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()
