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

from batonmq.protocol.message import uncompress
from batonmq.protocol.message_id import host_text
from batonmq.protocol.properties import KEYS, TAGS, UNIQ_KEY
from batonmq.protocol.records.columns import Bytes, Int64s, Records, take_fields
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


_NAME_END = 1
_PAIR_END = 2


@dataclass(frozen=True, slots=True)
class PropertyPairs:
    """All pairs of `rows` property strings, which lie one behind the other in `data`."""

    rows: int
    buffer: pa.Buffer
    data: Bytes
    row: Int64s
    name_at: Int64s
    name_length: Int64s
    value_at: Int64s
    value_length: Int64s

    def named(self, name: str) -> Int64s:
        """Numbers of the pairs with that name."""
        raw = np.frombuffer(name.encode(), np.uint8)
        pairs = np.flatnonzero(self.name_length == len(raw))
        found = take_fields(self.data, self.name_at[pairs], np.dtype(("u1", len(raw))))
        return pairs[(found == raw).all(axis=1)] if len(pairs) else pairs

    def column(self, name: str) -> pa.Array:
        """The property `name` of each row as a string, null where a row has none."""
        pairs = self.named(name)
        pair_of_row = np.full(self.rows, -1, np.int64)
        pair_of_row[self.row[pairs]] = pairs  # pairs ascend, so the last of a row stays
        used = np.flatnonzero(pair_of_row >= 0)
        pairs = pair_of_row[used]
        values = texts(binaries(self.buffer, self.value_at[pairs], self.value_length[pairs]))
        if len(used) == self.rows:
            return values
        value_of_row = np.full(self.rows, -1, np.int64)
        value_of_row[used] = np.arange(len(used))
        return values.take(pa.array(value_of_row, mask=value_of_row < 0))

    def map_column(self) -> pa.Array:
        """All properties of each row as a map; the order within a map has no meaning."""
        names = texts(binaries(self.buffer, self.name_at, self.name_length))
        values = texts(binaries(self.buffer, self.value_at, self.value_length))
        codes = names.dictionary_encode()
        kinds = max(len(codes.dictionary), 1)
        key = self.row * kinds + codes.indices.to_numpy(zero_copy_only=False)
        _, last = np.unique(key[::-1], return_index=True)
        row = self.row
        if len(last) < len(key):
            kept = np.sort(len(key) - 1 - last)
            names, values = names.take(pa.array(kept)), values.take(pa.array(kept))
            row = row[kept]
        offsets = np.zeros(self.rows + 1, np.int32)
        np.cumsum(np.bincount(row, minlength=self.rows), out=offsets[1:])
        return pa.MapArray.from_arrays(pa.array(offsets), names, values)


def split_properties(window: "bytes | pa.Buffer", at: Int64s, length: Int64s) -> PropertyPairs:
    """The pairs of the property strings [at, at + length) of a window; `at` ascends."""
    strings = binaries(window, at, length)
    _, offsets_buffer, buffer = strings.buffers()
    rows = len(at)
    if buffer is None or not rows:
        buffer = pa.py_buffer(b"")
    offsets = np.zeros(rows + 1, np.int64)
    if rows:
        offsets[:] = np.frombuffer(offsets_buffer, np.int32, rows + 1)
    size = int(offsets[-1])
    data = np.frombuffer(buffer, np.uint8, size) if size else np.empty(0, np.uint8)
    real_ends = np.flatnonzero(data == _PAIR_END)
    # A string that does not end in a separator ends its last pair all the same.
    row_ends = offsets[1:][offsets[1:] > offsets[:-1]]
    open_ends = row_ends[data[row_ends - 1] != _PAIR_END]
    # Where both are at one place, the open end comes first: behind it the next string begins,
    # with an empty pair.
    ends = np.concatenate((open_ends, real_ends))
    order = np.argsort(ends, kind="stable")
    ends = ends[order]
    behind = ends + (order >= len(open_ends))
    begins = np.concatenate((np.zeros(min(1, len(ends)), np.int64), behind[:-1]))
    row = np.searchsorted(offsets, begins, side="right") - 1
    separators = np.append(np.flatnonzero(data == _NAME_END), size)
    split = separators[np.searchsorted(separators, begins)]
    valid = (split > begins) & (split + 1 < ends)
    begins, split, ends, row = begins[valid], split[valid], ends[valid], row[valid]
    return PropertyPairs(
        rows, buffer, data, row, begins, split - begins, split + 1, ends - split - 1
    )
