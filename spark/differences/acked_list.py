"""Lists of acknowledged sends: which pieces there are, and the entries of one.

JSON lines, packed ones and folders, too. Free of Spark.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Final

import msgspec
import pyarrow as pa

from batonmq.spark.read.history_table import HistoryRange, line_pieces
from batonmq.spark.read.storage import OpenFile, Storage, files_of

_PIECE_BYTES: Final = 32 << 20
_PACKED: Final = (".gz", ".bz2", ".zst", ".lz4")
_SHOWN: Final = 100
_ROWS_MAX: Final = 50_000
_LINE_MAX: Final = 1 << 20
_Int32 = Annotated[int, msgspec.Meta(ge=-(1 << 31), le=(1 << 31) - 1)]
_Int64 = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]


class Entry(msgspec.Struct, frozen=True):
    """An entry of a list; any column may be absent, others are ignored."""

    topic: str | None = None
    broker: str | None = None
    queue_id: _Int32 | None = None
    queue_offset: _Int64 | None = None
    unique_key: str | None = None
    msg_id: str | None = None
    body_crc: _Int64 | None = None
    producer: str | None = None
    number: _Int64 | None = None

    @property
    def id_offset(self) -> int | None:
        """The log offset in the message id."""
        try:
            at = int((self.msg_id or "")[-16:], 16)
        except ValueError:
            return None
        return at if 0 <= at < 1 << 63 else None

    @property
    def is_placed(self) -> bool:
        return None not in (self.topic, self.queue_id, self.queue_offset)


_TEXTS: Final = ("topic", "broker", "unique_key", "msg_id", "producer")
#: Columns of an entry. `entry`: it among all; `id_offset`: the log offset that its message id
#: names. `fault`: why a line is none, with its `file`; `is_torn`: the last line, without its end.
ENTRY_SCHEMA: Final = pa.schema(
    [
        *((name, pa.string() if name in _TEXTS else pa.int32() if name == "queue_id" else
           pa.int64()) for name in Entry.__struct_fields__),
        ("entry", pa.int64()), ("id_offset", pa.int64()), ("file", pa.string()),
        ("fault", pa.string()), ("is_torn", pa.bool_()),
    ]
)  # fmt: skip
_COLUMNS: Final = Entry.__struct_fields__
ALLOWED: Final = (
    "an entry has unique_key, or msg_id, or topic, queue_id and queue_offset; its columns are "
    + ", ".join(name if name in _TEXTS else f"{name} (a number)" for name in _COLUMNS)
)


class BadEntry(Exception):
    """An entry that cannot be used. `is_torn`: the last line of a file, without its end."""

    def __init__(self, path: str, sentence: str, *, is_torn: bool = False) -> None:
        super().__init__(f"{path}, {sentence}; {ALLOWED}")
        self.path = path
        self.is_torn = is_torn


@dataclass(frozen=True, slots=True)
class Piece:
    """What one task reads of a list: lines that begin in a part of a file; `end` 0: all of it."""

    storage: Storage
    path: str
    begin: int = 0
    end: int = 0


def plan_lists(patterns: Sequence[str]) -> tuple[list[Piece], int]:
    """(pieces, bytes of all files). Raises FileNotFoundError if nothing matches, OSError."""
    pieces: list[Piece] = []
    size = 0
    for storage, info in files_of(patterns):
        path = str(info.path)
        size += info.size
        if path.endswith(_PACKED):
            pieces.append(Piece(storage, path))
        else:
            count = -(-info.size // _PIECE_BYTES)
            cuts = [info.size * part // count for part in range(count)] + [info.size]
            pieces += [Piece(storage, path, begin, end) for begin, end in pairwise(cuts)]
    return pieces, size


def entries_of(piece: Piece) -> Iterator[Entry]:
    """The entries of a piece. Raises BadEntry, OSError."""
    for offset, line in _lines(piece):
        if not line.strip():
            continue
        try:
            try:
                fields = msgspec.json.decode(line)
            except (ValueError, RecursionError):
                fields = None
            if not isinstance(fields, dict):
                raise ValueError("is no JSON object")
            for name in _TEXTS:
                if not isinstance(fields.get(name), str | None):
                    fields[name] = json.dumps(fields[name])
            entry = msgspec.convert(fields, Entry)
            if not entry.is_placed and entry.unique_key is None and entry.msg_id is None:
                raise ValueError("names no message")
            yield entry
        except ValueError as error:
            shown = line.strip()[:_SHOWN].decode("utf-8", "replace")
            sentence = f"line {_line_number(piece, offset)}: {shown!r} {error}"
            is_torn = not line.endswith(b"\n") and not piece.path.endswith(_PACKED)
            raise BadEntry(piece.path, sentence, is_torn=is_torn) from error


def entry_rows(number: int, piece: Piece) -> Iterator[pa.RecordBatch]:
    """The rows of a piece, which has that number among all. Raises OSError."""
    rows: list[dict[str, object]] = []
    count = 0
    try:
        for entry in entries_of(piece):
            count += 1
            row = msgspec.structs.asdict(entry)
            rows.append(row | {"entry": number << 40 | count, "id_offset": entry.id_offset})
            if len(rows) == _ROWS_MAX:
                yield pa.RecordBatch.from_pylist(rows, ENTRY_SCHEMA)
                rows = []
    except BadEntry as error:
        rows.append({
            "entry": number << 40 | count, "file": error.path, "fault": str(error),
            "is_torn": error.is_torn,
        })  # fmt: skip
    if rows:
        yield pa.RecordBatch.from_pylist(rows, ENTRY_SCHEMA)


def _lines(piece: Piece) -> Iterator[tuple[int, bytes]]:
    """(offset, line) of a piece, lines with their ends; also of a last one without."""
    if not piece.end:
        with piece.storage.file_system.open_input_stream(piece.path) as stream:
            yield from _placed(0, io.BufferedReader(stream))
        return
    with piece.storage.open(piece.path) as file:
        for offset, text in line_pieces(file, HistoryRange(piece.path, piece.begin, piece.end)):
            yield from _placed(offset, io.BytesIO(text))
        if piece.end == file.size:
            yield from _last_line(file)


def _placed(offset: int, lines: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    for line in lines:
        yield offset, line
        offset += len(line)


def _last_line(file: OpenFile) -> Iterator[tuple[int, bytes]]:
    """What follows the last line end of a file, if anything does; of more than 1 MiB the end."""
    begin = max(0, file.size - _LINE_MAX)
    tail = file.read_at(begin, _LINE_MAX)
    cut = tail.rfind(b"\n") + 1
    if cut < len(tail):
        yield begin + cut, tail[cut:]


def _line_number(piece: Piece, offset: int) -> int:
    """Of the line at an offset, from 1."""
    count, position = 1, 0
    with piece.storage.file_system.open_input_stream(piece.path) as stream:
        while position < offset:
            data = stream.read(min(1 << 20, offset - position))
            count += data.count(b"\n")
            position += len(data)
    return count
