"""Lists of acknowledged sends: which pieces there are, and the entries of one.

JSON lines, packed ones and folders, too. Free of Spark.
"""

import json
from collections.abc import Iterator, Sequence
from itertools import islice, takewhile
from typing import Annotated, Final

import msgspec
import pyarrow as pa

from batonmq.spark.read.columns import columns_of
from batonmq.spark.read.storage import TextPart, even_parts, files_of

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
_ALLOWED: Final = (
    "an entry has unique_key, or msg_id, or topic, queue_id and queue_offset; its columns are "
    + ", ".join(n if n in _TEXTS else f"{n} (a number)" for n in Entry.__struct_fields__)
)
#: Columns of an entry. `entry`: it among all; `id_offset`: the log offset that its message id
#: names. `fault`: why a line is none, with its `file`; `is_torn`: the last line, without its end.
ENTRY_SCHEMA: Final = columns_of("""
    string: topic broker
    int: queue_id
    long: queue_offset
    string: unique_key msg_id
    long: body_crc
    string: producer
    long: number entry id_offset
    string: file fault
    bool: is_torn
""")


def plan_lists(patterns: Sequence[str]) -> tuple[list[TextPart], int]:
    """(pieces, bytes of all files). Raises FileNotFoundError if nothing matches, OSError."""
    pieces: list[TextPart] = []
    size = 0
    for storage, info in files_of(patterns):
        path = str(info.path)
        size += info.size
        if path.endswith(_PACKED):
            pieces.append(TextPart(storage, path))
        else:
            parts = even_parts(0, info.size, -(-info.size // _PIECE_BYTES))
            pieces += [TextPart(storage, path, begin, end) for begin, end in parts]
    return pieces, size


def entries_of(piece: TextPart) -> Iterator[dict[str, object]]:
    """Rows of a piece: its entries up to the first line that is none, which has a fault. Raises
    OSError.
    """
    for offset, line in piece.lines(_LINE_MAX):
        if not line.strip():
            continue
        try:
            entry = _entry(line)
        except ValueError as error:
            shown = line.strip()[:_SHOWN].decode("utf-8", "replace")
            fault = f"{piece.path}, line {_line_number(piece, offset)}: {shown!r} {error}; "
            is_torn = not line.endswith(b"\n") and len(line) < _LINE_MAX and bool(piece.end)
            yield {"file": piece.path, "fault": fault + _ALLOWED, "is_torn": is_torn}
            return
        yield msgspec.structs.asdict(entry) | {"id_offset": entry.id_offset}


def _entry(line: bytes) -> Entry:
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
    return entry


def entry_rows(number: int, piece: TextPart) -> Iterator[pa.RecordBatch]:
    """The rows of a piece, which has that number among all. Raises OSError."""
    rows = ({**row, "entry": number << 40 | n} for n, row in enumerate(entries_of(piece), 1))
    while some := list(islice(rows, _ROWS_MAX)):
        yield pa.RecordBatch.from_pylist(some, ENTRY_SCHEMA)


def _line_number(piece: TextPart, offset: int) -> int:
    """Of the line at an offset, from 1."""
    before = TextPart(piece.storage, piece.path).lines(_LINE_MAX)
    # Of a line above the limit more than one piece comes, and the last one has its end.
    return 1 + sum(
        line.endswith(b"\n") for _, line in takewhile(lambda each: each[0] < offset, before)
    )
