"""The ranges of an audit as a data source of Spark, so that tasks hand over Arrow batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from batonmq.spark.audit.findings import SCAN_SCHEMA
from batonmq.spark.audit.replicas import ReplicaGroup
from batonmq.spark.audit.scan import RangeTask, ScanOptions, run_task


class TaskPartition(InputPartition):
    """Ranges of logs that one task of Spark reads, one after the other."""

    def __init__(self, tasks: Sequence[RangeTask]) -> None:
        super().__init__(tasks)
        self.tasks = tasks


def packed(tasks: Sequence[RangeTask], slots: int, range_bytes: int) -> list[list[RangeTask]]:
    """Small ranges put together, so that many small logs are no swarm of tasks: up to
    `range_bytes` each, but as many as there are `slots` to run them at once.
    """
    room = min(range_bytes, sum(task.end - task.begin for task in tasks) // slots)
    packs: list[list[RangeTask]] = []
    filled = room
    for task in tasks:
        size = task.end - task.begin
        if not packs or filled + size > room:
            packs.append([])
            filled = 0
        packs[-1].append(task)
        filled += size
    return packs


class ScanReader(DataSourceReader):
    """Runs one task for each pack of ranges."""

    def __init__(
        self,
        packs: Sequence[Sequence[RangeTask]],
        groups: Sequence[ReplicaGroup],
        options: ScanOptions,
    ) -> None:
        self._packs = packs
        self._groups = groups
        self._options = options

    def partitions(self) -> Sequence[InputPartition]:
        return [TaskPartition(pack) for pack in self._packs]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, TaskPartition):  # what Spark makes where there is no task
            return
        for task in partition.tasks:
            yield from run_task(task, self._groups[task.group], self._options)


def scan_frame(
    session: SparkSession,
    tasks: Sequence[RangeTask],
    groups: Sequence[ReplicaGroup],
    options: ScanOptions,
) -> DataFrame:
    """The rows of all ranges, see `findings.SCAN_SCHEMA`; nothing is read before it is used."""
    slots = session.sparkContext.defaultParallelism
    reader = ScanReader(packed(tasks, slots, options.range_bytes), groups, options)

    class ScanSource(DataSource):
        """Made for one audit: it travels with its tasks."""

        @classmethod
        def name(cls) -> str:
            return "batonmq_audit_scan"

        def schema(self) -> StructType:
            return from_arrow_schema(SCAN_SCHEMA)

        def reader(self, schema: StructType) -> DataSourceReader:
            return reader

    session.dataSource.register(ScanSource)
    return session.read.format(ScanSource.name()).load()


__all__ = ["ScanReader", "TaskPartition", "packed", "scan_frame"]
