"""Messages of BATON_SYS_HISTORY as rows of the table `history`, decoded like the lines of a file.

So the same event is the same row, whether it was read from a file or from the topic; the file's own
columns are null here. Free of Spark.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from batonmq.history.message import HISTORY_AFTER
from batonmq.spark.history.stream_seen import INDEX_SCHEMA, PART_BITS
from batonmq.spark.read.columns import TABLES, TIMESTAMP
from batonmq.spark.read.damage import Damage
from batonmq.spark.read.history_table import decode_lines
from batonmq.spark.steps.tables import partition_of, write_part

SOURCE_COLUMNS: Final = ("broker", "queue_id", "queue_offset", "store_at", "body", "properties")
#: Table history, and where and when the event was stored.
OUTPUT_SCHEMA: Final = pa.schema(
    [*TABLES["history"], ("queue_offset", pa.int64()), ("store_at", TIMESTAMP)]
)
#: That, what `Seen` needs, and `group` (null for events of the controllers alone) and `day` (UTC).
EVENT_SCHEMA: Final = pa.schema(
    [
        *OUTPUT_SCHEMA,
        *(field for field in INDEX_SCHEMA if field.name not in OUTPUT_SCHEMA.names),
        ("group", pa.string()),
        ("day", pa.date32()),
    ]
)
_OF_FILES: Final = ("file", "controller", "line_offset")
_PIECE: Final = 4_096


def events(messages: pa.Table) -> pa.Table:
    """Rows of EVENT_SCHEMA of messages with SOURCE_COLUMNS; what is no event has none: anybody may
    send to the topic of a Java broker.
    """
    lines = pc.fill_null(messages["body"].cast(pa.binary()), b"")
    empty = pc.equal(pc.binary_length(lines), 0)
    messages = messages.filter(pc.invert(pc.or_(empty, pc.match_substring(lines, b"\n"))))
    parts = [_events(messages.slice(at, _PIECE)) for at in range(0, len(messages), _PIECE)]
    return pa.concat_tables([EVENT_SCHEMA.empty_table(), *parts])


def _events(messages: pa.Table) -> pa.Table:
    bodies = [body + b"\n" for body in messages["body"].to_pylist()]
    begins = np.cumsum([0, *map(len, bodies)])[:-1]
    found = decode_lines("", 0, b"".join(bodies), TABLES["history"])
    rows = pa.Table.from_batches(
        [each for each in found if not isinstance(each, Damage)], TABLES["history"]
    )
    messages = messages.take(np.searchsorted(begins, rows["line_offset"].to_numpy()))
    columns = {name: rows[name] for name in rows.column_names}
    for name in _OF_FILES:
        columns[name] = pa.nulls(len(rows), rows.schema.field(name).type)
    for name in ("queue_offset", "store_at", "broker", "queue_id"):
        columns[name] = messages[name]
    position = (rows["raft_index"].to_numpy() << PART_BITS) + rows["part"].to_numpy()
    after = pc.map_lookup(messages["properties"].combine_chunks(), HISTORY_AFTER, "last")
    columns |= {
        "position": pa.array(position),
        "after": pa.array([_position(text) for text in after.to_pylist()], pa.int64()),
        "group": rows["broker_name"],
        "day": rows["time"].cast(pa.date32()),
    }
    return pa.table([columns[name] for name in EVENT_SCHEMA.names], EVENT_SCHEMA.names).cast(
        EVENT_SCHEMA
    )


def _position(text: str | None) -> int | None:
    """Of `<raft index>-<part>`; None for anything else."""
    index, _, part = (text or "").partition("-")
    if not (index.isdecimal() and part.isdecimal()):
        return None
    position = (int(index) << PART_BITS) + int(part)
    return position if position < 1 << 63 else None


def write_events(rows: pa.Table, folder: Path) -> None:
    """One file for each broker group and day, in the order of the log. Raises OSError."""
    rows = rows.sort_by([(name, "ascending") for name in ("log", "raft_index", "part")])
    places: dict[str, list[int]] = defaultdict(list)
    for at, key in enumerate(zip(*(rows[n].to_pylist() for n in ("group", "day")), strict=True)):
        places[partition_of(group=key[0], day=key[1])].append(at)
    for place, which in places.items():
        table = rows.select(OUTPUT_SCHEMA.names).take(which)
        write_part(folder / place / "part.parquet", table)
