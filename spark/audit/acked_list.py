"""Lists of acknowledged sends: which pieces there are, and the entries of one.

JSON lines, or Parquet or CSV by the names of the files; folders, too. Free of Spark.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, NamedTuple, TypeGuard

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from batonmq.spark.audit.acked_lines import ALLOWED, COLUMNS, csv_entry, entry_fault, last_line
from batonmq.spark.read.history_table import HistoryRange, line_pieces
from batonmq.spark.read.storage import Storage, locate

_PIECE_BYTES: Final = 32 << 20
_PACKED: Final = (".gz", ".bz2", ".zst", ".lz4")
_KINDS: Final = {"string": pa.string(), "int": pa.int32(), "bigint": pa.int64()}
_NAMES: Final = tuple(name for name, _ in COLUMNS)
_TEXTS: Final = tuple(name for name, kind in COLUMNS if kind == "string")
_KEYS: Final = {"unique_key", "msg_id", "queue_offset"}


class Entry(NamedTuple):
    """An entry of a list. `group`: that of its broker, where it is known."""

    topic: str | None
    broker: str | None
    queue_id: int | None
    queue_offset: int | None
    unique_key: str | None
    msg_id: str | None
    body_crc: int | None
    producer: str | None
    number: int | None
    group: str | None = None


ENTRY_SCHEMA: Final = pa.schema([(name, _KINDS[kind]) for name, kind in COLUMNS]).append(
    pa.field("group", pa.string())
)


class BadEntry(ValueError):
    """An entry that cannot be used; of files of lines the sentence is found later."""

    def __init__(self, path: str, sentence: str = "") -> None:
        super().__init__(sentence or path)
        self.path = path
        self.sentence = sentence


@dataclass(frozen=True, slots=True)
class Piece:
    """What one task reads of a list: a file, lines that begin in a part of it, or a row group."""

    storage: Storage
    path: str
    begin: int = 0
    end: int = 0
    row_group: int = -1


def plan_lists(patterns: Sequence[str]) -> tuple[list[Piece], int]:
    """(pieces, bytes of all files). Raises FileNotFoundError if nothing matches, ValueError for
    columns that are none of a list, OSError.
    """
    pieces: list[Piece] = []
    size = 0
    for storage, info in _files(patterns):
        path = str(info.path)
        size += info.size
        if path.endswith(".parquet"):
            with storage.file_system.open_input_file(path) as opened:
                file = pq.ParquetFile(opened)
                _check_columns(path, file.schema_arrow)
                count = file.num_row_groups
            pieces += [Piece(storage, path, row_group=each) for each in range(count)]
        elif path.endswith((".csv", *_PACKED)):
            pieces.append(Piece(storage, path))
        else:
            count = -(-info.size // _PIECE_BYTES)
            cuts = [info.size * part // count for part in range(count)] + [info.size]
            pieces += [Piece(storage, path, begin, end) for begin, end in pairwise(cuts)]
    return pieces, size


def entries_of(piece: Piece) -> Iterator[Entry]:
    """The entries of a piece, their groups unknown. Raises BadEntry, OSError."""
    if piece.row_group >= 0:
        return _of_rows(piece)
    if piece.path.endswith((".csv", ".csv.gz")):
        return _of_csv(piece)
    return _of_lines(piece)


def is_placed(entry: Entry) -> bool:
    """Whether it names a place; its group is another question."""
    return None not in (entry.topic, entry.queue_id, entry.queue_offset)


def is_numbered(entry: Entry) -> bool:
    """Whether it can be put in the order in which its producer sent it."""
    return entry.producer is not None and entry.number is not None and is_placed(entry)


def _files(patterns: Sequence[str]) -> Iterator[tuple[Storage, fs.FileInfo]]:
    """All files, but for those whose path in a folder has a part that begins with `_` or a dot."""
    for pattern in patterns:
        storage, inner = locate(pattern)
        found = storage.glob(inner)
        if not found or not all(storage.exists(path) for path in found):
            raise FileNotFoundError(f"{pattern}: nothing matches")
        system = storage.file_system
        for path in found:
            info = system.get_file_info(path)
            if info.is_file:
                yield storage, info
                continue
            below = system.get_file_info(fs.FileSelector(path, recursive=True))
            for each in sorted(below, key=lambda info: str(info.path)):
                parts = str(each.path)[len(path) :].strip("/").split("/")
                if each.is_file and not any(part.startswith(("_", ".")) for part in parts):
                    yield storage, each


def _check_columns(path: str, schema: pa.Schema) -> None:
    _check_names(path, schema.names)
    for name, kind in COLUMNS:
        if name not in schema.names:
            continue
        theirs = schema.field(name).type
        is_text = pa.types.is_string(theirs) or pa.types.is_large_string(theirs)
        is_number = pa.types.is_integer(theirs) or pa.types.is_floating(theirs)
        if not (is_text if kind == "string" else is_number) and not pa.types.is_null(theirs):
            wanted = "text" if kind == "string" else "numbers"
            raise ValueError(f"{path}: its column {name} is {theirs}, not {wanted}; {ALLOWED}")


def _check_names(path: str, names: Sequence[str]) -> None:
    if not _KEYS & set(names):
        raise ValueError(f"{path} has the columns {', '.join(names)}; {ALLOWED}")


def _of_rows(piece: Piece) -> Iterator[Entry]:
    with piece.storage.file_system.open_input_file(piece.path) as opened:
        file = pq.ParquetFile(opened)
        wanted = [name for name in _NAMES if name in file.schema_arrow.names]
        counts = (file.metadata.row_group(n).num_rows for n in range(piece.row_group))
        row = sum(counts)
        for batch in file.iter_batches(row_groups=[piece.row_group], columns=wanted):
            for fields in batch.to_pylist():
                whole: dict[str, Any] = {
                    name: int(value) if isinstance(value, float) and value.is_integer() else value
                    for name, value in fields.items()
                }
                if entry_fault(whole):
                    sentence = f"{piece.path}, row {row}: it cannot be used; {ALLOWED}"
                    raise BadEntry(piece.path, sentence)
                yield Entry(*map(whole.get, _NAMES))
                row += 1


def _of_csv(piece: Piece) -> Iterator[Entry]:
    with piece.storage.file_system.open_input_stream(piece.path) as stream:
        rows = csv.reader(io.TextIOWrapper(stream, "utf-8", errors="replace", newline=""))
        names = next(rows, None)
        if names is None:
            return
        _check_names(piece.path, names)
        for row in rows:
            if not row:
                continue
            entry = csv_entry(names, row) if len(row) == len(names) else None
            if not _is_entry(entry):
                raise BadEntry(piece.path)
            yield Entry(*map(entry.get, _NAMES))


def _of_lines(piece: Piece) -> Iterator[Entry]:
    for line in _lines(piece):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            entry = None
        if not _is_entry(entry):
            raise BadEntry(piece.path)
        for name in _TEXTS:
            value = entry.get(name)
            if value is not None and not isinstance(value, str):
                entry[name] = json.dumps(value)
        yield Entry(*map(entry.get, _NAMES))


def _lines(piece: Piece) -> Iterator[bytes]:
    if piece.end:
        with piece.storage.open(piece.path) as file:
            wanted = HistoryRange(piece.path, piece.begin, piece.end)
            for _, text in line_pieces(file, wanted):
                yield from text.split(b"\n")
            if piece.end == file.size:
                yield last_line(file)
        return
    with piece.storage.file_system.open_input_stream(piece.path) as stream:
        yield from io.BufferedReader(stream)


def _is_entry(entry: Any) -> TypeGuard[dict[str, Any]]:
    return isinstance(entry, dict) and entry_fault(entry) is None
