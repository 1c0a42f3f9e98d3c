"""The table `history`: the events that controllers wrote down, one row per line of their files.

A file is split like any text: a range owns the lines that begin in it. Arrow's own JSON reader
decodes a piece at once; a piece that it refuses is decoded line by line, so one bad line costs
itself only. Free of Spark.
"""

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from batonmq.history.event import REQUIRED
from batonmq.history.file import controller_of
from batonmq.spark.read.columns import HISTORY_COLUMNS, HistoryColumn, batch_of, timestamps
from batonmq.spark.read.damage import Damage
from batonmq.spark.read.storage import OpenFile, Storage, even_parts

_PIECE_BYTES: Final = 4 << 20
_LINE_BYTES: Final = 1 << 16  # most lines are shorter
_RAW: Final = pa.schema([(column.field, column.field_type) for column in HISTORY_COLUMNS])
_COLUMNS: Final = {column.name: column for column in HISTORY_COLUMNS}


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


def decode_lines(
    path: str, offset: int, text: bytes, schema: pa.Schema
) -> Iterator[pa.RecordBatch | Damage]:
    """Whole lines as rows and damage; `offset`: where they begin, so that each has a place."""
    ends = np.flatnonzero(np.frombuffer(text, np.uint8) == ord("\n")) + 1
    begins = np.concatenate((np.zeros(1, np.int64), ends[:-1]))
    try:
        if not text.isascii():
            text.decode()  # Arrow would hand on strings that are no UTF-8
        table = pj.read_json(
            io.BytesIO(text),
            pj.ReadOptions(use_threads=False, block_size=len(text) + 1),
            pj.ParseOptions(explicit_schema=_RAW, unexpected_field_behavior="ignore"),
        )
        whole = table.num_rows == len(begins) and not any(
            table[name].null_count for name in REQUIRED
        )
    except (pa.ArrowInvalid, UnicodeDecodeError):
        whole = False
    if whole:
        yield _batch(path, table.combine_chunks(), begins + offset, schema)
        return
    rows: list[dict[str, Any]] = []
    places: list[int] = []
    for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
        try:
            rows.append(checked_line(text[begin:end]))
            places.append(begin + offset)
        except ValueError as error:
            what = f"no event: {error}"
            yield Damage(path, begin + offset, end - begin, what, in_log=False)
    if rows:
        table = pa.Table.from_pylist(rows, _RAW)
        yield _batch(path, table, np.array(places, np.int64), schema)


def checked_line(line: bytes) -> dict[str, Any]:
    """The fields of one line. Raises ValueError for what is no event."""
    try:
        event = json.loads(line.decode())
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(event, dict):
        raise ValueError("not an object")
    missing = [name for name in REQUIRED if event.get(name) is None]
    if missing:
        raise ValueError(f"without {', '.join(missing)}")
    try:
        pa.Table.from_pylist([event], _RAW)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
        raise ValueError(str(error)) from error
    return event


def _batch(
    path: str, table: pa.Table, places: np.ndarray[Any, Any], schema: pa.Schema
) -> pa.RecordBatch:
    columns: dict[str, Any] = {
        "file": path, "controller": controller_of(path.rpartition("/")[2]), "line_offset": places,
    }  # fmt: skip
    columns |= {name: _column(table, _COLUMNS[name]) for name in schema.names if name in _COLUMNS}
    return batch_of(schema, table.num_rows, columns)


def _column(table: pa.Table, column: HistoryColumn) -> pa.Array:
    raw = table[column.field].combine_chunks()
    if column.is_time:
        values = pc.fill_null(raw, column.null_for).to_numpy(zero_copy_only=False)
        return timestamps(values, values == column.null_for)
    if column.null_for is not None:
        return pc.if_else(pc.equal(raw, column.null_for), None, raw)
    return raw if column.absent is None else pc.fill_null(raw, column.absent)
