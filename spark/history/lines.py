"""The lines of all controllers' histories: planned, read, decoded, sorted. Free of Spark.

An event travels as its line of JSON: both engines sort lines, and only the fold decodes all of
them. What is no event is a `Damage`, by the same rules as in the table `history`.
"""

import pickle
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace
from typing import Any, Final, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batonmq.history.event import HistoryEvent, checked_event
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


class Line(NamedTuple):
    """One event as a controller wrote it: which one (by number), and where among its lines."""

    rank: int
    offset: int
    event: HistoryEvent
    text: bytes


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

    def lines(self, source: Source) -> Iterator[Line | Damage]:
        """The lines of one source, in its order. Raises OSError."""
        if isinstance(source, RowGroup):
            return _lines_of_rows(source, self.controllers)
        rank = self.controllers.index(_controller(source))
        return (
            each if isinstance(each, Damage) else Line(rank, each[0], _tamed(each[2]), each[1])
            for each in events_of(source)
        )


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
    return _tamed(checked_event(text))


def _tamed(event: HistoryEvent) -> HistoryEvent:
    if event.json and _WILD_NUMBER.search(event.json):
        return msgspec.structs.replace(event, json="")
    return event


def _lines_of_rows(part: RowGroup, controllers: Sequence[str]) -> Iterator[Line | Damage]:
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
                    yield Line(rank, row if at is None else at, event_of(text), text)
                except ValueError as error:
                    yield Damage(part.path, row, 1, f"no event: {error}", in_log=False)
                row += 1


def _in_ms(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Times as ms since 1970."""
    for at, field in enumerate(batch.schema):
        if pa.types.is_timestamp(field.type):
            ms = pc.floor_temporal(batch[at], unit="millisecond").cast(pa.timestamp("ms", "UTC"))
            batch = batch.set_column(at, field.name, ms.cast(pa.int64()))
    return batch


# -- runs: many lines of one group and log, sorted, as one packed value ---------------------------
#
# An engine sorts and moves runs, each one row, and never sees a line: a row costs the JVM as much
# as decoding a line costs here. The fold merges the runs of a group again.

RUNS: Final = columns_of("string: grp log; long: raft_index part size; binary: run seen")
"""`raft_index` and `part` are of a run's first line, `size` its bytes before they were packed; a
row with `seen` is no run, but what a task has seen."""
ORDER: Final = ("log", "raft_index", "part")
_RUN_LINES: Final = 20_000
"""How many lines a task holds: a fold holds one run of each task whose lines it merges."""
_CODEC: Final = "zstd"

Entry = tuple[int, int, int, int, bytes]
"""Raft index, part, controller, its place there, the line: sorted by that."""


class RunBuilder:
    """Takes lines in any order."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, str], list[Entry]] = {}
        self._lines = 0

    @property
    def is_full(self) -> bool:
        return self._lines >= _RUN_LINES

    def add(self, line: Line) -> None:
        event = line.event
        run = self._held.setdefault((event.broker_name, event.log), [])
        run.append((event.raft_index, event.part, line.rank, line.offset, line.text))
        self._lines += 1

    def take(self, seen: object = None) -> pa.Table:
        """What is held, as rows of RUNS; then nothing is. `seen` is a row of its own."""
        rows: list[dict[str, Any]] = []
        for (group, log), run in self._held.items():
            run.sort()  # `merged` knows a run by the place of its first line
            raw = pickle.dumps(run)
            packed = pa.compress(raw, _CODEC, asbytes=True)
            first = {"raft_index": run[0][0], "part": run[0][1]}
            rows.append({"grp": group, "log": log, **first, "size": len(raw), "run": packed})
        if seen is not None:
            rows.append({"seen": pickle.dumps(seen)})
        self._held, self._lines = {}, 0
        return pa.Table.from_pylist(rows, RUNS)


def merged(runs: Iterable[tuple[int, int, int, bytes]]) -> Iterator[Entry]:
    """The lines of runs (Raft index and part of the first line, size, packed) which ascend by their
    first line, in order. Only runs that overlap are held together."""
    heap: list[tuple[Entry, int, Iterator[Entry]]] = []
    for number, (index, part, size, packed) in enumerate(runs):
        while heap and heap[0][0] < (index, part):
            yield _next(heap)
        entries = iter(pickle.loads(pa.decompress(packed, size, _CODEC, asbytes=True)))
        heappush(heap, (next(entries), number, entries))
    while heap:
        yield _next(heap)


def _next(heap: list[tuple[Entry, int, Iterator[Entry]]]) -> Entry:
    entry, number, entries = heap[0]
    following = next(entries, None)
    if following is None:
        heappop(heap)
    else:
        heapreplace(heap, (following, number, entries))
    return entry
