"""The table `history`: the events that controllers wrote down, one row per line of their files.

A file is split like any text: a range owns the lines that begin in it. A bad line costs itself
only. Free of Spark.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any, Final, cast

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec.structs import astuple

from batonmq.history.event import TIMES, HistoryEvent
from batonmq.history.file import controller_of
from batonmq.protocol.fastjson import NOT_JSON
from batonmq.spark.read.columns import HISTORY_COLUMNS, TIME_MS_MAX, batch_of, timestamps
from batonmq.spark.read.damage import Damage
from batonmq.spark.read.storage import Storage, even_parts, lines_of

_BATCH_LINES: Final = 10_000


def _decoder(*, lenient: bool) -> Any:
    """Of lines as events whose numbers fit their columns and whose times a calendar has. `lenient`:
    times are any numbers, and what need not be there may be null, which is None then."""
    made: list[Any] = []
    for field in msgspec.structs.fields(HistoryEvent):
        bits = 31 if field.name == "part" else 63
        least, most = -(1 << bits), (1 << bits) - 1
        if field.name in TIMES and not lenient:
            least, most = 0, TIME_MS_MAX
        number: Any = Annotated[int, msgspec.Meta(ge=least, le=most)]
        numbers: dict[Any, Any] = {int: number, tuple[int, ...]: tuple[number, ...]}
        kind = numbers.get(field.type, field.type)
        if field.required:
            made.append((field.name, kind))
        elif lenient:
            made.append((field.name, kind | None, None))
        else:
            made.append((field.name, kind, field.default))
    bases: tuple[type[msgspec.Struct], ...] = () if lenient else (HistoryEvent,)
    return msgspec.json.Decoder(
        msgspec.defstruct("HistoryEvent", made, bases=bases, frozen=True, kw_only=True)
    ).decode


_decode: Final = _decoder(lenient=False)
_decode_lenient: Final = _decoder(lenient=True)


def event_of(line: bytes) -> HistoryEvent:
    """The event of a line; a time that no calendar has is 0. Raises ValueError for what is no
    event."""
    try:
        return cast(HistoryEvent, _decode(line if line.isascii() else line.decode()))
    except NOT_JSON:
        pass
    try:
        found = msgspec.structs.asdict(_decode_lenient(line.decode()))
    except NOT_JSON as error:
        raise ValueError(str(error)) from error
    known = {name: value for name, value in found.items() if value is not None}
    wild = (name for name in TIMES if not 0 <= known.get(name, 0) <= TIME_MS_MAX)
    return HistoryEvent(**known | dict.fromkeys(wild, 0))


@dataclass(frozen=True, slots=True)
class HistoryRange:
    """Lines that begin in [begin, end) of a file."""

    path: str
    begin: int
    end: int


def plan_history(storage: Storage, paths: list[str], size_bytes: int) -> list[HistoryRange]:
    """Ranges of all history files; a path may be a file or a folder that holds `history-*.jsonl`.

    Raises OSError if a path holds none.
    """
    ranges: list[HistoryRange] = []
    for path in paths:
        files = [path]
        if not path.endswith(".jsonl"):
            children = storage.children(path)
            files = [str(each.path) for each in children if controller_of(each.base_name)]
            if not files:
                raise FileNotFoundError(f"{path}: no history-<controller>.jsonl is there")
        for name in files:
            with storage.open(name) as file:
                size = file.size
            parts = even_parts(0, size, max(1, -(-size // size_bytes)))
            ranges += [HistoryRange(name, begin, end) for begin, end in parts]
    return ranges


def events_of(
    storage: Storage, part: HistoryRange
) -> Iterator[tuple[int, bytes, HistoryEvent] | Damage]:
    """(offset, line without its end, event), and lines that are none. Raises OSError.

    A last line without its end is being written, or was torn by a crash: it is not there.
    """
    for offset, line in lines_of(storage, part.path, part.begin, part.end):
        if line.endswith(b"\n"):
            try:
                yield offset, line[:-1], event_of(line)
            except ValueError as error:
                yield Damage(part.path, offset, len(line), f"no event: {error}", in_log=False)


def read_history(
    storage: Storage, wanted: HistoryRange, schema: pa.Schema
) -> Iterator[pa.RecordBatch | Damage]:
    """Batches of events, and lines that are none. Raises OSError."""
    where = {"file": wanted.path, "controller": controller_of(wanted.path.rpartition("/")[2])}
    found = events_of(storage, wanted)
    while some := list(islice(found, _BATCH_LINES)):
        yield from (each for each in some if isinstance(each, Damage))
        rows = [each for each in some if not isinstance(each, Damage)]
        if rows:
            places, _, events = zip(*rows, strict=True)
            yield event_rows(schema, events, where | {"line_offset": list(places)})


def event_rows(
    schema: pa.Schema, events: Sequence[HistoryEvent], where: Mapping[str, Any]
) -> pa.RecordBatch:
    """The columns of at least one event; `where`: those that name a place in a file."""
    columns = dict(where)
    by_field = zip(*map(astuple, events), strict=True)
    of_field = dict(zip(HistoryEvent.__struct_fields__, by_field, strict=True))
    for column in HISTORY_COLUMNS:
        if column.name not in schema.names:
            continue
        values, unknown = of_field[column.field], column.null_for
        if column.field in TIMES:
            ms = np.array(values, np.int64)
            columns[column.name] = timestamps(ms, ms == 0)
        elif unknown == ():
            columns[column.name] = [value or None for value in values]
        elif unknown is None:
            columns[column.name] = pa.array(values, column.type)
        else:
            array = pa.array(values, column.type)
            columns[column.name] = pc.if_else(pc.equal(array, unknown), None, array)
    return batch_of(schema, len(events), columns)
