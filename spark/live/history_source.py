"""A stream of `table=history` as Spark sees it.

The driver reads the events and gives them to the tasks, which only decode them: they are few.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from batonmq.spark.live.history_feed import HistoryFeed, from_checkpoint, to_checkpoint
from batonmq.spark.live.options import HistoryOptions
from batonmq.spark.read.columns import batch_of, table_schema
from batonmq.spark.read.damage import Damage
from batonmq.spark.read.history_table import decode_lines

_EVENTS_A_TASK: Final = 2_000
_OF_FILES: Final = ("file", "controller", "line_offset")


def history_schema(options: HistoryOptions) -> pa.Schema:
    """The columns of table `history`; those that name a place in a file are null in a stream.

    Raises ValueError for an unknown one.
    """
    return table_schema("history", options.columns, with_corrupt=False)


class EventsPartition(InputPartition):
    """Events that one task decodes, as lines of JSON."""

    def __init__(self, lines: bytes) -> None:
        super().__init__(None)
        self.lines = lines


class HistoryStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Spark sends copies to the tasks, which only `read`."""

    def __init__(self, options: HistoryOptions) -> None:
        self._options = options
        self._feed: HistoryFeed | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_options": self._options, "_feed": None}

    def initialOffset(self) -> dict[str, Any]:
        return to_checkpoint(self._open().initial())

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxRows(self._options.events_per_trigger_max)

    def latestOffset(self, start: Mapping[str, Any], limit: ReadLimit) -> dict[str, Any]:
        most = self._options.events_per_trigger_max
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else most
        return to_checkpoint(self._open().next_end(from_checkpoint(start), most))

    def prepareForTriggerAvailableNow(self) -> None:
        self._open().aim()

    def partitions(self, start: Mapping[str, Any], end: Mapping[str, Any]) -> list[InputPartition]:
        events = self._open().between(from_checkpoint(start), from_checkpoint(end))
        lines = [event.to_json().encode() + b"\n" for event in events]
        pieces = range(0, len(lines), _EVENTS_A_TASK)
        return [EventsPartition(b"".join(lines[at : at + _EVENTS_A_TASK])) for at in pieces]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        # Without any work Spark makes a partition of its own.
        if not isinstance(partition, EventsPartition):
            return
        schema = history_schema(self._options)
        for found in decode_lines("", 0, partition.lines, schema):
            if not isinstance(found, Damage):
                kept = [name for name in schema.names if name not in _OF_FILES]
                yield batch_of(schema, len(found), {name: found[name] for name in kept})

    def stop(self) -> None:
        if self._feed is not None:
            self._feed.close()
            self._feed = None

    def _open(self) -> HistoryFeed:
        if self._feed is None:
            self._feed = HistoryFeed(self._options)
        return self._feed
