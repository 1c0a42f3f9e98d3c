"""The table `index`: entries of the hash index. Layout: `batonmq.protocol.layout`.

Free of Spark.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
from pyarrow import fs

from batonmq.protocol.layout import INDEX_ENTRY, INDEX_HEADER, INDEX_SLOT
from batonmq.spark.read.arrow_parts import integers, integers_or_null, repeated, timestamps
from batonmq.spark.read.damage import no_corruption
from batonmq.spark.read.log_range import Damage
from batonmq.spark.read.message_columns import store_columns
from batonmq.spark.read.schemas import CORRUPT
from batonmq.spark.read.storage import OpenFile, Storage
from batonmq.spark.read.store_facts import StoreFacts

_HEADER: Final = np.dtype(INDEX_HEADER.dtype)
_ENTRY: Final = np.dtype(INDEX_ENTRY.dtype)
_DEFAULT_SLOTS: Final = 5_000_000
_DEFAULT_ENTRIES: Final = 20_000_000
_DEFAULT_SIZE: Final = (
    _HEADER.itemsize + _DEFAULT_SLOTS * INDEX_SLOT.size + _DEFAULT_ENTRIES * _ENTRY.itemsize
)
_CHUNK_ENTRIES: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class IndexPiece:
    """Entries [begin, end) of one index file with that many slots; entries count from 1.

    `fault`: why the file cannot be read, then without entries; else empty.
    """

    path: str
    slot_num: int
    begin_ms: int
    begin: int
    end: int
    fault: str = ""


def plan_index(
    storage: Storage, facts: StoreFacts, slot_num: int, size_bytes: int
) -> list[IndexPiece]:
    """The written entries of all index files in pieces of `size_bytes`. Raises OSError."""
    pieces: list[IndexPiece] = []
    step = max(1, size_bytes // _ENTRY.itemsize)
    for info in storage.children(f"{facts.path}/index"):
        if info.type != fs.FileType.File or not info.base_name.isdigit():
            continue
        with storage.open(info.path) as file:
            slots, fault = _slots(file, slot_num)
            if fault:
                pieces.append(IndexPiece(info.path, slots, 0, 0, file.size, fault))
                continue
            header = np.frombuffer(file.read_at(0, _HEADER.itemsize), _HEADER)[0]
            count = int(header["count"])
            room = (file.size - _HEADER.itemsize - slots * INDEX_SLOT.size) // _ENTRY.itemsize
            if not 0 <= count <= room:
                what = f"its header counts {count} entries, {room} fit"
                pieces.append(IndexPiece(info.path, slots, 0, 0, file.size, what))
                continue
        for begin in range(1, count, step):
            end = min(begin + step, count)
            pieces.append(IndexPiece(info.path, slots, int(header["begin_ms"]), begin, end))
    return pieces


def _slots(file: OpenFile, slot_num: int) -> tuple[int, str]:
    """(slots, fault): how many a file has: the option, else RocketMQ's default of 5 million.

    A file of another size is taken to have four entries to a slot, as the default has. `fault`: no
    number of slots makes a file of this size; else empty.
    """
    body = file.size - _HEADER.itemsize
    if not slot_num:
        shares = INDEX_SLOT.size + 4 * _ENTRY.itemsize
        if file.size == _DEFAULT_SIZE:
            return _DEFAULT_SLOTS, ""
        if body <= 0 or body % shares:
            return 0, (
                f"{file.size} bytes are not the size of an index file with four entries to a slot "
                "(if it was made with others, give the option maxHashSlotNum)"
            )
        return body // shares, ""
    rest = body - slot_num * INDEX_SLOT.size
    if rest < 0 or rest % _ENTRY.itemsize:
        return slot_num, f"{file.size} bytes do not fit maxHashSlotNum={slot_num}"
    return slot_num, ""


def read_index(
    storage: Storage,
    piece: IndexPiece,
    facts: StoreFacts,
    confirmed: int | None,
    schema: pa.Schema,
) -> Iterator[pa.RecordBatch | Damage]:
    """One row per entry below the confirmed end; `store_at` is exact to the second only."""
    if piece.fault:
        yield Damage(piece.path, 0, piece.end, piece.fault, in_log=False)
        return
    entries_at = _HEADER.itemsize + piece.slot_num * INDEX_SLOT.size
    name = piece.path.rpartition("/")[2]
    with storage.open(piece.path) as file:
        for begin in range(piece.begin, piece.end, _CHUNK_ENTRIES):
            count = min(_CHUNK_ENTRIES, piece.end - begin)
            at = entries_at + begin * _ENTRY.itemsize
            raw = np.frombuffer(file.read_at(at, count * _ENTRY.itemsize), _ENTRY)
            number = np.arange(begin, begin + len(raw), dtype=np.int64)
            wrong = (raw["previous"] >= number) | (raw["previous"] < 0) | (raw["hash"] < 0)
            wrong |= raw["offset"] < 0
            for entry in number[wrong].tolist():
                where = entries_at + entry * _ENTRY.itemsize
                what = f"no index entry, number {entry}"
                yield Damage(piece.path, where, _ENTRY.itemsize, what, in_log=False)
            wanted = ~wrong
            if confirmed is not None:
                wanted &= raw["offset"] < confirmed
            raw, number = raw[wanted], number[wanted]
            rows = len(raw)
            if not rows:
                continue
            offset = raw["offset"].astype(np.int64)
            hashes = raw["hash"].astype(np.int64)
            epochs, missing = facts.epoch_of(offset)
            stored_ms = piece.begin_ms + raw["seconds"].astype(np.int64) * 1000
            columns = {
                **store_columns(facts, rows),
                "file": repeated(name, rows, pa.string()),
                "entry": integers(number, pa.int32()),
                "slot": integers(hashes % piece.slot_num, pa.int32()),
                "key_hash": integers(hashes, pa.int32()),
                "physical_offset": integers(offset, pa.int64()),
                "store_at": timestamps(stored_ms),
                "previous_entry": integers(raw["previous"].astype(np.int64), pa.int32()),
                "epoch": integers_or_null(epochs, missing, pa.int64()),
                CORRUPT: no_corruption(rows),
            }
            arrays = [columns[each] for each in schema.names]
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)
