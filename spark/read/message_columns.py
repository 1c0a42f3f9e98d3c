"""Records of a window as columns of the table `messages`; builds only the wanted ones.

Free of Spark.
"""

from collections.abc import Callable
from functools import cached_property
from typing import Final

import numpy as np
import pyarrow as pa

from batonmq.protocol.message_id import host_text
from batonmq.protocol.properties import KEYS, TAGS, UNIQ_KEY
from batonmq.spark.read.arrow_parts import (
    binaries,
    integers,
    integers_or_null,
    repeated,
    texts,
    timestamps,
)
from batonmq.spark.read.damage import no_corruption
from batonmq.spark.read.property_columns import PropertyPairs, split_properties
from batonmq.spark.read.record_columns import Int64s, Records, take_fields
from batonmq.spark.read.schemas import CORRUPT, STORE_COLUMNS
from batonmq.spark.read.store_facts import StoreFacts

_INT: Final = pa.int32()
_LONG: Final = pa.int64()


def store_columns(facts: StoreFacts, rows: int) -> dict[str, pa.Array]:
    """The columns that name the store."""
    return {
        name: repeated(value, rows, kind)
        for (name, kind), value in zip(STORE_COLUMNS, store_values(facts), strict=True)
    }


def store_values(facts: StoreFacts) -> tuple[str, str | None, str | None, int | None]:
    """The values of the columns that name the store."""
    return facts.path, facts.cluster, facts.broker, facts.broker_id


def message_batch(
    window: bytes, records: Records, facts: StoreFacts, schema: pa.Schema
) -> pa.RecordBatch:
    """The wanted columns of these records; the window's bytes are copied only where used."""
    maker = _Maker(window, records, facts)
    return pa.RecordBatch.from_arrays([maker.column(name) for name in schema.names], schema=schema)


class _Maker:
    def __init__(self, window: bytes, records: Records, facts: StoreFacts) -> None:
        self._window = window
        self._records = records
        self._facts = facts

    def column(self, name: str) -> pa.Array:
        return _COLUMNS[name](self)

    @cached_property
    def pairs(self) -> PropertyPairs:
        r = self._records
        return split_properties(self._window, r.properties_at, r.properties_length)

    @cached_property
    def _store(self) -> dict[str, pa.Array]:
        return store_columns(self._facts, len(self._records))

    def store(self, name: str) -> pa.Array:
        return self._store[name]

    def number(self, field: str, kind: pa.DataType) -> pa.Array:
        return integers(getattr(self._records, field), kind)

    def time(self, field: str) -> pa.Array:
        return timestamps(getattr(self._records, field))

    def piece(self, field: str) -> pa.Array:
        r = self._records
        return binaries(self._window, getattr(r, f"{field}_at"), getattr(r, f"{field}_length"))

    def topic(self) -> pa.Array:
        return texts(self.piece("topic"))

    def host(self, field: str) -> pa.Array:
        at = getattr(self._records, f"{field}_at")
        length = getattr(self._records, f"{field}_length")
        return _hosts(self._window, at, length)

    def epoch(self) -> pa.Array:
        epochs, missing = self._facts.epoch_of(self._records.physical_offset)
        return integers_or_null(epochs, missing, _LONG)

    def nothing(self) -> pa.Array:
        return no_corruption(len(self._records))


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


_COLUMNS: Final[dict[str, Callable[[_Maker], pa.Array]]] = {
    "store": lambda m: m.store("store"),
    "cluster": lambda m: m.store("cluster"),
    "broker": lambda m: m.store("broker"),
    "broker_id": lambda m: m.store("broker_id"),
    "topic": _Maker.topic,
    "queue_id": lambda m: m.number("queue_id", _INT),
    "queue_offset": lambda m: m.number("queue_offset", _LONG),
    "physical_offset": lambda m: m.number("physical_offset", _LONG),
    "epoch": _Maker.epoch,
    "size": lambda m: m.number("size", _INT),
    "sys_flag": lambda m: m.number("sys_flag", _INT),
    "flag": lambda m: m.number("flag", _INT),
    "body_crc": lambda m: m.number("body_crc", _LONG),
    "born_at": lambda m: m.time("born_ms"),
    "store_at": lambda m: m.time("store_ms"),
    "born_host": lambda m: m.host("born_host"),
    "store_host": lambda m: m.host("store_host"),
    "reconsume_times": lambda m: m.number("reconsume_times", _INT),
    "prepared_transaction_offset": lambda m: m.number("prepared", _LONG),
    "keys": lambda m: m.pairs.column(KEYS),
    "tags": lambda m: m.pairs.column(TAGS),
    "unique_key": lambda m: m.pairs.column(UNIQ_KEY),
    "properties": lambda m: m.pairs.map_column(),
    "body": lambda m: m.piece("body"),
    CORRUPT: _Maker.nothing,
}
