"""The data source `format("batonmq")` of Spark; `docs/spark.md` explains its options.

Spark makes a `BatonmqSource` on the driver, gets its columns and its reader, plans the
reader's partitions there, and runs `read` on the executors, in a Python process of its own.

Tables of files are read here; `table=topic`, the stream of the history and the sink are in
`spark.live`, which is imported only where it is needed, since every task imports this module.
"""

from collections.abc import Iterator, Mapping, MutableMapping, Sequence

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
    InputPartition,
)
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from batonmq.spark.arrow import read_of
from batonmq.spark.read.columns import LIVE_TABLE
from batonmq.spark.read.options import ReadOptions


class WorkPartition(InputPartition):
    """One piece of a read."""

    def __init__(self, work: object) -> None:
        super().__init__(work)
        self.work = work


class TableReader(DataSourceReader):
    """Reads a table, all of it."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._read = read_of(options)

    def partitions(self) -> Sequence[InputPartition]:
        return [WorkPartition(work) for work in self._read.plan()]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        # Without any work Spark makes a partition of its own.
        if not isinstance(partition, WorkPartition):
            return iter(())
        batches: Iterator[pa.RecordBatch] = self._read.run(partition.work)
        return batches


class BatonmqSource(DataSource):
    """Tables of stores and histories, and topics of a running cluster."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)

    @classmethod
    def name(cls) -> str:
        return "batonmq"

    def schema(self) -> StructType:
        if self._is_live():
            from batonmq.spark.live.options import TopicOptions
            from batonmq.spark.live.topic_read import topic_schema

            return from_arrow_schema(topic_schema(TopicOptions.from_mapping(self.options).columns))
        if self._is_live_history():
            from batonmq.spark.live.history_source import history_schema
            from batonmq.spark.live.options import HistoryOptions

            return from_arrow_schema(history_schema(HistoryOptions.from_mapping(self.options)))
        return from_arrow_schema(read_of(self.options).schema)

    def reader(self, schema: StructType) -> DataSourceReader:
        self._check_schema(schema)
        if self._is_live():
            from batonmq.spark.live.options import TopicOptions
            from batonmq.spark.live.topic_source import TopicReader

            return TopicReader(TopicOptions.from_mapping(self.options, streaming=False))
        if self._is_live_history():
            raise ValueError(
                "option controllers is one of streams: a batch reads the controllers' files, give "
                "their folders as path"
            )
        return TableReader(self.options)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        if self._table() == "history":
            from batonmq.spark.live.history_source import HistoryStreamReader
            from batonmq.spark.live.options import HistoryOptions

            options = HistoryOptions.from_mapping(self.options)
            self._check_schema(schema)
            return HistoryStreamReader(options)
        if not self._is_live():
            raise ValueError(
                f"table={self._options().table} cannot be streamed: streams read table=topic or "
                "table=history"
            )
        from batonmq.spark.live.options import TopicOptions
        from batonmq.spark.live.topic_source import TopicStreamReader

        self._check_schema(schema)
        return TopicStreamReader(TopicOptions.from_mapping(self.options, streaming=True))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from batonmq.spark.live.options import SinkOptions
        from batonmq.spark.live.sink import TopicWriter

        return TopicWriter(SinkOptions.from_mapping(self.options), schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        from batonmq.spark.live.options import SinkOptions
        from batonmq.spark.live.sink import TopicStreamWriter

        return TopicStreamWriter(SinkOptions.from_mapping(self.options), schema, overwrite)

    def _check_schema(self, schema: StructType) -> None:
        wanted = self.schema()
        if schema != wanted:
            raise ValueError(
                f"schema {schema.simpleString()}: give none; the option columns chooses columns of "
                f"{wanted.simpleString()}"
            )

    def _is_live(self) -> bool:
        return self._table() == LIVE_TABLE

    def _is_live_history(self) -> bool:
        return self._table() == "history" and bool(self.options.get("controllers", "").strip())

    def _table(self) -> str:
        return str(self.options.get("table", "")).strip().lower()

    def _options(self) -> ReadOptions:
        return ReadOptions.from_mapping(self.options)
