"""One row per change of master: the fold of `batonmq.history.fold` over each group's events.

The events of a group come sorted to one task, which streams them through the fold and gives each
story as it ends; its memory is that of the fold and of one batch. Times are ms, null is unknown.

A row without `kind` is the newest loss of a group's master, not mended yet. `next_...` is of the
election or loss that follows. `node` detected the loss, `elected_by` proposed the election;
`raft_index`, `told` (bit mask of controllers) and `confirm_offset` are of the election's event.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import DataFrame
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from batonmq.history.event import EventKey, HistoryEvent
from batonmq.history.fold import Fold
from batonmq.history.story import CAUSAL, Story
from batonmq.spark.storage import locate
from batonmq.spark.work import Work

_STRING: Final = pa.string()
_LONG: Final = pa.int64()
_BOOL: Final = pa.bool_()
_IDS: Final = pa.list_(_LONG)
SCHEMA: Final = pa.schema(
    [
        ("group", _STRING), ("seg", _LONG), ("kind", _STRING), ("cause", _STRING),
        ("how", _STRING), ("reason", _STRING), ("node", _STRING), ("elected_by", _STRING),
        ("master_epoch", _LONG), ("broker_id", _LONG), ("master_before", _LONG),
        ("address", _STRING), ("set_before", _IDS), ("sync_state_set", _IDS), ("unclean", _BOOL),
        ("silent_ms", _LONG), ("detected_ms", _LONG), ("elected_ms", _LONG), ("role_ms", _LONG),
        ("opened_ms", _LONG), ("first_ack_ms", _LONG), ("opened_offset", _LONG),
        ("confirmed_offset", _LONG), ("confirm_offset", _LONG), ("raft_index", _LONG),
        ("told", _LONG), ("lost_ms", _LONG), ("began_ms", _LONG), ("start_ms", _LONG),
        ("unavailable_ms", _LONG), ("held_ms", _LONG), ("lost_since_ms", _LONG), ("idle", _BOOL),
        ("overtaken", _BOOL), ("complete", _BOOL), ("serves", _BOOL), ("truncated_bytes", _LONG),
        ("clock_problem", _STRING), ("is_newest", _BOOL), ("next_kind", _STRING),
        ("next_elected_ms", _LONG), ("next_elected_by", _STRING), ("next_failed_ms", _LONG),
        ("next_lost_ms", _LONG),
    ]
)  # fmt: skip
# Columns of the events that the fold needs, with the value for null.
_INPUT: Final[dict[str, Any]] = {
    "group": "", "log": "", "raft_index": -1, "part": 0, "time_ms": 0, "kind": "",
    "broker_id": 0, "incarnation": "", "address": "", "master_epoch": 0, "node": "",
    "master_before": 0, "set_before": None, "sync_state_set": None, "confirm_offset": -1,
    "unclean": False, "reason": "", "detected_ms": 0, "silent_ms": -1, "proposed_ms": 0,
    "json": "", "told": 0,
}  # fmt: skip
_ORDER: Final = ("group", "log_no", "raft_index", "part")
_ROWS: Final = 1_000


def stories(events: DataFrame, work: Work) -> DataFrame:
    """The rows of all groups; `events` as `events.ordered` gives them."""
    session = events.sparkSession
    chosen = events.where("`group` <> ''").select(*_ORDER, *(set(_INPUT) - set(_ORDER)))
    if work.small:
        rows = pa.Table.from_batches(rows_of(chosen.sort(*_ORDER).toArrow().to_batches()), SCHEMA)
        return session.createDataFrame(rows if len(rows) else [], from_arrow_schema(SCHEMA))
    placed = chosen.repartition("group").sortWithinPartitions(*_ORDER)
    session.dataSource.register(StoriesSource)
    folder = work.write(placed, "by_group")
    return session.read.format(StoriesSource.name()).option("folder", folder).load()


class StoriesSource(DataSource):
    """Rows of SCHEMA from Parquet in `folder`, each file with whole groups, sorted.

    Used instead of `DataFrame.mapInArrow`, which needs pandas.
    """

    @classmethod
    def name(cls) -> str:
        return "batonmq_stories"

    def schema(self) -> StructType:
        return from_arrow_schema(SCHEMA)

    def reader(self, schema: StructType) -> DataSourceReader:
        return _StoriesReader(self.options["folder"])


class _File(InputPartition):
    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path


class _StoriesReader(DataSourceReader):
    def __init__(self, folder: str) -> None:
        self._folder = folder

    def partitions(self) -> Sequence[InputPartition]:
        storage, inner = locate(self._folder)
        names = [str(each.path) for each in storage.children(inner)]
        return [_File(name) for name in names if name.endswith(".parquet")]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        # Without any file Spark makes a partition of its own.
        if not isinstance(partition, _File):
            return
        storage, _ = locate(self._folder)
        with storage.file_system.open_input_file(partition.path) as file:
            yield from rows_of(pq.ParquetFile(file).iter_batches(columns=list(_INPUT)))


def rows_of(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Rows of SCHEMA of events that are sorted by group and order."""
    group: _GroupRows | None = None
    rows: list[dict[str, Any]] = []
    for batch in batches:
        for name, event, told in _events(batch):
            if group is None or group.name != name:
                rows += group.finish() if group is not None else []
                group = _GroupRows(name)
            rows += group.apply(event, told)
        if len(rows) >= _ROWS:
            yield pa.RecordBatch.from_pylist(rows, SCHEMA)
            rows = []
    rows += group.finish() if group is not None else []
    if rows:
        yield pa.RecordBatch.from_pylist(rows, SCHEMA)


def _events(batch: pa.RecordBatch) -> Iterator[tuple[str, HistoryEvent, int]]:
    """(group, event, bit mask of controllers) of each row."""
    columns = []
    for name, default in _INPUT.items():
        column = batch.column(name)
        columns.append((column if default is None else pc.fill_null(column, default)).to_pylist())
    for (
        group, log, raft_index, part, time_ms, kind, broker_id, incarnation, address, master_epoch,
        node, master_before, set_before, sync_state_set, confirm_offset, unclean, reason,
        detected_ms, silent_ms, proposed_ms, json, told,
    ) in zip(*columns, strict=True):  # fmt: skip
        event = HistoryEvent(
            log=log, raft_index=raft_index, part=part, time_ms=time_ms, kind=kind,
            broker_name=group, broker_id=broker_id, incarnation=incarnation, address=address,
            master_epoch=master_epoch, node=node, master_before=master_before,
            set_before=tuple(set_before or ()), sync_state_set=tuple(sync_state_set or ()),
            confirm_offset=confirm_offset, unclean=unclean, reason=reason, detected_ms=detected_ms,
            silent_ms=silent_ms, proposed_ms=proposed_ms, json=json,
        )  # fmt: skip
        yield group, event, told


class _Elected(NamedTuple):
    """What a row has of the event of its election."""

    seg: int
    told: int
    confirm_offset: int


class _GroupRows:
    """The fold of one group. `seg` of a row counts its elections from 0."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._fold = Fold()
        self._elections = 0
        self._elected: dict[EventKey, _Elected] = {}

    def apply(self, event: HistoryEvent, told: int) -> list[dict[str, Any]]:
        if event.kind == "elected" and event.broker_id > 0:
            self._elected[event.key] = _Elected(self._elections, told, event.confirm_offset)
            self._elections += 1
        return self._rows(self._fold.apply(event))

    def finish(self) -> list[dict[str, Any]]:
        return self._rows(self._fold.finish())

    def _rows(self, stories: list[Story]) -> list[dict[str, Any]]:
        rows = []
        for story in stories:
            if story.elected_by in self._elected:
                rows.append(self._election(story, self._elected.pop(story.elected_by)))
            elif story.kind in ("master_lost", "election_blocked"):
                rows.append(self._loss(story))
        return rows

    def _election(self, story: Story, elected: _Elected) -> dict[str, Any]:
        return _common(story) | {
            "seg": elected.seg,
            "kind": story.kind,
            "elected_by": _proposer(story),
            "broker_id": story.winner,
            "address": story.address or None,
            "sync_state_set": story.sync_state_set,
            "unclean": story.unclean,
            "elected_ms": story.elected_ms or None,
            "role_ms": story.time_of("role changed") or None,
            "opened_ms": story.opened_ms or None,
            "first_ack_ms": story.first_ack_ms or None,
            "opened_offset": _known(story.opened_offset),
            "confirmed_offset": _known(story.confirmed_offset),
            "confirm_offset": _known(elected.confirm_offset),
            "raft_index": story.elected_by[1] if story.elected_by else None,
            "told": elected.told,
            "began_ms": story.began_ms or None,
            "start_ms": story.start_ms or None,
            "unavailable_ms": story.unavailable_ms,
            "held_ms": _known(story.held_ms),
            "idle": story.is_idle,
            "overtaken": story.overtaken,
            "complete": story.complete,
            "serves": story.at_work,
            "truncated_bytes": story.truncated_bytes,
            "clock_problem": _clock_problem(story),
            **_next(story.next),
        }

    def _loss(self, story: Story) -> dict[str, Any]:
        return _common(story) | {"seg": self._elections, "lost_ms": _first_ms(story)}


def _common(story: Story) -> dict[str, Any]:
    return {
        "group": story.broker_name,
        "cause": _cause(story.reason),
        "how": story.how or story.reason or "an election was requested",
        "reason": story.reason or None,
        "node": story.detected_by or None,
        "master_epoch": story.master_epoch,
        "master_before": story.master_before,
        "set_before": story.set_before,
        "silent_ms": _known(story.silent_ms),
        "detected_ms": story.detected_ms or None,
        "lost_since_ms": story.lost_since_ms or None,
    }


def _next(story: Story | None) -> dict[str, Any]:
    if story is None:
        return {"is_newest": True}
    if not story.is_election:
        failed_ms = story.time_of("failed") or None
        return {"is_newest": False, "next_failed_ms": failed_ms, "next_lost_ms": _first_ms(story)}
    return {
        "is_newest": False,
        "next_kind": story.kind,
        "next_elected_ms": story.elected_ms or None,
        "next_elected_by": _proposer(story),
        "next_failed_ms": story.time_of("failed") or None,
    }


def _proposer(story: Story) -> str | None:
    """The controller that proposed the election."""
    clock = next((step.clock for step in story.steps if step.name == "proposed"), "")
    return clock.removeprefix("controller").strip() or None


def _first_ms(story: Story) -> int | None:
    """When a loss became known by an event of its own."""
    return story.time_of("failed") or story.time_of("blocked") or None


def _cause(reason: str) -> str:
    if reason.startswith("named "):
        return "named"
    head = reason.partition(": ")[0].lower()
    return re.sub("[^a-z0-9]+", "_", head).strip("_")[:40] if reason else "unknown"


def _clock_problem(story: Story) -> str | None:
    """The first step whose clock cannot be right, as a sentence; None if there is none."""
    wrong = story.out_of_order()
    steps = [step for step in story.in_order() if id(step) in wrong]
    for step in steps:
        if step.name in CAUSAL:
            return wrong[id(step)]
    if not steps:
        return None
    older_ms = story.began_ms - min(step.time_ms for step in steps)
    return f"a report beside the steps is {older_ms} ms older than the first of them"


def _known(value: int) -> int | None:
    return value if value >= 0 else None


__all__ = ["SCHEMA", "stories"]
