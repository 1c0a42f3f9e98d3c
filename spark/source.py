"""The data source `format("batonmq")` of Spark; `docs/spark.md` explains its options.

Spark makes a `BatonmqSource` on the driver, gets its columns and its reader, plans the
reader's partitions there, and runs `read` on the executors, in a Python process of its own.

Tables of files are read here; `table=topic` and the sink are in `spark.live`, which is imported
only where it is needed, since every task imports this module.
"""

from collections.abc import Iterable, Iterator, MutableMapping, Sequence

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
    Filter,
    InputPartition,
)
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from batonmq.spark.read.options import ReadOptions
from batonmq.spark.read.predicates import selection_of
from batonmq.spark.read.reading import Read, Work, schema_of
from batonmq.spark.read.schemas import LIVE_TABLE
from batonmq.spark.read.selection import Selection


class WorkPartition(InputPartition):
    """One piece of a read."""

    def __init__(self, work: Work) -> None:
        super().__init__(work)
        self.work = work


class TableReader(DataSourceReader):
    """Reads a table, all of it."""

    def __init__(self, options: ReadOptions) -> None:
        self._read = Read(options, Selection())

    def partitions(self) -> Sequence[InputPartition]:
        return [WorkPartition(work) for work in self._read.plan()]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        # Without any work Spark makes a partition of its own.
        if not isinstance(partition, WorkPartition):
            return iter(())
        return self._read.run(partition.work)


class FilteringReader(TableReader):
    """Reads what the filters of the query may let through.

    Spark refuses to use a reader with `pushFilters` unless spark.sql.python.filterPushdown.enabled
    is set; hence two classes, and the option `pushdown`.
    """

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        self._read = Read(self._read.options, selection_of(filters))
        return filters


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
        return from_arrow_schema(schema_of(self._options()))

    def reader(self, schema: StructType) -> DataSourceReader:
        self._check_schema(schema)
        if self._is_live():
            from batonmq.spark.live.options import TopicOptions
            from batonmq.spark.live.topic_source import TopicReader

            return TopicReader(TopicOptions.from_mapping(self.options, streaming=False))
        options = self._options()
        return FilteringReader(options) if options.pushdown else TableReader(options)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        if not self._is_live():
            raise ValueError(
                f"table={self._options().table} cannot be streamed: streams read table=topic"
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
        return str(self.options.get("table", "")).strip().lower() == LIVE_TABLE

    def _options(self) -> ReadOptions:
        return ReadOptions.from_mapping(self.options)
