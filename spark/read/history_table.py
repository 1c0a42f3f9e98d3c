"""The table `history`: the events that controllers wrote down, one row per line of their files.

A file is split like any text: a range owns the lines that begin in it. A bad line costs itself
only. Free of Spark.
"""

import codecs
import io
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj
from msgspec.structs import asdict, fields

from batonmq.history.event import TIMES, HistoryEvent, checked_event
from batonmq.history.file import controller_of
from batonmq.spark.read.columns import HISTORY_COLUMNS, batch_of, timestamps
from batonmq.spark.read.damage import Damage
from batonmq.spark.read.storage import Storage, TextPart, even_parts

_BATCH_BYTES: Final = 4 << 20
_FIELDS: Final = pa.schema(
    [(each.field, pa.int64() if each.field in TIMES else each.type) for each in HISTORY_COLUMNS]
    + [("gap", pa.bool_())]
)
_DEFAULTS: Final = {each.name: each.default for each in fields(HistoryEvent) if not each.required}


def plan_history(places: Iterable[tuple[Storage, str]], size_bytes: int) -> list[TextPart]:
    """Parts of all history files; a place may be a file or a folder that holds `history-*.jsonl`.

    Raises OSError if it holds none.
    """
    found: list[TextPart] = []
    for storage, path in places:
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
            found += [TextPart(storage, name, begin, end) for begin, end in parts]
    return found


def events_of(part: TextPart) -> Iterator[tuple[int, bytes, HistoryEvent] | Damage]:
    """(offset, line without its end, event), and lines that are none. Raises OSError.

    A last line without its end is being written, or was torn by a crash: it is not there.
    """
    return _checked(part, part.lines())


def _checked(
    part: TextPart, lines: Iterable[tuple[int, bytes]]
) -> Iterator[tuple[int, bytes, HistoryEvent] | Damage]:
    for offset, line in lines:
        if line.endswith(b"\n"):
            try:
                yield offset, line[:-1], checked_event(line)
            except ValueError as error:
                yield Damage(part.path, offset, len(line), f"no event: {error}", in_log=False)


def read_history(wanted: TextPart, schema: pa.Schema) -> Iterator[pa.RecordBatch | Damage]:
    """Batches of events, and lines that are none. Raises OSError."""
    path = wanted.path
    where = {"file": path, "controller": controller_of(path.rpartition("/")[2])}
    for begin, text in wanted.lines(at_once=_BATCH_BYTES):
        text = text[: text.rfind(b"\n") + 1]
        ends = np.flatnonzero(np.frombuffer(text, np.uint8) == ord("\n")) + 1
        places = begin + np.concatenate(([0], ends))[:-1]
        plain = _by_arrow(text, len(places))
        if plain is None:
            found = list(_checked(wanted, zip(places.tolist(), io.BytesIO(text), strict=True)))
            yield from (each for each in found if isinstance(each, Damage))
            good = [each for each in found if not isinstance(each, Damage)]
            places, plain = np.array([each[0] for each in good]), _plain(each[2] for each in good)
        if len(places):
            yield _finished(schema, plain, where | {"line_offset": places})


def event_rows(schema: pa.Schema, events: Iterable[HistoryEvent]) -> pa.RecordBatch:
    """The columns of events; what names a place in a file is null."""
    return _finished(schema, _plain(events), {})


def _plain(events: Iterable[HistoryEvent]) -> pa.Table:
    return pa.Table.from_pylist([asdict(event) for event in events], _FIELDS)


def _by_arrow(text: bytes, lines: int) -> pa.Table | None:
    """The fields of so many lines, if for sure each is an event to `checked_event`, which takes
    three times as long. None too if one has a field of a later version, which may hold anything."""
    # What Arrow takes here has no `}` but in texts and at the end of a value, and no line end in a
    # text: with as many values as lines, each line is one.
    if text.count(b"}\n") != lines or text.startswith(codecs.BOM_UTF8):  # Arrow skips that mark
        return None
    try:
        text.decode()  # Arrow would hand on strings that are no UTF-8
        table = pj.read_json(
            pa.py_buffer(text),
            pj.ReadOptions(use_threads=False, block_size=len(text) + 1),
            pj.ParseOptions(explicit_schema=_FIELDS, unexpected_field_behavior="error"),
        )
    except (pa.ArrowException, UnicodeDecodeError, OverflowError):
        return None
    is_whole = table.num_rows == lines and not any(
        pc.list_flatten(table[name]).null_count
        if pa.types.is_list(kind)
        else table[name].null_count and name not in _DEFAULTS
        for name, kind in zip(_FIELDS.names, _FIELDS.types, strict=True)
    )
    return table if is_whole else None


def _finished(schema: pa.Schema, plain: pa.Table, where: Mapping[str, Any]) -> pa.RecordBatch:
    """The columns of a schema; `where`: those that name a place in a file. A field that is null has
    its default."""
    columns = dict(where)
    for field, name, _, unknown in HISTORY_COLUMNS:
        if name not in schema.names:
            continue
        values = plain[field].combine_chunks()
        if field in TIMES:
            ms = pc.fill_null(values, 0).to_numpy(zero_copy_only=False)
            values = timestamps(ms, ms <= 0)
        elif unknown == ():
            values = pc.if_else(pc.equal(pc.list_value_length(values), 0), None, values)
        elif unknown is not None:
            values = pc.if_else(pc.equal(values, unknown), None, values)
        elif field in _DEFAULTS:
            values = pc.fill_null(values, _DEFAULTS[field])
        columns[name] = values
    return batch_of(schema, plain.num_rows, columns)
