"""Unique keys of many messages: each one's own, and that of the batch it was sent in.

A message of a batch carries two: its own first, then the one of the whole batch, which readers of
properties see as the last of a repeated name. Only its own key identifies it.
"""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from batonmq.protocol.properties import UNIQ_KEY
from batonmq.spark.read.property_columns import PropertyPairs
from batonmq.spark.read.record_columns import take_fields

_NAME = UNIQ_KEY.encode()


def unique_keys(pairs: PropertyPairs) -> tuple[pa.Array, pa.Array]:
    """(own keys, keys of batches) of each row as strings; null where a row has none."""
    raw = np.frombuffer(_NAME, np.uint8)
    named = np.flatnonzero(pairs.name_length == len(raw))
    if len(named):
        found = take_fields(pairs.data, pairs.name_at[named], np.dtype(("u1", len(raw))))
        named = named[(found == raw).all(axis=1)]
    last = pairs.column(UNIQ_KEY)
    rows = pairs.row[named]
    first = named[np.concatenate(([True], rows[1:] != rows[:-1]))] if len(named) else named
    if len(first) == len(named):
        return last, pa.nulls(pairs.rows, pa.string())
    only_first = replace(
        pairs,
        row=pairs.row[first],
        name_at=pairs.name_at[first],
        name_length=pairs.name_length[first],
        value_at=pairs.value_at[first],
        value_length=pairs.value_length[first],
    )
    own = only_first.column(UNIQ_KEY)
    return own, pc.if_else(pc.equal(own, last), None, last)


def own_key(properties: bytes) -> str | None:
    """The own unique key in one property string, None without one."""
    for pair in properties.split(b"\x02"):
        name, separator, value = pair.partition(b"\x01")
        if separator and value and name == _NAME:
            return value.decode("utf-8", "replace")
    return None
