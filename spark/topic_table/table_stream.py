"""The one writer of tables that follow a stream: each batch of a query becomes one commit.

Spark's checkpoint fixes what a batch has, before it is read; the table records which batches it
has, and decides. So a batch that comes again, since a driver died between the two commits, adds
nothing. After an outage of the cluster the query is started again.

A case of it says what is read, and makes a commit of a batch: topics in `stream`, the history in
`history_stream`.
"""

import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from batonmq.protocol.errors import BatonError
from batonmq.spark.read.storage import locate, spark_uri

PAUSE_S: Final = 5.0
"""Until the next attempt after an outage that outlasted the patience of a batch."""
_LOOK_S: Final = 0.5
_OUTAGE: Final = re.compile(r"\bClusterError: (.*)")
_LOST: Final = re.compile(r"\bDataLossError: (.*?)(?:; set failOnDataLoss.*)?$", re.MULTILINE)
_BUSY: Final = "Python worker failed to connect back"
"""Spark gives a Python process of a stream 10 s to start, whatever its settings are."""
_BUSY_STARTS: Final = 5


class StreamLost(BatonError):
    """Something was dropped before it was read; the text says what, and how to continue."""


@dataclass(slots=True)
class StreamCounts:
    """What a run has done so far. `repeats`: what came again and was left out."""

    batches: int = 0
    repeats: int = 0
    files: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSettings:
    """Settings of both streams. `checkpoint` "": the default. `trigger` None: read what is there
    now, then end. `accept_loss`: continue after messages that were dropped before they were read.
    `patience`: how long a batch waits for a cluster that does not answer."""

    checkpoint: str = ""
    trigger: str | None = "5 seconds"
    accept_loss: bool = False
    patience: str = "60s"


class TableStream(ABC):
    """One run. `report` gets a line for each batch and each outage."""

    counts: StreamCounts
    name: str
    """Of the query, in Spark's user interface."""
    continues: str
    """The end of an error text: how to continue the table with another checkpoint."""

    def __init__(self, table: Any, plan: StreamSettings, report: Callable[[str], None]) -> None:
        """`table`: it has `location`, `own` (the name of our folder there) and `state`."""
        self._table: Any = table
        self._plan: Any = plan
        self._report = report
        self._batch = threading.Lock()
        self._is_over = False
        self._failed: Exception | None = None
        """What a commit failed with: Spark hides its sentence in traces."""

    @property
    def checkpoint(self) -> str:
        # Asked each time: a new Iceberg table gets its location when it is made.
        return self._plan.checkpoint or f"{self._table.location}/{self._table.own}/checkpoint"

    @abstractmethod
    def _source(self) -> dict[str, Any]:
        """The options of what is read."""

    @abstractmethod
    def _add(self, batch: DataFrame, stream: str, number: int, state: Any) -> None:
        """Commits what of a batch the table, of that state, does not have."""

    @abstractmethod
    def _has_read(self) -> bool:
        """Whether anything was ever read: else an address may be wrong."""

    # -- the query ------------------------------------------------------------------------------

    def run(self, session: SparkSession, stopping: threading.Event) -> None:
        """Until all is read (`trigger` None), or `stopping` is set: then after the present batch.

        Raises StreamLost, ValueError and OSError of the table, or what the query failed with; for
        an outage only if it ends by itself, or nothing was ever read. A machine too busy to start
        Spark's Python processes gets a few more attempts.
        """
        slow_starts = 0
        while True:
            before = self.counts.batches
            try:
                return self._until_end(self._start(session), stopping)
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
                elif outage is not None and self._plan.trigger and self._has_read():
                    reason = outage[1]
                else:
                    raise
                self._report(f"{reason}; next attempt in {PAUSE_S:.0f} s")
            if stopping.wait(PAUSE_S):
                return

    def _start(self, session: SparkSession) -> StreamingQuery:
        plan = self._plan
        rows = session.readStream.format("batonmq").options(
            operationTimeout=plan.patience,
            failOnDataLoss=str(not plan.accept_loss).lower(),
            **self._source(),
        )
        writer = (
            rows.load()
            .writeStream.queryName(self.name)
            .option("checkpointLocation", spark_uri(self.checkpoint))
            .foreachBatch(self._take)
        )
        if plan.trigger is None:
            return writer.trigger(availableNow=True).start()
        return writer.trigger(processingTime=plan.trigger).start()

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

    # -- a batch --------------------------------------------------------------------------------

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

    def _commit(self, batch: DataFrame, number: int) -> None:
        stream = self._stream_id()
        if stream is None:
            raise ValueError(f"{self.checkpoint}: its file metadata is gone; begin with a new one")
        self._add(batch, stream, number, self._state_before(stream, number))

    def _state_before(self, stream: str, number: int) -> Any:
        """What the table has. Raises ValueError if the checkpoint is further: a part would lack."""
        state = self._table.state()
        last = state.batch if state is not None and state.stream == stream else -1
        if number > last + 1:
            has = f"has nothing behind batch {last}" if last >= 0 else "has none of its batches"
            raise ValueError(
                f"{self.checkpoint} continues with batch {number}, and {self._table.location} "
                f"{has}: it is the checkpoint of another table, or the table is an old copy. "
                f"Begin with a new checkpoint{self.continues}"
            )
        return state

    def _stream_id(self) -> str | None:
        """Spark's id of the query, which it keeps in the checkpoint; None: no query has begun."""
        storage, folder = locate(self.checkpoint)
        text = storage.read_small(f"{folder}/metadata")
        return None if text is None else str(msgspec.json.decode(text)["id"])
