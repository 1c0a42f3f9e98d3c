"""The columns of `table=topic`, and records of a queue as batches of them.

The columns of a stored record have the names and types of the table `messages`, and come from its
code. Two things differ: `body` is the plain body (a zlib-compressed one is inflated; what cannot be
stays as it is, and `sys_flag` has the compression), and there is no folder to name. Free of Spark.
"""

import zlib
from collections.abc import Sequence
from typing import Final

import numpy as np
import pyarrow as pa

from batonmq.epoch.entry import EpochEntry
from batonmq.protocol.message import uncompress
from batonmq.protocol.sysflag import COMPRESSED
from batonmq.spark.read.message_columns import message_batch
from batonmq.spark.read.record_columns import Records
from batonmq.spark.read.schemas import TABLES, wanted_columns
from batonmq.spark.read.store_facts import StoreFacts

_FIRST: Final = ("topic", "queue_id", "queue_offset", "cluster", "broker")
_NOT_HERE: Final = frozenset({"store", "broker_id"})


def _topic_schema() -> pa.Schema:
    messages = TABLES["messages"]
    rest = [name for name in messages.names if name not in _NOT_HERE and name not in _FIRST]
    return pa.schema([messages.field(name) for name in (*_FIRST, *rest)])


TOPIC: Final = _topic_schema()


def topic_schema(columns: Sequence[str]) -> pa.Schema:
    """The wanted columns in the wanted order (none named: all). Raises ValueError."""
    return wanted_columns("topic", TOPIC, columns) if columns else TOPIC


def topic_batch(
    window: bytes,
    records: Records,
    schema: pa.Schema,
    *,
    cluster: str | None,
    broker: str,
    epochs: tuple[EpochEntry, ...],
) -> pa.RecordBatch:
    """The wanted columns of these records of a window."""
    facts = StoreFacts("", cluster, broker, None, epochs, False, None)
    batch = message_batch(window, records, facts, schema)
    compressed = np.flatnonzero(records.sys_flag & COMPRESSED)
    if "body" not in schema.names or not len(compressed):
        return batch
    which = schema.get_field_index("body")
    body = _inflated(batch.column(which), compressed.tolist(), records.sys_flag.tolist())
    return batch.set_column(which, schema.field(which), body)


def _inflated(bodies: pa.Array, rows: Sequence[int], sys_flags: Sequence[int]) -> pa.Array:
    values = bodies.to_pylist()
    for row in rows:
        try:
            values[row] = uncompress(values[row], sys_flags[row])
        except (ValueError, zlib.error):
            continue  # another codec, or garbage that its producer sent
    return pa.array(values, pa.binary())
