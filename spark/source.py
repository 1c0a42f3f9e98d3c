"""The data source `format("batonmq")` of Spark; `docs/spark.md` explains its options.

Spark makes a `BatonmqSource` on the driver, asks it for its columns and its reader, plans the
reader's partitions there, and runs `read` on the executors, in a Python process of its own.
"""

from collections.abc import Iterable, Iterator, MutableMapping, Sequence

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, Filter, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from spark.options import ReadOptions
from spark.predicates import selection_of
from spark.reading import Read, Work, schema_of
from spark.selection import Selection


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
    """Tables of stores and histories."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)

    @classmethod
    def name(cls) -> str:
        return "batonmq"

    def schema(self) -> StructType:
        return from_arrow_schema(schema_of(self._options()))

    def reader(self, schema: StructType) -> DataSourceReader:
        options = self._options()
        wanted = from_arrow_schema(schema_of(options))
        if schema != wanted:
            raise ValueError(
                f"schema {schema.simpleString()}: give none; the option columns chooses columns of "
                f"{wanted.simpleString()}"
            )
        return FilteringReader(options) if options.pushdown else TableReader(options)

    def _options(self) -> ReadOptions:
        return ReadOptions.from_mapping(self.options)


__all__ = ["BatonmqSource", "FilteringReader", "TableReader", "WorkPartition"]
