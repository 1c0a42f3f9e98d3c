"""The small tables of a store: `consumequeue`, `index`, `epochs` and `offsets`.

Layouts: `batonmq.protocol.layout`. Free of Spark.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
from pyarrow import fs

from batonmq.epoch.entry import MAX_OFFSET
from batonmq.protocol.fastjson import FastjsonError, loads
from batonmq.protocol.layout import INDEX_ENTRY, INDEX_HEADER, INDEX_SLOT
from batonmq.protocol.numbers import natural_number
from batonmq.spark.read.columns import batch_of, timestamps
from batonmq.spark.read.damage import Damage
from batonmq.spark.read.options import ReadOptions
from batonmq.spark.read.queues import (
    QueuePiece,
    confirmed_units,
    list_queues,
    queue_end,
    read_units,
)
from batonmq.spark.read.storage import OpenFile
from batonmq.spark.read.store_facts import EPOCH_FILE, StoreFacts

Items = Iterator[pa.RecordBatch | Damage]

_TOPIC_END = "@"
# Lags of such offsets are still numbers of 64 bits.
_OFFSET_END = 2**62
_HEADER: Final = np.dtype(INDEX_HEADER.dtype)
_ENTRY: Final = np.dtype(INDEX_ENTRY.dtype)
_DEFAULT_SLOTS: Final = 5_000_000
_DEFAULT_ENTRIES: Final = 20_000_000
_DEFAULT_SIZE: Final = (
    _HEADER.itemsize + _DEFAULT_SLOTS * INDEX_SLOT.size + _DEFAULT_ENTRIES * _ENTRY.itemsize
)
_CHUNK_ENTRIES: Final = 1 << 16


def read_queue_piece(
    piece: QueuePiece, facts: StoreFacts, options: ReadOptions, schema: pa.Schema
) -> Items:
    """The table `consumequeue`: units that are confirmed."""
    end = None if options.unconfirmed else facts.confirmed_end()
    for item in confirmed_units(read_units(facts.storage, piece), piece, end):
        if isinstance(item, Damage):
            yield item
            continue
        if not len(item):
            continue
        columns = {
            **facts.names, "topic": piece.topic, "queue_id": piece.queue_id,
            "queue_offset": item["index"], "physical_offset": item["offset"],
            "size": item["size"], "tags_code": item["tags_code"],
            "epoch": facts.epoch_column(item["offset"]),
        }  # fmt: skip
        yield batch_of(schema, len(item), columns)


@dataclass(frozen=True, slots=True)
class IndexPiece:
    """Entries [begin, end) of one index file with that many slots; entries count from 1."""

    path: str
    slot_num: int
    begin_ms: int
    begin: int
    end: int


def plan_index(facts: StoreFacts, options: ReadOptions) -> list[IndexPiece | Damage]:
    """The written entries of all index files in pieces of `splitBytes`. Raises OSError."""
    pieces: list[IndexPiece | Damage] = []
    step = max(1, options.split_bytes // _ENTRY.itemsize)
    for info in facts.storage.children(f"{facts.path}/index"):
        if info.type != fs.FileType.File or natural_number(info.base_name) is None:
            continue
        with facts.storage.open(info.path) as file:
            try:
                slots, begin_ms, count = _head(file, options.slot_num)
            except ValueError as error:
                pieces.append(Damage(info.path, 0, file.size, str(error), in_log=False))
                continue
        for begin in range(1, count, step):
            end = min(begin + step, count)
            pieces.append(IndexPiece(info.path, slots, begin_ms, begin, end))
    return pieces


def _head(file: OpenFile, slot_num: int) -> tuple[int, int, int]:
    """(slots, least store time in ms, entries and 1) of an index file. Its slots are the option,
    else RocketMQ's default of 5 million; a file of another size is taken to have four entries to a
    slot, as the default has. Raises ValueError for what no such file can have.
    """
    body = file.size - _HEADER.itemsize
    if not slot_num and file.size == _DEFAULT_SIZE:
        slot_num = _DEFAULT_SLOTS
    elif not slot_num:
        shares = INDEX_SLOT.size + 4 * _ENTRY.itemsize
        if body <= 0 or body % shares:
            raise ValueError(
                f"{file.size} bytes are not the size of an index file with four entries to a slot "
                "(if it was made with others, give the option maxHashSlotNum)"
            )
        slot_num = body // shares
    fit, rest = divmod(body - slot_num * INDEX_SLOT.size, _ENTRY.itemsize)
    if fit < 0 or rest:
        raise ValueError(f"{file.size} bytes do not fit maxHashSlotNum={slot_num}")
    header = np.frombuffer(file.read_at(0, _HEADER.itemsize), _HEADER)[0]
    count = int(header["count"])
    if not 0 <= count <= fit:
        raise ValueError(f"its header counts {count} entries, {fit} fit")
    return slot_num, int(header["begin_ms"]), count


def read_index(
    piece: IndexPiece, facts: StoreFacts, options: ReadOptions, schema: pa.Schema
) -> Items:
    """One row per entry below the confirmed end; `store_at` is exact to the second only."""
    confirmed = None if options.unconfirmed else facts.confirmed_end()
    entries_at = _HEADER.itemsize + piece.slot_num * INDEX_SLOT.size
    name = piece.path.rpartition("/")[2]
    with facts.storage.open(piece.path) as file:
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
            if not len(raw):
                continue
            offset, hashes = raw["offset"].astype(np.int64), raw["hash"].astype(np.int64)
            columns = {
                **facts.names, "file": name, "entry": number, "slot": hashes % piece.slot_num,
                "key_hash": hashes, "physical_offset": offset,
                "store_at": timestamps(piece.begin_ms + raw["seconds"].astype(np.int64) * 1000),
                "previous_entry": raw["previous"].astype(np.int64),
                "epoch": facts.epoch_column(offset),
            }  # fmt: skip
            yield batch_of(schema, len(raw), columns)


def epochs_damage(facts: StoreFacts) -> Damage:
    """Of a store whose epochs cannot be read."""
    return Damage(f"{facts.path}/{EPOCH_FILE}", 0, 0, facts.epochs_fault, in_log=False)


def read_epochs(facts: StoreFacts, _: ReadOptions, schema: pa.Schema) -> Items:
    """One row per epoch of a store; the last one is open, its end is null."""
    if facts.epochs_fault:
        yield epochs_damage(facts)
        return
    entries = facts.epochs
    columns = {
        **facts.names, "epoch": [entry.epoch for entry in entries],
        "start_offset": [entry.start_offset for entry in entries],
        "end_offset": [None if e.end_offset == MAX_OFFSET else e.end_offset for e in entries],
        "confirm_offset": facts.confirm_offset, "from_backup": facts.epochs_from_backup,
    }  # fmt: skip
    yield batch_of(schema, len(entries), columns)


def read_offsets(facts: StoreFacts, options: ReadOptions, schema: pa.Schema) -> Items:
    """One row per group, topic and queue in which the group has committed.

    `max_offset` is the end of the consume queue, so `lag` counts messages that consumers can see;
    both are null where the store has no such queue.
    """
    path, selection = f"{facts.path}/config/consumerOffset.json", options.selection
    table: dict[str, dict[str, int]] | None = None
    damages: list[Damage] = []
    for name in (path, f"{path}.bak"):
        raw = facts.storage.read_small(name)
        if raw is None:
            continue
        try:
            table = _offset_table(raw)
            break
        except (FastjsonError, ValueError) as error:
            damages.append(Damage(name, 0, len(raw), str(error), in_log=False))
    if table is None:
        yield from damages[:1]
        return
    ends = {
        (queue.topic, queue.queue_id): queue_end(facts.storage, list(queue.files))
        for queue in list_queues(facts, selection)
    }
    rows: list[tuple[str, str, int, int, int | None]] = []
    for key, offsets in sorted(table.items()):
        topic, _, group = key.partition(_TOPIC_END)
        for queue_id, offset in sorted((int(number), int(at)) for number, at in offsets.items()):
            if selection.wants_queue(topic, queue_id):
                rows.append((group, topic, queue_id, offset, ends.get((topic, queue_id))))
    columns: dict[str, object] = {**facts.names}
    names = ("group", "topic", "queue_id", "offset", "max_offset")
    columns |= {name: [row[at] for row in rows] for at, name in enumerate(names)}
    columns["lag"] = [None if end is None else end - offset for *_, offset, end in rows]
    yield batch_of(schema, len(rows), columns)


def _is_offset(queue_id: object, offset: object) -> bool:
    number = str(queue_id)
    is_queue = number.isascii() and number.isdecimal() and int(number) < 2**31
    return is_queue and type(offset) is int and abs(offset) < _OFFSET_END


def _offset_table(raw: bytes) -> dict[str, dict[str, int]]:
    """topic@group -> queue id -> offset. Raises FastjsonError, ValueError."""
    try:
        body = loads(raw)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    table = body.get("offsetTable") if isinstance(body, dict) else None
    if not isinstance(table, dict):
        raise ValueError("no offsetTable")
    for key, offsets in table.items():
        if not isinstance(offsets, dict) or not all(map(_is_offset, offsets, offsets.values())):
            raise ValueError(f"no offsets of queues at {key!r}")
    return table
