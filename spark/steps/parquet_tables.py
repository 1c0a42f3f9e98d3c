"""Rows as tables, and percentiles of numbers. Free of Spark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import date
from typing import Any, Final

import numpy as np
import pyarrow as pa

from batonmq.protocol.records.columns import Int64s
from batonmq.spark.read.columns import TIMESTAMP

DAY_MS: Final = 86_400_000
_EPOCH: Final = date(1970, 1, 1).toordinal()


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


def percentiles(values: Int64s, counts: Int64s, parts: Sequence[float]) -> list[int]:
    """For each part the least value that so large a part of them does not exceed; `values` ascend,
    `counts`: how often each is there, at least one in all."""
    ends = np.cumsum(counts)
    ranks = [max(math.ceil(int(ends[-1]) * part), 1) for part in parts]
    found: list[int] = values[np.searchsorted(ends, ranks)].tolist()
    return found
