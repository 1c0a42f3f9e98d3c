"""What is wrong with a line of an acknowledged list, as a sentence.

Only lists with something wrong in them are read, line by line. Free of Spark.
"""

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from batonmq.spark.read.storage import OpenFile, Storage

#: Columns of a list, any of which may be absent; others are ignored.
COLUMNS: Final = (
    ("topic", "string"),
    ("broker", "string"),
    ("queue_id", "int"),
    ("queue_offset", "bigint"),
    ("unique_key", "string"),
    ("msg_id", "string"),
    ("body_crc", "bigint"),
    ("producer", "string"),
    ("number", "bigint"),
)
ALLOWED: Final = (
    "an entry has unique_key, or msg_id, or topic, queue_id and queue_offset; its columns are "
    + ", ".join(name if kind == "string" else f"{name} (a number)" for name, kind in COLUMNS)
)
_BITS: Final = {"int": 31, "bigint": 63}
_SHOWN: Final = 100
_TAIL_BYTES: Final = 1 << 20


def last_line(file: OpenFile) -> bytes:
    """What follows the last line end of a file: empty, or a line without its end. Of one above
    1 MiB the last 1 MiB. Raises OSError.
    """
    tail = file.read_at(max(0, file.size - _TAIL_BYTES), _TAIL_BYTES)
    return tail[tail.rfind(b"\n") + 1 :]


def has_torn_end(storage: Storage, path: str) -> bool:
    """Whether the last line of a file of lines has no end: its writer was killed in it. Lines
    above 1 MiB and compressed files are not read. Raises OSError.
    """
    if path.endswith((".gz", ".bz2", ".zst", ".lz4")):
        return False
    with storage.open(path) as opened:
        return 0 < len(last_line(opened)) < _TAIL_BYTES


def first_fault(storage: Storage, path: str) -> tuple[str, bool]:
    """(sentence, whether it is the file's last line) of the first bad line. Raises OSError."""
    with storage.file_system.open_input_stream(path) as stream:
        text = io.TextIOWrapper(stream, "utf-8", errors="replace", newline="")
        is_csv = path.endswith((".csv", ".csv.gz"))
        lines = _csv_faults(text) if is_csv else _json_faults(text)
        for number, line, fault in lines:
            if fault is not None:
                sentence = f"{path}, line {number}: {line.strip()[:_SHOWN]!r} {fault}; {ALLOWED}"
                return sentence, next(lines, None) is None
    return f"{path}: it has an entry that cannot be read; {ALLOWED}", False


def entry_fault(entry: Mapping[str, Any]) -> str | None:
    """What is wrong with an entry, None if nothing is."""
    for name, kind in COLUMNS:
        value = entry.get(name)
        if value is None or kind == "string":
            continue
        if (
            isinstance(value, bool)
            or not isinstance(value, int)
            or value.bit_length() > _BITS[kind]
        ):
            return f"has {name}={value!r}, which is no whole number of {_BITS[kind] + 1} bits"
    placed = all(entry.get(name) is not None for name in ("topic", "queue_id", "queue_offset"))
    if not placed and entry.get("unique_key") is None and entry.get("msg_id") is None:
        return "names no message"
    return None


def _json_faults(text: io.TextIOWrapper) -> Iterator[tuple[int, str, str | None]]:
    for number, line in enumerate(text, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError:
            yield number, line, "is no JSON object"
            continue
        is_entry = isinstance(entry, dict)
        yield number, line, entry_fault(entry) if is_entry else "is no JSON object"


def _csv_faults(text: io.TextIOWrapper) -> Iterator[tuple[int, str, str | None]]:
    rows = csv.reader(text)
    names = next(rows, [])
    for row in rows:
        if not row:
            continue
        line = ",".join(row)
        if len(row) != len(names):
            yield rows.line_num, line, f"has {len(row)} fields, the first line {len(names)}"
            continue
        yield rows.line_num, line, entry_fault(csv_entry(names, row))


def csv_entry(names: Sequence[str], row: Sequence[str]) -> dict[str, Any]:
    """The entry of a row with as many fields as there are names."""
    return {name: _number(name, value) for name, value in zip(names, row, strict=True)}


def _number(name: str, value: str) -> object:
    """A field as JSON would give it; empty ones are absent."""
    if not value:
        return None
    if dict(COLUMNS).get(name, "string") == "string":
        return value
    try:
        return int(value)
    except ValueError:
        return value
