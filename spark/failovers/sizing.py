"""How a run fits its input: what is small is done in one task a step, in memory, as it is written.

What a query on a few thousand events costs is nearly all planning: tasks, stages, and code that
Spark makes and compiles for each. So a small input has no shuffle, no adaptive planning and no
made code. A large one has all of them, and its steps are kept on disk.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Final

from pyarrow import fs

from batonmq.spark.fitting import SMALL
from batonmq.spark.history_table import HistoryRange
from batonmq.spark.options import ReadOptions
from batonmq.spark.reading import Read
from batonmq.spark.selection import Selection
from batonmq.spark.storage import locate

SMALL_BYTES: Final = 64 << 20
"""Histories of at most so many bytes, as lines of text, are small: some 200,000 lines.

Such a run of 30 MiB takes a third of the processor time of the other way; but its memory grows:
one of 122 MiB took 3 GiB.
"""
_PARQUET_TIMES: Final = 8
"""Lines of text are so many times larger than Parquet of the same events."""
_TASK_BYTES: Final = 8 << 20
_TASKS_USUAL: Final = 200
_LARGE_TASK_BYTES: Final = 64 << 20


def history_bytes(paths: Sequence[str]) -> int:
    """The size of all history files there. Raises OSError, ValueError."""
    options = ReadOptions.from_mapping({"table": "history", "paths": json.dumps(list(paths))})
    return sum(
        part.end - part.begin
        for work in Read(options, Selection()).plan()
        for part in work.parts
        if isinstance(part, HistoryRange)
    )


def parquet_bytes(paths: Sequence[str]) -> int:
    """What the Parquet files below those folders would be as lines. Raises OSError, ValueError."""
    size = 0
    for path in paths:
        storage, inner = locate(path)
        for place in storage.glob(inner):
            found = storage.file_system.get_file_info(
                fs.FileSelector(place, recursive=True, allow_not_found=True)
            )
            size += sum(info.size or 0 for info in found if info.is_file)
    return size * _PARQUET_TIMES


def settings_for(size_bytes: int, *, small: bool) -> Mapping[str, str]:
    """Settings of Spark for an input of that size."""
    if small:
        return SMALL
    usual = min(_TASKS_USUAL, max(2, size_bytes // _TASK_BYTES))
    return {"spark.sql.shuffle.partitions": str(max(usual, size_bytes // _LARGE_TASK_BYTES))}


__all__ = ["SMALL_BYTES", "history_bytes", "parquet_bytes", "settings_for"]
