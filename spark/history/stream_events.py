"""Events of a stream as files of the output, each event once. Free of Spark."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from batonmq.spark.read.columns import TABLES

Read = dict[str, tuple[int, int]]
"""Log -> (Raft index, part) of its newest event that was read. A stream reads each log in order."""

_ORDER = [(name, "ascending") for name in ("log", "raft_index", "part")]


def take(rows: pa.Table, read: Mapping[str, tuple[int, int]]) -> tuple[pa.Table, Read]:
    """Rows (of table history) that are newer than what was read, in the order of each log; and what
    is read with them."""
    rows = rows.cast(TABLES["history"]).sort_by(_ORDER)
    now = dict(read)
    new = []
    for log, *position in zip(*(rows[name].to_pylist() for name, _ in _ORDER), strict=True):
        place = (position[0], position[1])
        new.append(log not in now or place > now[log])
        if new[-1]:
            now[log] = place
    return rows.filter(pa.array(new, pa.bool_())), now


def write_events(rows: pa.Table, folder: Path) -> None:
    """One file for each broker group (null for events of the controllers alone) and day (UTC), in
    the order of the rows. Raises OSError."""
    day = pc.cast(rows["time"], pa.date32())
    rows = rows.append_column("group", rows["broker_name"]).append_column("day", day)
    folders = pa.schema([rows.schema.field(name) for name in ("group", "day")])
    ds.write_dataset(
        rows, folder, format="parquet", partitioning=ds.partitioning(folders, flavor="hive"),
        use_threads=False, existing_data_behavior="overwrite_or_ignore",
    )  # fmt: skip
