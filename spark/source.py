"""The data source `format("batonmq")` of Spark; `docs/spark.md` explains its options.

Spark makes a `BatonmqSource` on the driver, gets its columns and its reader, plans the
reader's partitions there, and runs `read` on the executors, in a Python process of its own.

Tables of files are read here; `table=topic`, the stream of the history and the sink are in
`spark.live`, which is imported only where it is needed, since every task imports this module.
"""

from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import datasource as ds
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

from batonmq.spark.read.columns import LIVE_TABLE
from batonmq.spark.read.options import ReadOptions
from batonmq.spark.read.reading import Read, Work, schema_of
from batonmq.spark.read.selection import HIGH, LOW, Selection


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

    def pushFilters(self, filters: list[ds.Filter]) -> Iterable[ds.Filter]:
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
        if self._is_live_history():
            from batonmq.spark.live.history_source import history_schema
            from batonmq.spark.live.options import HistoryOptions

            return from_arrow_schema(history_schema(HistoryOptions.from_mapping(self.options)))
        return from_arrow_schema(schema_of(self._options()))

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
        options = self._options()
        return FilteringReader(options) if options.pushdown else TableReader(options)

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


_SETS: Final = {
    "store": "stores",
    "cluster": "clusters",
    "broker": "brokers",
    "broker_id": "broker_ids",
    "topic": "topics",
    "queue_id": "queue_ids",
    "tags": "tags",
}
_SPANS: Final = frozenset({"queue_offset", "physical_offset", "epoch"})
_TIME: Final = "store_at"
_EPOCH_START: Final = datetime(1970, 1, 1, tzinfo=UTC)


def selection_of(filters: Iterable[ds.Filter]) -> Selection:
    """What these filters, all of which must hold, select of messages or units; ignores others, as
    Spark checks each again."""
    selection = Selection()
    for each in filters:
        path: tuple[str, ...] = getattr(each, "attribute", ())
        if len(path) != 1 or getattr(each, "value", None) is None:
            continue
        name = path[0]
        if isinstance(each, ds.EqualTo | ds.EqualNullSafe):
            selection = _equal(selection, name, [each.value])
        elif isinstance(each, ds.In):
            selection = _equal(selection, name, [v for v in each.value if v is not None])
        elif isinstance(each, ds.GreaterThan | ds.GreaterThanOrEqual):
            low = _floor(name, each.value)
            selection = _span(selection, name, low=low + isinstance(each, ds.GreaterThan))
        elif isinstance(each, ds.LessThan | ds.LessThanOrEqual):
            high = _floor(name, each.value)
            selection = _span(selection, name, high=high - _is_below(each, name))
    return selection


def _equal(selection: Selection, name: str, values: list[Any]) -> Selection:
    if name in _SETS:
        return selection.only(_SETS[name], frozenset(values))
    if values and (name in _SPANS or name == _TIME):
        numbers = [_floor(name, value) for value in values]
        return _span(selection, name, low=min(numbers), high=max(numbers))
    return selection


def _span(selection: Selection, name: str, *, low: int = LOW, high: int = HIGH) -> Selection:
    if name == _TIME:
        return selection.within("store_ms", low=low, high=high)
    if name in _SPANS:
        return selection.within(name, low=low, high=high)
    return selection


def _is_below(each: ds.Filter, name: str) -> int:
    # A time may lie within a millisecond: what was stored in that one is let through.
    return int(isinstance(each, ds.LessThan) and name != _TIME)


def _floor(name: str, value: Any) -> int:
    """A number, or a time in ms, rounded down: low ends may let one more through."""
    if isinstance(value, datetime):
        moment = value if value.tzinfo is not None else value.astimezone()
        delta = moment - _EPOCH_START
        return (
            delta.days * 86_400_000_000 + delta.seconds * 1_000_000 + delta.microseconds
        ) // 1000
    return int(value) if name in _SPANS else 0
