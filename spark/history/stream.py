"""The streaming query: each batch of the history becomes one commit of the output.

Spark's checkpoint has the place in the history, the output's own note what of it is in it. The
second one decides: a batch that comes again, also under a new checkpoint, finds its events read.

A cluster that does not reply ends the query, not the stream: the history must have its outages.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from batonmq.spark.history.stream_events import take, write_events
from batonmq.spark.history.stream_output import StreamOutput

LOOK_S: Final = 0.5
PAUSE_S: Final = 5.0
"""Until the next request to a cluster that did not reply."""
PATIENCE: Final = "20s"
"""So long a batch waits for a controller that has what it needs."""
_OUTAGE: Final = re.compile(r"^\S*\bClusterError: (.*)$", re.MULTILINE)
_LOSS: Final = re.compile(r"^\S*\bDataLossError: (.*?)(?:; set failOnDataLoss.*)?$", re.MULTILINE)

_BUSY: Final = "Python worker failed to connect back"
"""Spark gives a Python process of a stream 10 s to start, whatever its settings are."""
_BUSY_STARTS: Final = 5


class HistoryLost(Exception):
    """The controllers dropped events before they were read; the text says which, and how to
    continue."""


@dataclass(slots=True)
class StreamCounts:
    """What a run has done so far."""

    batches: int = 0
    events: int = 0
    repeats: int = 0
    files: int = 0


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """`trigger` None: what is there now, and no more. `accept_loss`: what was dropped before it was
    read is left out. Others as the job's options."""

    controllers: str
    checkpoint: str
    events_max: int
    trigger: str | None
    accept_loss: bool = False


class HistoryStream:
    """One run. `report` gets a line for each batch with new events; `on_commit` runs behind it."""

    def __init__(
        self,
        output: StreamOutput,
        report: Callable[[str], None],
        on_commit: Callable[[], None] = lambda: None,
    ) -> None:
        self.counts = StreamCounts()
        self._output = output
        self._report = report
        self._on_commit = on_commit
        self._batch = threading.Lock()
        self._failed: Exception | None = None
        """What a commit failed with: Spark hides its sentence in traces."""

    def run(self, session: SparkSession, plan: StreamSettings, stopping: threading.Event) -> None:
        """Until all is read (`trigger` None), or `stopping` is set: then after the present batch.

        Raises HistoryLost, ValueError and OSError of the output, or what the query failed with; for
        an outage of the cluster only if it was never read from, or `trigger` is None. A machine too
        busy to start Spark's Python processes is given a few more chances.
        """
        slow_starts = 0
        while True:
            before = self.counts.batches
            try:
                return self._run(self._start(session, plan), stopping)
            except StreamingQueryException as error:
                if self._failed is not None:
                    raise self._failed from error
                lost, outage = _LOSS.search(str(error)), _OUTAGE.search(str(error))
                if lost is not None:
                    raise HistoryLost(
                        f"{lost[1]}; --accept-loss continues behind what is lost"
                    ) from error
                if _BUSY in str(error):
                    slow_starts = 1 if self.counts.batches > before else slow_starts + 1
                    if slow_starts > _BUSY_STARTS:
                        raise
                    self._report(f"no Python process within 10 s; next attempt in {PAUSE_S:.0f} s")
                else:
                    known = self._output.commits or self.counts.batches
                    if outage is None or plan.trigger is None or not known:
                        raise
                    self._report(f"{outage[1]}; next attempt in {PAUSE_S:.0f} s")
            if stopping.wait(PAUSE_S):
                return

    def _run(self, query: StreamingQuery, stopping: threading.Event) -> None:
        try:
            while not query.awaitTermination(LOOK_S):
                if stopping.is_set():
                    with self._batch:
                        query.stop()
        except BaseException:
            query.stop()
            raise

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
        writer = (
            messages.writeStream.queryName("stream_history")
            .option("checkpointLocation", plan.checkpoint)
            .foreachBatch(self._take)
        )
        if plan.trigger is None:
            return writer.trigger(availableNow=True).start()
        return writer.trigger(processingTime=plan.trigger).start()

    def _take(self, batch: DataFrame, number: int) -> None:
        with self._batch:
            try:
                self._output.check_follows(number)
                self._commit(batch.toArrow(), number)
            except PySparkException:
                raise  # of a task, as a cluster that does not answer
            except (ValueError, OSError) as error:
                self._failed = error
                raise

    def _commit(self, rows: pa.Table, number: int) -> None:
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
