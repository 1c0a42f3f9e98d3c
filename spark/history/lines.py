"""The lines of all controllers' histories: planned, read, decoded. Free of Spark.

An event travels as its line of JSON: both engines sort lines, and only the fold decodes all of
them. What is no event is a `Damage`, by the same rules as in the table `history`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batonmq.history.event import ON_BROKER_CLOCK, HistoryEvent, checked_event
from batonmq.history.file import controller_of
from batonmq.spark.read.columns import HISTORY_COLUMNS, columns_of
from batonmq.spark.read.damage import Damage
from batonmq.spark.read.history_table import events_of, plan_history
from batonmq.spark.read.storage import Storage, TextPart, files_of, found

CONTROLLERS_MAX: Final = 63
"""As many as a bit mask of 64 bits has room for."""
STREAM: Final = "stream"
"""The controller of an event that was read without its name."""
_WILD_NUMBER: Final = re.compile(r"\d{17}")
_NEEDED: Final = ("log", "raft_index", "time", "kind")
_PARQUET_TIMES: Final = 8
"""Lines of text are so many times larger than Parquet of the same events."""


LINES: Final = columns_of("""
    string: grp log
    long: raft_index part rank place
    binary: line
    long: time_ms set_size
    bool: by_broker
    string: file fault
""")
"""A line of a controller (`rank`), at a `place` among its lines. `by_broker`: the time is of a
broker's clock; `set_size`: of an event that may change the set. A line that is no event has only
its `file`, `place` and `fault`."""
ORDER: Final = ("log", "raft_index", "part", "rank", "place", "line")
_ROWS_MAX: Final = 20_000
_SETS: Final = ("elected", "set_altered")
Row = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class RowGroup:
    """One row group of a Parquet file with columns of table `history`."""

    storage: Storage
    path: str
    number: int
    first_row: int


Source = TextPart | RowGroup
"""What one task reads: a piece of a file of lines, or of Parquet."""


@dataclass(frozen=True, slots=True)
class LinesPlan:
    """All sources and the controllers by name; `size_bytes` as lines of text."""

    sources: tuple[Source, ...]
    controllers: tuple[str, ...]
    size_bytes: int

    def __post_init__(self) -> None:
        if len(self.controllers) > CONTROLLERS_MAX:
            raise ValueError(
                f"{len(self.controllers)} controllers: at most {CONTROLLERS_MAX} can be "
                "distinguished; read fewer histories at once"
            )

    def read(self, source: Source) -> Iterator[pa.RecordBatch]:
        """Rows of LINES of one source, in its order. Raises OSError."""
        if isinstance(source, RowGroup):
            rows = _rows_of_parquet(source, self.controllers)
        else:
            rows = _rows_of_text(source, self.controllers)
        while some := list(islice(rows, _ROWS_MAX)):
            columns = zip(*some, strict=True)
            arrays = [pa.array(each, kind) for each, kind in zip(columns, LINES.types, strict=True)]
            yield pa.RecordBatch.from_arrays(arrays, schema=LINES)


def plan_files(paths: Sequence[str], split_bytes: int) -> LinesPlan:
    """Of folders with `history-*.jsonl`, or such files, as patterns. Raises OSError, ValueError."""
    parts = plan_history(found(paths), split_bytes)
    names = sorted({_controller(part) for part in parts})
    return LinesPlan(tuple(parts), tuple(names), sum(part.end - part.begin for part in parts))


def _controller(part: TextPart) -> str:
    return controller_of(part.path) or part.path


def plan_parquet(paths: Sequence[str]) -> LinesPlan:
    """Of Parquet folders with the columns of table `history`, some of them may be missing.

    Raises ValueError for a folder that has not even what names an event, OSError.
    """
    sources: list[Source] = []
    names: set[str] = set()
    size = 0
    must = f"--history-parquet {','.join(paths)}: {{}}; it must be what stream_history writes, or "
    must += "the table history"
    for storage, info in files_of(paths):
        size += info.size
        with storage.file_system.open_input_file(info.path) as opened:
            file = pq.ParquetFile(opened)
            lacking = sorted(set(_NEEDED) - set(file.schema_arrow.names))
            if lacking:
                raise ValueError(must.format(f"no column {', '.join(lacking)}"))
            names |= _controllers(file)
            first = 0
            for number in range(file.num_row_groups):
                sources.append(RowGroup(storage, info.path, number, first))
                first += file.metadata.row_group(number).num_rows
    if not sources and not size:
        raise ValueError(must.format("no Parquet files are there"))
    return LinesPlan(tuple(sources), tuple(sorted(names)), size * _PARQUET_TIMES)


def _controllers(file: pq.ParquetFile) -> set[str]:
    if "controller" not in file.schema_arrow.names:
        return {STREAM}
    names = {
        name
        for batch in file.iter_batches(columns=["controller"])
        for name in pc.unique(batch.column(0)).to_pylist()
    }
    return {STREAM if name is None else str(name) for name in names}


def event_of(text: bytes) -> HistoryEvent:
    """The event of a line; a report that has a number of 17 digits or more (no offset and no span
    is so large) is empty. Raises ValueError for what is no event."""
    event = checked_event(text)
    is_wild = event.json and _WILD_NUMBER.search(event.json)
    return msgspec.structs.replace(event, json="") if is_wild else event


def _row(event: HistoryEvent, rank: int, place: int, text: bytes) -> Row:
    members = max(len(event.sync_state_set), len(event.set_before)) if event.kind in _SETS else 0
    return (
        event.broker_name, event.log, event.raft_index, event.part, rank, place, text,
        event.time_ms, members, event.kind in ON_BROKER_CLOCK, None, None,
    )  # fmt: skip


def _faulty(file: str, place: int, fault: str) -> Row:
    return (*[None] * 5, place, *[None] * 4, file, fault)


def _rows_of_text(part: TextPart, controllers: Sequence[str]) -> Iterator[Row]:
    rank = controllers.index(_controller(part))
    for each in events_of(part.path, part.lines()):
        if isinstance(each, Damage):
            yield _faulty(each.file, each.offset, each.reason)
        else:
            place, text, event = each
            yield _row(event, rank, place, text)


def _rows_of_parquet(part: RowGroup, controllers: Sequence[str]) -> Iterator[Row]:
    ranks = {name: rank for rank, name in enumerate(controllers)}
    encode = msgspec.json.Encoder().encode
    with part.storage.file_system.open_input_file(part.path) as opened:
        file = pq.ParquetFile(opened)
        here = set(file.schema_arrow.names)
        fields = {column.name: column.field for column in HISTORY_COLUMNS if column.name in here}
        wanted = [*fields, *(here & {"controller", "line_offset"})]
        row = part.first_row
        for batch in file.iter_batches(row_groups=[part.number], columns=wanted):
            for values in _in_ms(batch).to_pylist():
                rank = ranks[values.pop("controller", None) or STREAM]
                at = values.pop("line_offset", None)
                # The table has null for a time of 0, and a line without the field is no event.
                known = {fields[name]: value for name, value in values.items() if value is not None}
                text = encode({"time_ms": 0} | known)
                try:
                    yield _row(checked_event(text), rank, row if at is None else at, text)
                except ValueError as error:
                    yield _faulty(part.path, row, f"no event: {error}")
                row += 1


def _in_ms(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Times as ms since 1970."""
    for at, field in enumerate(batch.schema):
        if pa.types.is_timestamp(field.type):
            ms = pc.floor_temporal(batch[at], unit="millisecond").cast(pa.timestamp("ms", "UTC"))
            batch = batch.set_column(at, field.name, ms.cast(pa.int64()))
    return batch
