"""`table=topic` as Spark sees it: a batch reader and a stream reader."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
)
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from batonmq.spark.live.offsets import from_checkpoint, to_checkpoint
from batonmq.spark.live.options import TopicOptions
from batonmq.spark.live.stream_plan import StreamPlan
from batonmq.spark.live.topic_read import TopicRead, TopicTask


class TopicPartition(InputPartition):
    """Ranges that one task reads."""

    def __init__(self, task: TopicTask) -> None:
        super().__init__(task)
        self.task = task


class TopicReader(DataSourceReader):
    """A batch: what the topics held when it was planned, or a part of it."""

    def __init__(self, options: TopicOptions) -> None:
        self._read = TopicRead(options)

    def partitions(self) -> Sequence[InputPartition]:
        return [TopicPartition(task) for task in self._read.plan()]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        # Without any work Spark makes a partition of its own.
        if not isinstance(partition, TopicPartition):
            return iter(())
        return self._read.run(partition.task)


class TopicStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A stream. Spark sends copies to the tasks, which only `read`."""

    def __init__(self, options: TopicOptions) -> None:
        self._options = options
        self._plan: StreamPlan | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_options": self._options, "_plan": None}

    def initialOffset(self) -> dict[str, Any]:
        return to_checkpoint(self._planner().initial())

    def getDefaultReadLimit(self) -> ReadLimit:
        options = self._options
        if options.offsets_per_trigger_max:
            return ReadMaxRows(options.offsets_per_trigger_max)
        return ReadAllAvailable()

    def latestOffset(self, start: Mapping[str, Any], limit: ReadLimit) -> dict[str, Any]:
        begin = from_checkpoint(start, self._options.topics)
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else 0
        return to_checkpoint(self._planner().next_end(begin, most))

    def prepareForTriggerAvailableNow(self) -> None:
        self._planner().aim()

    def reportLatestOffset(self) -> dict[str, Any] | None:
        available = self._plan.available if self._plan is not None else {}
        return to_checkpoint(available) if available else None

    def partitions(self, start: Mapping[str, Any], end: Mapping[str, Any]) -> list[InputPartition]:
        topics = self._options.topics
        tasks = self._planner().tasks(from_checkpoint(start, topics), from_checkpoint(end, topics))
        return [TopicPartition(task) for task in tasks]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, TopicPartition):
            return iter(())
        return TopicRead(self._options).run(partition.task)

    def stop(self) -> None:
        if self._plan is not None:
            self._plan.close()
            self._plan = None

    def _planner(self) -> StreamPlan:
        if self._plan is None:
            self._plan = StreamPlan(TopicRead(self._options))
        return self._plan
