"""The sink as Spark sees it: each task sends its rows, the driver counts what was acknowledged.

At least once: a task, or a batch of a stream, that is done again sends its rows again, each under
the unique key that it had: job, batch, partition, place in it, and a hash of the row.
"""

import asyncio
import logging
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

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
from batonmq.spark.live.sink_sender import (
    AckFile,
    Row,
    SinkError,
    SinkSender,
    row_of,
    write_committed,
)
from batonmq.spark.sentences import sentences

log = logging.getLogger(__name__)

_QUERY_ID: Final = "sql.streaming.queryId"
_BATCH_ID: Final = "streaming.sql.batchId"


@dataclass(frozen=True)
class Sent(WriterCommitMessage):
    """How many messages of a partition were acknowledged."""

    job: str
    partition: int
    messages: int


class _SinkWrites:
    """What batches and streams have in common; a batch has the number 0."""

    def __init__(self, options: SinkOptions, schema: StructType, overwrite: bool) -> None:
        if overwrite:
            raise ValueError(
                "a topic cannot be overwritten: use mode append (a stream: output mode append)"
            )
        check_columns({f.name: f.dataType.simpleString() for f in schema.fields}, options)
        self._options = options
        self._job = uuid.uuid4().hex[:12]

    @sentences()
    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int = 0) -> None:
        sent = [message for message in messages if isinstance(message, Sent)]
        count = sum(each.messages for each in sent)
        job = sent[0].job if sent else "none"
        log.info("sink_committed job=%s batch=%d messages=%d", job, batchId, count)
        if self._options.ack_folder and sent:
            partitions = {str(each.partition): each.messages for each in sent}
            counts = {"messages": count, "partitions": partitions}
            write_committed(self._options.ack_folder, job, batchId, counts)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int = 0) -> None:
        sent = [message for message in messages if isinstance(message, Sent)]
        log.warning(
            "sink_aborted batch=%d partitions_done=%d messages_acknowledged_there=%d",
            batchId,
            len(sent),
            sum(each.messages for each in sent),
        )


class TopicWriter(_SinkWrites, DataSourceArrowWriter):
    """A batch write. Its keys begin with an id that is new for each write."""

    @sentences()
    def write(self, iterator: Iterator[pa.RecordBatch]) -> Sent:
        return uvloop.run(_send(self._options, self._job, 0, iterator))


class TopicStreamWriter(_SinkWrites, DataSourceStreamArrowWriter):
    """A stream's writes. Its keys begin with the query's id, which a restart keeps."""

    @sentences()
    def write(self, iterator: Iterator[pa.RecordBatch]) -> Sent:
        context = TaskContext.get()
        query_id = context.getLocalProperty(_QUERY_ID) if context is not None else None
        batch_id = context.getLocalProperty(_BATCH_ID) if context is not None else None
        if not query_id or not batch_id:
            raise SinkError("Spark does not pass the query and the batch to the task")
        job = uuid.UUID(query_id).hex[:12]
        return uvloop.run(_send(self._options, job, int(batch_id), iterator))


async def _send(
    options: SinkOptions, job: str, batch_id: int, batches: Iterator[pa.RecordBatch]
) -> Sent:
    """Sends one partition. Raises SinkError; what was acknowledged until then is written down."""
    context = TaskContext.get()
    partition = context.partitionId() if context is not None else 0
    prefix = f"{job}-{batch_id}-{partition}-"
    with AckFile(options.ack_folder, f"acks-{prefix}") as report:
        sender = SinkSender(options, report.add)
        number = 0
        try:
            await sender.start()
            # In a thread: requests continue while Spark makes the next batch, however long.
            while rows := await asyncio.to_thread(_next_rows, batches, number, prefix, options):
                number += len(rows)
                await sender.add(rows)
            await sender.finish()
        finally:
            await sender.close()
    return Sent(job, partition, report.count)


def _next_rows(
    batches: Iterator[pa.RecordBatch], number: int, prefix: str, options: SinkOptions
) -> list[Row]:
    """Of the next batch that has any, from `number` on; none at the end. Raises SinkError."""
    for batch in batches:
        if batch.num_rows:
            rows = enumerate(batch.to_pylist(), number)
            return [row_of(each, prefix, values, options.topic) for each, values in rows]
    return []
