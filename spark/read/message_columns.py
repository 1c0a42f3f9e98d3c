"""Records of a window as columns of the table `messages`; builds only the wanted ones.

Property strings are split for all records at once, by the rules of `protocol.properties`: pairs
without key or value are skipped, the last of a repeated key counts, a missing last separator is
taken.

Free of Spark.
"""

import zlib
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from batonmq.protocol.message import uncompress
from batonmq.protocol.message_id import host_text
from batonmq.protocol.properties import KEYS, TAGS, UNIQ_KEY
from batonmq.protocol.records.columns import Int64s, Records
from batonmq.protocol.sysflag import COMPRESSED
from batonmq.spark.read.columns import batch_of, binaries, texts, timestamps
from batonmq.spark.read.store_facts import StoreFacts

# Column -> field of the record. `docs/spark.md` and `columns` have the types.
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
        columns[name] = _hosts(piece(name))
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


def with_plain_bodies(batch: pa.RecordBatch, sys_flags: Int64s) -> pa.RecordBatch:
    """With bodies, if there are any, as their producers had them. What cannot be inflated stays as
    it is: another codec, or garbage that a producer sent."""
    at = batch.schema.get_field_index("body")
    compressed = np.flatnonzero(sys_flags & COMPRESSED).tolist()
    if at < 0 or not compressed:
        return batch
    values = batch.column(at).to_pylist()
    for row in compressed:
        try:
            values[row] = uncompress(values[row], int(sys_flags[row]))
        except (ValueError, zlib.error):
            continue
    return batch.set_column(at, batch.schema.field(at), pa.array(values, pa.binary()))


def _hosts(hosts: pa.Array) -> pa.Array:
    """Hosts as text. Few hosts write many messages, so each is made into text once a window."""
    named = hosts.dictionary_encode()
    names = [host_text(raw) for raw in named.dictionary.to_pylist()]
    return pa.array(names, pa.string()).take(named.indices)


_PAIR_END: Final = b"\2"
_NAME_END: Final = b"\1"


@dataclass(frozen=True, slots=True)
class PropertyPairs:
    """All pairs of `rows` property strings, in their order; `row`: whose string has each."""

    rows: int
    row: Int64s
    names: pa.Array
    values: pa.Array

    def column(self, name: str, *, first: bool = False) -> pa.Array:
        """The property `name` of each row as a string, null where a row has none. `first`: of a
        repeated name the first value instead of the last."""
        found = pc.equal(self.names, name.encode()).to_numpy(zero_copy_only=False)
        pairs = np.flatnonzero(found)[:: -1 if first else 1]
        pair_of_row = np.full(self.rows, -1, np.int64)
        pair_of_row[self.row[pairs]] = pairs  # what is put there last stays
        return texts(self.values.take(pa.array(pair_of_row, mask=pair_of_row < 0)))

    def map_column(self) -> pa.Array:
        """All properties of each row as a map; the order within a map has no meaning."""
        names, values, row = texts(self.names), texts(self.values), self.row
        codes = names.dictionary_encode()
        kinds = max(len(codes.dictionary), 1)
        key = row * kinds + codes.indices.to_numpy(zero_copy_only=False)
        _, last = np.unique(key[::-1], return_index=True)
        if len(last) < len(key):
            kept = np.sort(len(key) - 1 - last)
            names, values = names.take(pa.array(kept)), values.take(pa.array(kept))
            row = row[kept]
        offsets = np.zeros(self.rows + 1, np.int32)
        np.cumsum(np.bincount(row, minlength=self.rows), out=offsets[1:])
        return pa.MapArray.from_arrays(pa.array(offsets), names, values)


def split_properties(window: "bytes | pa.Buffer", at: Int64s, length: Int64s) -> PropertyPairs:
    """The pairs of the property strings [at, at + length) of a window; `at` ascends."""
    pairs = pc.split_pattern(binaries(window, at, length), _PAIR_END)
    row = pc.list_parent_indices(pairs)
    parts = pc.split_pattern(pc.list_flatten(pairs), _NAME_END, max_splits=1)
    is_pair = pc.equal(pc.list_value_length(parts), 2)
    row, parts = row.filter(is_pair), parts.filter(is_pair)
    names, values = pc.list_element(parts, 0), pc.list_element(parts, 1)
    is_full = pc.and_(pc.not_equal(names, b""), pc.not_equal(values, b""))
    row, names, values = (each.filter(is_full) for each in (row, names, values))
    return PropertyPairs(len(at), row.to_numpy(zero_copy_only=False), names, values)
