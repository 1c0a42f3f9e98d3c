"""The table `history`: the events that controllers wrote down, one row per line of their files.

A file is split like any text: a range owns the lines that begin in it. A bad line costs itself
only. Free of Spark.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Final, cast

import msgspec
import numpy as np
import pyarrow as pa

from batonmq.history.event import TIMES, HistoryEvent
from batonmq.history.file import controller_of
from batonmq.spark.read.columns import HISTORY_COLUMNS, TIME_MS_MAX, batch_of, timestamps
from batonmq.spark.read.damage import Damage
from batonmq.spark.read.storage import OpenFile, Storage, even_parts

_PIECE_BYTES: Final = 4 << 20
_LINE_BYTES: Final = 1 << 16  # most lines are shorter


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
_UNREADABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def event_of(line: bytes) -> HistoryEvent:
    """The event of a line; a time that no calendar has is 0. Raises ValueError for what is no
    event."""
    try:
        return cast(HistoryEvent, _decode(line if line.isascii() else line.decode()))
    except _UNREADABLE:
        pass
    try:
        told = msgspec.structs.asdict(_decode_lenient(line.decode()))
    except _UNREADABLE as error:
        raise ValueError(str(error)) from error
    known = {name: value for name, value in told.items() if value is not None}
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


def read_history(
    storage: Storage, wanted: HistoryRange, schema: pa.Schema
) -> Iterator[pa.RecordBatch | Damage]:
    """Batches of events, and lines that are none.

    A last line without its end is being written, or was torn by a crash: it is not there.
    """
    with storage.open(wanted.path) as file:
        for offset, text in line_pieces(file, wanted):
            yield from decode_lines(wanted.path, offset, text, schema)


def line_pieces(file: OpenFile, wanted: HistoryRange) -> Iterator[tuple[int, bytes]]:
    """(offset, whole lines) of the range, in pieces. Raises OSError for a shorter file."""
    if file.size < wanted.end:
        raise OSError(
            f"{file.path} has {file.size} bytes, {wanted.end} were listed: its controller began "
            "another file of this name meanwhile; read again"
        )
    # The line that holds the byte before the range belongs to the range before.
    position = _line_end(file, wanted.begin - 1) if wanted.begin else 0
    while position < wanted.end:
        # A line belongs to the piece in which it begins, and may end behind it.
        end = _line_end(file, min(position + _PIECE_BYTES, wanted.end) - 1)
        data = file.read_at(position, end - position)
        if cut := data.rfind(b"\n") + 1:
            yield position, data[:cut]
        position = end


def _line_end(file: OpenFile, position: int) -> int:
    """Behind the first line end at or behind `position`, or the file's end."""
    while data := file.read_at(position, _LINE_BYTES):
        if (at := data.find(b"\n")) >= 0:
            return position + at + 1
        position += len(data)
    return file.size


def events_of(
    path: str, offset: int, text: bytes
) -> Iterator[tuple[int, bytes, HistoryEvent] | Damage]:
    """(offset, line, event) of whole lines, which begin at an offset of the file, and damage."""
    for line in text.split(b"\n")[:-1]:
        try:
            yield offset, line, event_of(line)
        except ValueError as error:
            yield Damage(path, offset, len(line) + 1, f"no event: {error}", in_log=False)
        offset += len(line) + 1


def decode_lines(
    path: str, offset: int, text: bytes, schema: pa.Schema
) -> Iterator[pa.RecordBatch | Damage]:
    """Whole lines as damage, and as rows of one batch; `offset`: where they begin."""
    events: list[HistoryEvent] = []
    places: list[int] = []
    for found in events_of(path, offset, text):
        if isinstance(found, Damage):
            yield found
            continue
        places.append(found[0])
        events.append(found[2])
    if not events:
        return
    columns: dict[str, Any] = {
        "file": path, "controller": controller_of(path.rpartition("/")[2]), "line_offset": places,
    }  # fmt: skip
    for column in HISTORY_COLUMNS:
        if column.name in schema.names:
            values = [getattr(event, column.field) for event in events]
            if column.field in TIMES:
                ms = np.array(values, np.int64)
                columns[column.name] = timestamps(ms, ms == 0)
            else:
                unknown = column.null_for
                columns[column.name] = [
                    None if unknown is not None and value == unknown else value for value in values
                ]
    yield batch_of(schema, len(events), columns)
