"""The ranges of an audit as a data source of Spark, so that tasks hand over Arrow batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from spark.audit.findings import SCAN_SCHEMA
from spark.audit.replicas import Group
from spark.audit.scan import RangeTask, ScanOptions, run_task


class TaskPartition(InputPartition):
    """One range of one group's log."""

    def __init__(self, task: RangeTask) -> None:
        super().__init__(task)
        self.task = task


class ScanReader(DataSourceReader):
    """Runs one task for each range."""

    def __init__(
        self, tasks: Sequence[RangeTask], groups: Sequence[Group], options: ScanOptions
    ) -> None:
        self._tasks = tasks
        self._groups = groups
        self._options = options

    def partitions(self) -> Sequence[InputPartition]:
        return [TaskPartition(task) for task in self._tasks]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, TaskPartition):  # what Spark makes where there is no task
            return iter(())
        task = partition.task
        return run_task(task, self._groups[task.group], self._options)


def scan_frame(
    session: SparkSession,
    tasks: Sequence[RangeTask],
    groups: Sequence[Group],
    options: ScanOptions,
) -> DataFrame:
    """The rows of all ranges, see `findings.SCAN_SCHEMA`; nothing is read before it is used."""
    reader = ScanReader(tasks, groups, options)

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


__all__ = ["ScanReader", "TaskPartition", "scan_frame"]
