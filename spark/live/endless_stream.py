"""A streaming query whose batches become commits, started again after each outage of the cluster.

The job's own commit, and not Spark's checkpoint, decides what was read: a batch that comes again is
skipped.
"""

from __future__ import annotations

import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import DataFrame
from pyspark.sql.streaming.query import StreamingQuery

PAUSE_S: Final = 5.0
"""Until the next attempt after an outage that outlasted the patience of a batch."""
_LOOK_S: Final = 0.5
_OUTAGE: Final = re.compile(r"^\S*\bClusterError: (.*)$", re.MULTILINE)
_LOST: Final = re.compile(r"^\S*\bDataLossError: (.*?)(?:; set failOnDataLoss.*)?$", re.MULTILINE)
_BUSY: Final = "Python worker failed to connect back"
"""Spark gives a Python process of a stream 10 s to start, whatever its settings are."""
_BUSY_STARTS: Final = 5


class StreamLost(Exception):
    """Something was dropped before it was read; the text says what, and how to continue."""


@dataclass(slots=True)
class StreamCounts:
    """What a run has done so far. `repeats`: what came again and was skipped."""

    batches: int = 0
    repeats: int = 0
    files: int = 0


class EndlessStream(ABC):
    """One run. `report` gets a line for each batch and each outage."""

    counts: StreamCounts

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._batch = threading.Lock()
        self._is_over = False
        self._failed: Exception | None = None
        """What a commit failed with: Spark hides its sentence in traces."""

    @abstractmethod
    def _commit(self, batch: DataFrame, number: int) -> None:
        """Takes a batch of the query."""

    @abstractmethod
    def _has_read(self) -> bool:
        """Whether anything was ever read: else an address may be wrong."""

    def _run(
        self, start: Callable[[], StreamingQuery], stopping: threading.Event, *, ends: bool
    ) -> None:
        """Until all is read (`ends`), or `stopping` is set: then after the present batch.

        Raises StreamLost, what `_commit` raised, or what the query failed with; for an outage only
        if it `ends`, or nothing was ever read. A machine too busy to start Spark's Python processes
        gets a few more attempts.
        """
        slow_starts = 0
        while True:
            before = self.counts.batches
            try:
                return self._until_end(start(), stopping)
            except StreamingQueryException as error:
                if self._failed is not None:
                    raise self._failed from error
                lost, outage = _LOST.search(str(error)), _OUTAGE.search(str(error))
                if lost is not None:
                    text = f"{lost[1]}; --accept-loss continues behind what is lost"
                    raise StreamLost(text) from error
                if _BUSY in str(error):
                    reason = "no Python process within 10 s"
                    slow_starts = 1 if self.counts.batches > before else slow_starts + 1
                    if slow_starts > _BUSY_STARTS:
                        raise
                elif outage is not None and not ends and self._has_read():
                    reason = outage[1]
                else:
                    raise
                self._report(f"{reason}; next attempt in {PAUSE_S:.0f} s")
            if stopping.wait(PAUSE_S):
                return

    def _until_end(self, query: StreamingQuery, stopping: threading.Event) -> None:
        try:
            while not query.awaitTermination(_LOOK_S):
                if stopping.is_set():
                    with self._batch:
                        self._is_over = True
                    query.stop()
        except BaseException as error:
            query.stop()
            # What a stop cuts off may fail; it comes again with the next start.
            cut_off = self._is_over and self._failed is None
            if not (cut_off and isinstance(error, StreamingQueryException)):
                raise

    def _query(
        self, rows: DataFrame, name: str, checkpoint: str, trigger: str | None
    ) -> StreamingQuery:
        writer = (
            rows.writeStream.queryName(name)
            .option("checkpointLocation", checkpoint)
            .foreachBatch(self._take)
        )
        if trigger is None:
            return writer.trigger(availableNow=True).start()
        return writer.trigger(processingTime=trigger).start()

    def _take(self, batch: DataFrame, number: int) -> None:
        with self._batch:
            if self._is_over:
                # The stop waits for this call, so it must end; a return would mean that it is done.
                raise InterruptedError("the stream is being stopped")
            try:
                self._commit(batch, number)
            except PySparkException:
                raise  # of a task, as a cluster that does not answer
            except Exception as error:
                self._failed = error
                raise
