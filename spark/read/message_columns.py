"""Records of a window as columns of the table `messages`; builds only the wanted ones.

Free of Spark.
"""

from typing import Any, Final

import numpy as np
import pyarrow as pa

from batonmq.protocol.message_id import host_text
from batonmq.protocol.properties import KEYS, TAGS, UNIQ_KEY
from batonmq.spark.read.arrow_parts import batch_of, binaries, texts, timestamps
from batonmq.spark.read.property_columns import split_properties
from batonmq.spark.read.record_columns import Int64s, Records, take_fields
from batonmq.spark.read.store_facts import StoreFacts

# Column -> field of the record. `docs/spark.md` and `schemas` have the types.
_NUMBERS: Final = {
    **{name: name for name in (
        "queue_id", "queue_offset", "physical_offset", "size", "sys_flag", "flag", "body_crc",
        "reconsume_times",
    )},
    "prepared_transaction_offset": "prepared",
}  # fmt: skip
_TIMES: Final = {"born_at": "born_ms", "store_at": "store_ms"}
_PROPERTIES: Final = {"keys": KEYS, "tags": TAGS, "unique_key": UNIQ_KEY}


def message_batch(
    window: bytes, records: Records, facts: StoreFacts, schema: pa.Schema
) -> pa.RecordBatch:
    """The wanted columns of these records; the window's bytes are copied only where used."""
    wanted = frozenset(schema.names)

    def piece(field: str) -> pa.Array:
        at, length = getattr(records, f"{field}_at"), getattr(records, f"{field}_length")
        return binaries(window, at, length)

    columns: dict[str, Any] = dict(facts.names)
    columns |= {name: getattr(records, of) for name, of in _NUMBERS.items() if name in wanted}
    columns |= {
        name: timestamps(getattr(records, of)) for name, of in _TIMES.items() if name in wanted
    }
    for name in wanted & {"born_host", "store_host"}:
        at, length = getattr(records, f"{name}_at"), getattr(records, f"{name}_length")
        columns[name] = _hosts(window, at, length)
    if "topic" in wanted:
        columns["topic"] = texts(piece("topic"))
    if "body" in wanted:
        columns["body"] = piece("body")
    if "epoch" in wanted:
        columns["epoch"] = facts.epoch_column(records.physical_offset)
    if wanted & {"properties", *_PROPERTIES}:
        pairs = split_properties(window, records.properties_at, records.properties_length)
        columns |= {name: pairs.column(of) for name, of in _PROPERTIES.items() if name in wanted}
        if "properties" in wanted:
            columns["properties"] = pairs.map_column()
    return batch_of(schema, len(records), columns)


def _hosts(window: bytes, at: Int64s, length: Int64s) -> pa.Array:
    """Hosts as text. Few hosts write many messages, so each is made into text once a window."""
    data = np.frombuffer(window, np.uint8)
    which = np.zeros(len(at), np.int64)
    names: list[str] = []
    for size in (8, 20):
        rows = np.flatnonzero(length == size)
        if not len(rows):
            continue
        raw = take_fields(data, at[rows], np.dtype(("u1", size)))
        if size == 8:
            kinds, inverse = np.unique(raw.view(">u8").ravel(), return_inverse=True)
            hosts = [int(kind).to_bytes(8, "big") for kind in kinds]
        else:
            kinds, inverse = np.unique(raw, axis=0, return_inverse=True)
            hosts = [kind.tobytes() for kind in kinds]
        which[rows] = inverse.ravel() + len(names)
        names += [host_text(host) for host in hosts]
    return pa.array(names, pa.string()).take(pa.array(which))
