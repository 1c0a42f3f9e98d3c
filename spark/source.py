"""The data source `format("batonmq")` of Spark; `docs/spark.md` explains its options.

Spark makes a `BatonmqSource` on the driver, gets its columns and its reader, plans the
reader's partitions there, and runs `read` on the executors, in a Python process of its own.

What is read has no Spark in it: a read has `schema`, `plan()` and `run(work)`, of a stream
`stream()` too. `table=topic`, the stream of the history and the sink are in `spark.live`, which is
imported only where it is needed, since every task imports this module.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

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
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from batonmq.spark.arrow import read_of
from batonmq.spark.read.columns import LIVE_TABLE
from batonmq.spark.sentences import sentences


class WorkPartition(InputPartition):
    """One piece of a read."""

    def __init__(self, work: object) -> None:
        super().__init__(work)
        self.work = work


def _run(read: Any, partition: InputPartition) -> Iterator[pa.RecordBatch]:
    # Without any work Spark makes a partition of its own.
    if isinstance(partition, WorkPartition):
        with sentences():
            yield from read.run(partition.work)


class TableReader(DataSourceReader):
    """Reads a table, all of it."""

    def __init__(self, read: Any) -> None:
        self._read = read

    @sentences()
    def partitions(self) -> Sequence[InputPartition]:
        return [WorkPartition(work) for work in self._read.plan()]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _run(self._read, partition)


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A stream. Spark sends copies to the tasks, which only `read`."""

    def __init__(self, read: Any) -> None:
        self._read = read
        self._made: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_read": self._read, "_made": None}

    @sentences()
    def initialOffset(self) -> dict[str, Any]:
        return self._read.to_checkpoint(self._stream.initial())

    def getDefaultReadLimit(self) -> ReadLimit:
        most = self._read.most
        return ReadMaxRows(most) if most else ReadAllAvailable()

    @sentences()
    def latestOffset(self, start: Mapping[str, Any], limit: ReadLimit) -> dict[str, Any]:
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else 0
        end = self._stream.next_end(self._read.from_checkpoint(start), most)
        return self._read.to_checkpoint(end)

    @sentences()
    def prepareForTriggerAvailableNow(self) -> None:
        self._stream.aim()

    def reportLatestOffset(self) -> dict[str, Any] | None:
        available = self._made.available if self._made is not None else None
        return self._read.to_checkpoint(available) if available else None

    @sentences()
    def partitions(self, start: Mapping[str, Any], end: Mapping[str, Any]) -> list[InputPartition]:
        places = map(self._read.from_checkpoint, (start, end))
        return [WorkPartition(work) for work in self._stream.tasks(*places)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _run(self._read, partition)

    def stop(self) -> None:
        made, self._made = self._made, None
        if made is not None:
            made.close()

    @property
    def _stream(self) -> Any:
        """The driver's side; it connects at first use."""
        if self._made is None:
            self._made = self._read.stream()
        return self._made


class BatonmqSource(DataSource):
    """Tables of stores and histories, and topics of a running cluster."""

    @classmethod
    def name(cls) -> str:
        return "batonmq"

    @sentences()
    def schema(self) -> StructType:
        return from_arrow_schema(self._read().schema)

    @sentences()
    def reader(self, schema: StructType) -> DataSourceReader:
        self._check_schema(schema)
        if self._is_live_history():
            raise ValueError(
                "option controllers is one of streams: a batch reads the controllers' files, give "
                "their folders as path"
            )
        return TableReader(self._read(streaming=False))

    @sentences()
    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        if self._table() not in (LIVE_TABLE, "history"):
            raise ValueError(
                f"table={self._table() or 'messages'} cannot be streamed: streams read table=topic "
                "or table=history"
            )
        read = self._read(streaming=True)
        self._check_schema(schema)
        return StreamReader(read)

    @sentences()
    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from batonmq.spark.live.options import SinkOptions
        from batonmq.spark.live.sink import TopicWriter

        return TopicWriter(SinkOptions.from_mapping(self.options), schema, overwrite)

    @sentences()
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

    def _read(self, *, streaming: bool | None = None) -> Any:
        """`streaming` None: not known yet. Raises ValueError."""
        if self._table() == LIVE_TABLE:
            from batonmq.spark.live.options import TopicOptions
            from batonmq.spark.live.stream_plan import TopicStreamRead

            return TopicStreamRead(TopicOptions.from_mapping(self.options, streaming=streaming))
        if self._is_live_history() or (streaming and self._table() == "history"):
            from batonmq.spark.live.history_feed import HistoryRead
            from batonmq.spark.live.options import HistoryOptions

            return HistoryRead(HistoryOptions.from_mapping(self.options))
        return read_of(self.options)

    def _is_live_history(self) -> bool:
        return self._table() == "history" and bool(self.options.get("controllers", "").strip())

    def _table(self) -> str:
        return str(self.options.get("table", "")).strip().lower()
