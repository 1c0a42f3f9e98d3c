"""A topic as a table: a commit has the files of a batch, and the offsets of all queues."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import msgspec
import pyarrow as pa
from pyspark.sql import DataFrame

from batonmq.spark.live.options import TopicOptions
from batonmq.spark.live.topic_read import TopicRead
from batonmq.spark.read.storage import locate
from batonmq.spark.topic_table.bodies import JSON, Bodies
from batonmq.spark.topic_table.fields import fitting, plain
from batonmq.spark.topic_table.files import FilePlan, Queues, TaskReport, write
from batonmq.spark.topic_table.rows import MESSAGE, RowPlan, new_columns
from batonmq.spark.topic_table.table_formats import About, TableState, TopicTable
from batonmq.spark.topic_table.table_stream import StreamCounts, StreamSettings, TableStream

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TablePlan(StreamSettings):
    """What to keep where. `columns`: given ones of JSON bodies; None: they are inferred.

    `starting`: `earliest`, `latest`, or offsets as the source takes them, where the stream begins.
    `from_table`: behind what the table has. `compact_s`, `keep_hours`: 0 for never.
    """

    name_servers: str
    topic: str
    bodies: Bodies = field(default_factory=Bodies)
    columns: pa.Schema | None = None
    partition: str = "day"
    starting: str = "earliest"
    offsets_max: int = 200_000
    columns_max: int = 500
    from_table: bool = False
    compact_s: float = 600
    keep_hours: float = 168


@dataclass(slots=True)
class TableCounts(StreamCounts):
    """`broken`: messages whose bodies could not be read."""

    rows: int = 0
    broken: int = 0
    compacted: int = 0
    expired: int = 0


class TopicStream(TableStream):
    """One run."""

    continues = " and --from-table"

    def __init__(self, table: TopicTable, plan: TablePlan, report: Callable[[str], None]) -> None:
        """Makes the table and its new columns.

        Raises ValueError for a table or checkpoint of something else, OSError.
        """
        super().__init__(table, plan, report)
        self.name = f"topicTable {plan.topic}"
        self.counts: TableCounts = TableCounts()
        self._table: TopicTable = table
        self._plan: TablePlan = plan
        self._cared_s = time.monotonic()
        about = table.about()
        self._check_place(about)
        self._rows = self._columns(about)
        self._check_checkpoint()

    # -- before it begins -----------------------------------------------------------------------

    def _check_place(self, about: About | None) -> None:
        plan = self._plan
        if about is not None and about.topic != plan.topic:
            raise ValueError(
                f"{self._table.location} is a table of topic {about.topic}, not of {plan.topic}: "
                "name another one"
            )
        if about is not None and about.partition != plan.partition:
            raise ValueError(
                f"{self._table.location} has partitions by {about.partition}, not by "
                f"{plan.partition}: these stay as they were made"
            )
        if about is None and (plan.checkpoint or self._table.location) and self._has("offsets"):
            raise ValueError(
                f"{self.checkpoint} is the checkpoint of a table that is gone: begin with a new "
                "checkpoint"
            )

    def _columns(self, about: About | None) -> RowPlan:
        """What rows are made of; creates the table, or adds columns that are new."""
        plan, table = self._plan, self._table
        given = plan.bodies.columns() if plan.columns is None else plan.columns
        wanted = pa.schema([pa.field(each.name, plain(each.type)) for each in given or ()])
        for each in wanted:
            if each.name.startswith("_"):
                raise ValueError(f"column {each.name}: names that begin with _ are the table's own")
            fitting(each.type)
        # As it is read again: else a list and a tuple would differ at each start.
        bodies = msgspec.json.decode(msgspec.json.encode(plan.bodies))
        planned = About(plan.topic, plan.partition, bodies)
        if about is None:
            table.create(planned, wanted)
        elif about.bodies != planned.bodies:
            if about.bodies["form"] != plan.bodies.form:
                raise ValueError(
                    f"{table.location} has rows of {about.bodies['form']} bodies, not of "
                    f"{plan.bodies.form}: name another table"
                )
            table.describe(planned)
        has = {each.name: plain(each.type) for each in table.fields()}
        for each in wanted:
            if each.name in has and has[each.name] != each.type:
                raise ValueError(
                    f"column {each.name} is {has[each.name]} in {table.location} and {each.type} "
                    "in the schema: a column keeps its type; give the field another name, or "
                    "name another table"
                )
        more = [each for each in wanted if each.name not in has]
        if about is not None and more:
            table.add(more)
        fields = pa.schema([*has.items(), *more])
        infers = given is None and plan.bodies.form == JSON
        return RowPlan(plan.bodies, fields, infers, plan.columns_max)

    def _check_checkpoint(self) -> None:
        table, stream = self._table, self._stream_id()
        state = table.state()
        if state is None:
            if table.files():
                # A Delta table keeps its commits for a time, and this one had none of ours in it.
                raise ValueError(
                    f"{table.location} has rows, and no commit is left that says of which "
                    "messages: they would come again; name another table"
                )
            return
        if stream is None and not self._plan.from_table:
            raise ValueError(
                f"{table.location} has {state.rows} rows, and {self.checkpoint} is new: name "
                "the checkpoint that the table was written with, or continue behind its last row "
                "with --from-table"
            )
        # One that died before its first commit may go on: it begins behind the table again.
        goes_on = self._plan.from_table and not self._has("commits")
        if state.stream != stream and not goes_on:
            raise ValueError(
                f"{self.checkpoint}: it is of another table, or {table.location} was continued "
                "from another checkpoint since: use that one, or a new one with --from-table"
            )

    def _has(self, what: str) -> bool:
        """Whether Spark has begun a batch with the checkpoint (`offsets`), or ended (`commits`)."""
        storage, folder = locate(self.checkpoint)
        return bool(storage.children(f"{folder}/{what}"))

    # -- the run --------------------------------------------------------------------------------

    def _has_read(self) -> bool:
        return self._has("offsets")

    def _source(self) -> dict[str, Any]:
        plan, state = self._plan, self._table.state()
        starting = plan.starting
        # Spark asks again where the first batch began, if the driver died in it.
        if state is not None and state.stream != self._stream_id():
            starting = _behind(plan, state)
        return {
            "table": "topic", "nameServers": plan.name_servers, "topic": plan.topic,
            "columns": ",".join([*MESSAGE.values(), "body"]), "startingOffsets": starting,
            "maxOffsetsPerTrigger": str(plan.offsets_max),
        }  # fmt: skip

    def _add(self, batch: DataFrame, stream: str, number: int, state: TableState | None) -> None:
        if state is not None and state.stream == stream and number <= state.batch:
            self._report(f"batch {number}: the table has it already")
            self.counts.repeats += 1
        else:
            self._append(batch, stream, number, state)
        self._care()

    def _append(self, batch: DataFrame, stream: str, number: int, state: Any) -> None:
        report = self._write(batch)
        if self._rows.infers and (made := new_columns(self._rows, report.fresh)):
            self._report(f"new columns: {', '.join(f'{each.name} {each.type}' for each in made)}")
            self._table.add(made)
            self._rows = replace(self._rows, fields=pa.schema([*self._rows.fields, *made]))
            self._remove(report)
            report = self._write(batch)
            # A commit fails if another one came behind the state that was asked for last.
            state = self._state_before(stream, number)
        queues = self._grown(state, report)
        rows = report.rows + (state.rows if state else 0)
        self._table.commit(report.files, TableState(stream, number, queues, rows))
        self._tell(number, report, rows)

    def _grown(self, state: TableState | None, report: TaskReport) -> Queues:
        """The queues of the table with a batch. Raises ValueError if it has some of the messages,
        or leaves out some: of a queue that came back they may have expired, and its place is in no
        checkpoint."""
        grown = {broker: dict(each) for broker, each in state.queues.items()} if state else {}
        for broker, each in report.queues.items():
            mine = grown.setdefault(broker, {})
            for queue, (begin, end) in each.items():
                first, last = mine.get(queue, (begin, begin))
                if begin < last or (begin > last and not self._plan.accept_loss):
                    raise ValueError(
                        f"{self.checkpoint} goes on at offset {begin} of broker {broker}, queue "
                        f"{queue}, and {self._table.location} ends at {last}: the checkpoint is of "
                        "another table, or the topic was created again. Begin with a new "
                        "checkpoint and --from-table, or with a new table"
                        + "; --accept-loss leaves out what has expired"
                        * (begin > last)
                    )
                mine[queue] = (first, end)
        return grown

    def _write(self, batch: DataFrame) -> TaskReport:
        table = self._table
        plan = FilePlan(self._rows, table.location, table.below, self._plan.partition)
        total = TaskReport()
        for row in batch.mapInArrow(partial(write, plan), "report binary").collect():
            total.add(msgspec.json.decode(row[0], type=TaskReport))
        return total

    def _remove(self, report: TaskReport) -> None:
        """Files that no commit will name."""
        storage, folder = locate(self._table.location)
        for file in report.files:
            storage.file_system.delete_file(f"{folder}/{file.path}")

    def _tell(self, number: int, report: TaskReport, rows: int) -> None:
        counts = self.counts
        counts.batches += 1
        counts.rows += report.rows
        counts.broken += report.broken
        counts.files += len(report.files)
        broken = f", {report.broken:,} of them broken" if report.broken else ""
        age_s = max(0.0, time.time() - report.newest_us / 1e6)
        self._report(
            f"batch {number}: {report.rows:,} rows{broken} in {len(report.files)} files, "
            f"{rows:,} in all; the newest is {age_s:.1f} s old"
        )

    def _care(self) -> None:
        """Puts small files together and drops old versions, every `compact_s`. What fails is tried
        again the next time: it must not stop the stream."""
        plan = self._plan
        if not plan.compact_s or time.monotonic() - self._cared_s < plan.compact_s:
            return
        self._cared_s = time.monotonic()
        try:
            gone = self._table.compact()
            old = self._table.expire(plan.keep_hours) if plan.keep_hours else 0
        except Exception as error:
            log.warning("table_not_compacted reason=%s", error)
            self._report(f"the table could not be compacted: {error}")
            return
        self.counts.compacted += gone
        self.counts.expired += old
        self._report(f"compacted {gone} small files, removed {old} old ones")


def _behind(plan: TablePlan, state: TableState) -> str:
    """Behind the last row of each queue that is there, as an option of the source; other queues
    from their beginning. Raises ClusterError."""
    read = TopicRead(TopicOptions.from_mapping(
        {"nameServers": plan.name_servers, "topic": plan.topic, "operationTimeout": plan.patience}
    ))  # fmt: skip
    with read.connect() as cluster:
        queues = [q for r in cluster.routes([plan.topic]) for q in r.subscribe_queues]
    ends: dict[str, dict[str, Any]] = {}
    for queue in queues:
        ends.setdefault(queue.broker_name, {})[str(queue.queue_id)] = "earliest"
    for broker, each in state.queues.items():
        for name, (_, end) in each.items():
            if name in ends.get(broker, ()):
                ends[broker][name] = end
            else:
                # Of a group that was taken away. If it comes back, it is read from its beginning,
                # which `_grown` refuses unless that is `end`.
                log.warning("table_queue_gone broker_name=%s queue_id=%s end=%d", broker, name, end)
    return msgspec.json.encode({plan.topic: ends}).decode()
