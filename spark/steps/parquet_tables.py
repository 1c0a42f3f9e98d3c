"""Rows as tables, and percentiles of numbers. Free of Spark."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from typing import Annotated, Any, Final, NewType, get_args, get_type_hints

import numpy as np
import pyarrow as pa

from batonmq.protocol.records.columns import Int64s
from batonmq.spark.read.columns import TIMESTAMP

DAY_MS: Final = 86_400_000
_EPOCH: Final = date(1970, 1, 1).toordinal()


Time = NewType("Time", int)
"""In ms since 1970."""
Int32 = Annotated[int, pa.int32()]
_KINDS: Final = {
    bool: pa.bool_(), int: pa.int64(), Int32: pa.int32(), str: pa.string(), Time: TIMESTAMP,
    date: pa.date32(), tuple[int, ...]: pa.list_(pa.int64()),
    tuple[str, ...]: pa.list_(pa.string()),
}  # fmt: skip


def schema_of(row: type) -> pa.Schema:
    """The columns of a class of rows: its fields."""
    columns = []
    for name, hint in get_type_hints(row, include_extras=True).items():
        kinds = [hint] if hint in _KINDS else [each for each in get_args(hint) if each in _KINDS]
        columns.append((name, _KINDS[kinds[0]]))
    return pa.schema(columns)


def table_of(rows: Sequence[Sequence[Any]], schema: pa.Schema) -> pa.Table:
    """Rows, whose values are in the order of the columns, as a table; times are in ms."""
    columns = zip(*rows, strict=True) if rows else [()] * len(schema)
    arrays = [_column(each, kind) for each, kind in zip(columns, schema.types, strict=True)]
    return pa.Table.from_arrays(arrays, schema=schema)


def _column(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    if kind == TIMESTAMP:
        return pa.array(values, pa.timestamp("ms", "UTC")).cast(kind)
    return pa.array(values, kind)


def day_of(day: int) -> date:
    """Of days that count from 1970."""
    return date.fromordinal(_EPOCH + day)


def percentiles(
    values: Int64s, counts: Int64s, parts: Sequence[float], begins: Int64s | None = None
) -> list[Int64s]:
    """For each part one value of each run: the least that so large a part of it does not exceed.

    Runs begin at `begins` (None: all is one run, of at least one value); values ascend in each.
    """
    begins = np.zeros(1, np.int64) if begins is None else begins
    ends = np.cumsum(counts)
    before = (ends - counts)[begins]
    total = np.append(before[1:], ends[-1:]) - before
    ranks = (np.maximum(np.ceil(total * part).astype(np.int64), 1) for part in parts)
    return [values[np.searchsorted(ends, before + rank, "left")] for rank in ranks]


def percentile(values: Sequence[int] | Int64s, part: float) -> int | None:
    """The same of values in any order; None without any."""
    if not len(values):
        return None
    ordered = np.sort(np.asarray(values, np.int64))
    return int(percentiles(ordered, np.ones(len(ordered), np.int64), [part])[0][0])
