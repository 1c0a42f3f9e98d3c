"""The streaming query: each batch of the history becomes one commit of the output.

Spark's checkpoint has the place in the history, the output's own note what of it is in it. The
second one decides: a batch that comes again, also under a new checkpoint, finds its events read.

A cluster that does not reply ends the query, not the stream: the history must have its outages.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from batonmq.spark.history.stream_output import StreamOutput, take, write_events
from batonmq.spark.live.endless_stream import EndlessStream, StreamCounts

PATIENCE: Final = "20s"
"""So long a batch waits for a controller that has what it needs."""


@dataclass(slots=True)
class EventCounts(StreamCounts):
    events: int = 0


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """`trigger` None: what is there now, and no more. `accept_loss`: what was dropped before it was
    read is left out. Others as the job's options."""

    controllers: str
    checkpoint: str
    events_max: int
    trigger: str | None
    accept_loss: bool = False


class HistoryStream(EndlessStream):
    """One run. `report` gets a line for each batch with new events; `on_commit` runs behind it."""

    def __init__(
        self,
        output: StreamOutput,
        report: Callable[[str], None],
        on_commit: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(report)
        self.counts: EventCounts = EventCounts()
        self._output = output
        self._on_commit = on_commit

    def run(self, session: SparkSession, plan: StreamSettings, stopping: threading.Event) -> None:
        """Until all is read (`trigger` None), or `stopping` is set: then after the present batch.

        Raises StreamLost, ValueError and OSError of the output, or what the query failed with.
        """
        self._run(lambda: self._start(session, plan), stopping, ends=plan.trigger is None)

    def _has_read(self) -> bool:
        return bool(self._output.commits or self.counts.batches)

    def _start(self, session: SparkSession, plan: StreamSettings) -> StreamingQuery:
        messages = (
            session.readStream.format("batonmq")
            .option("table", "history")
            .option("controllers", plan.controllers)
            .option("maxOffsetsPerTrigger", str(plan.events_max))
            .option("operationTimeout", PATIENCE)
            .option("failOnDataLoss", str(not plan.accept_loss).lower())
            .load()
        )
        return self._query(messages, "stream_history", plan.checkpoint, plan.trigger)

    def _commit(self, batch: DataFrame, number: int) -> None:
        self._output.check_follows(number)
        rows = batch.toArrow()
        fresh, read = take(rows, self._output.read)
        write_events(fresh, self._output.begin())
        files = self._output.commit(read, len(fresh), number)
        repeats = len(rows) - len(fresh)
        if len(fresh):
            self._tell_batch(fresh, repeats)
            self._on_commit()
        self.counts.batches += 1
        self.counts.events += len(fresh)
        self.counts.repeats += repeats
        self.counts.files += files

    def _tell_batch(self, fresh: pa.Table, repeats: int) -> None:
        newest: datetime | None = pc.max(fresh["time"]).as_py()
        age_s = max(0.0, time.time() - newest.timestamp()) if newest is not None else 0
        self._report(
            f"{len(fresh)} events{f', {repeats} repeats' if repeats else ''}; "
            f"{self._output.rows} in all; the newest is {age_s:.0f} s old"
        )
