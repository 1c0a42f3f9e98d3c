"""The tables of small files of a store: `epochs` and `offsets`. Free of Spark."""

from collections.abc import Iterator

import pyarrow as pa

from batonmq.epoch.entry import MAX_OFFSET
from batonmq.protocol.fastjson import FastjsonError, loads
from batonmq.spark.read.damage import no_corruption
from batonmq.spark.read.log_range import Damage
from batonmq.spark.read.message_columns import store_columns
from batonmq.spark.read.queues import list_queues, queue_end
from batonmq.spark.read.schemas import CORRUPT
from batonmq.spark.read.selection import Selection
from batonmq.spark.read.storage import Storage
from batonmq.spark.read.store_facts import EPOCH_FILE, StoreFacts

_TOPIC_END = "@"
# Lags of such offsets are still numbers of 64 bits.
_OFFSET_END = 2**62


def read_epochs(facts: StoreFacts, schema: pa.Schema) -> Iterator[pa.RecordBatch | Damage]:
    """One row per epoch of a store; the last one is open, its end is null. Of a store whose epochs
    cannot be read only the damage, whatever the table."""
    if facts.epochs_fault:
        path = f"{facts.path}/{EPOCH_FILE}"
        yield Damage(path, 0, 0, facts.epochs_fault, in_log=False)
        return
    entries = facts.epochs
    rows = len(entries)
    columns = {
        **store_columns(facts, rows),
        "epoch": pa.array([entry.epoch for entry in entries], pa.int64()),
        "start_offset": pa.array([entry.start_offset for entry in entries], pa.int64()),
        "end_offset": pa.array(
            [None if e.end_offset == MAX_OFFSET else e.end_offset for e in entries], pa.int64()
        ),
        "confirm_offset": pa.array([facts.confirm_offset] * rows, pa.int64()),
        "from_backup": pa.array([facts.epochs_from_backup] * rows, pa.bool_()),
        CORRUPT: no_corruption(rows),
    }
    yield pa.RecordBatch.from_arrays([columns[name] for name in schema.names], schema=schema)


def read_offsets(
    storage: Storage, facts: StoreFacts, schema: pa.Schema
) -> Iterator[pa.RecordBatch | Damage]:
    """One row per group, topic and queue in which the group has committed.

    `max_offset` is the end of the consume queue, so `lag` counts messages that consumers can see;
    both are null where the store has no such queue.
    """
    path = f"{facts.path}/config/consumerOffset.json"
    table: dict[str, dict[str, int]] | None = None
    damages: list[Damage] = []
    for name in (path, f"{path}.bak"):
        raw = storage.read_small(name)
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
        (queue.topic, queue.queue_id): queue_end(storage, list(queue.files))
        for queue in list_queues(storage, facts.path, Selection())
    }
    keys: list[tuple[str, str, int, int]] = []
    for key, offsets in sorted(table.items()):
        topic, _, group = key.partition(_TOPIC_END)
        for queue_id, offset in sorted((int(number), int(at)) for number, at in offsets.items()):
            keys.append((group, topic, queue_id, offset))
    maxima = [ends.get((topic, queue_id)) for _, topic, queue_id, _ in keys]
    lags = [None if end is None else end - key[3] for end, key in zip(maxima, keys, strict=True)]
    columns = {
        **store_columns(facts, len(keys)),
        "group": pa.array([key[0] for key in keys], pa.string()),
        "topic": pa.array([key[1] for key in keys], pa.string()),
        "queue_id": pa.array([key[2] for key in keys], pa.int32()),
        "offset": pa.array([key[3] for key in keys], pa.int64()),
        "max_offset": pa.array(maxima, pa.int64()),
        "lag": pa.array(lags, pa.int64()),
        CORRUPT: no_corruption(len(keys)),
    }
    yield pa.RecordBatch.from_arrays([columns[name] for name in schema.names], schema=schema)


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
