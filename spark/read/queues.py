"""The consume queues of a store: their units as columns, pieces of them as work for partitions, and
which units a span of time means. Layout: `batonmq.protocol.layout`.

Free of Spark.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import zip_longest
from typing import Final, TypeVar

import numpy as np
from pyarrow import fs

from batonmq.protocol.layout import FILLER_SIZE, UNIT, UNIT_SIZE
from batonmq.protocol.message import MessageQueue
from batonmq.protocol.records.columns import Bools, Int64s
from batonmq.spark.read.damage import Damage
from batonmq.spark.read.options import ReadOptions
from batonmq.spark.read.selection import Selection, Span
from batonmq.spark.read.storage import OpenFile, Storage
from batonmq.spark.read.store_facts import StoreFacts, StoreFile, segments

_CHUNK_BYTES: Final = 1 << 20
_LOOK_BYTES: Final = 1 << 16
_UNIT: Final = np.dtype(UNIT.dtype)


@dataclass(frozen=True, slots=True)
class Units:
    """Units of one queue without filler and unwritten ones; `index` is the queue offset."""

    index: Int64s
    offset: Int64s
    size: Int64s
    tags_code: Int64s

    def __len__(self) -> int:
        return len(self.index)

    def keep(self, wanted: "Bools | slice") -> "Units":
        return Units(*(getattr(self, field.name)[wanted] for field in fields(self)))


def decode_units(data: bytes, first_index: int) -> tuple[Units, Int64s]:
    """(units, bad): whole units of `data`; `bad` are queue offsets of units that can be none.

    All must be written: zeros are bad, like negative numbers.
    """
    count = len(data) // UNIT_SIZE
    raw = np.frombuffer(data, _UNIT, count)
    index = np.arange(first_index, first_index + count, dtype=np.int64)
    units = Units(
        index,
        raw["offset"].astype(np.int64),
        raw["size"].astype(np.int64),
        raw["tags_code"].astype(np.int64),
    )
    wrong = (units.size <= 0) | (units.offset < 0)
    filler = units.size == FILLER_SIZE
    return units.keep(~wrong & ~filler), units.index[wrong]


def last_written(file: OpenFile) -> int:
    """How many units of a queue file there are up to the last written one; reads all bytes
    behind that, so that zeros in the middle do not end the queue."""
    end = file.size // UNIT_SIZE * UNIT_SIZE
    while end > 0:
        begin = max(0, end - _CHUNK_BYTES)
        held = np.flatnonzero(np.frombuffer(file.read_at(begin, end - begin), np.uint8))
        if len(held):
            return (begin + int(held[-1])) // UNIT_SIZE + 1
        end = begin
    return 0


def queue_end(storage: Storage, files: list[StoreFile]) -> int:
    """The queue offset behind the last unit of a queue's files; 0 without any.

    For many queues: found by bisection, and a read of what follows. Zeros in the middle end the
    queue only if they are longer than that; `last_written` reads everything.
    """
    for file in reversed(files):
        with storage.open(file.path) as opened:
            written = _written_units(opened)
        if written:
            return file.start // UNIT_SIZE + written
    return files[0].start // UNIT_SIZE if files else 0


def _written_units(file: OpenFile) -> int:
    def is_zero(index: int) -> bool:
        return not any(file.read_at(index * UNIT_SIZE, UNIT_SIZE))

    end = bisect_left(range(file.size // UNIT_SIZE), True, key=is_zero)
    return last_written(file) if any(file.read_at(end * UNIT_SIZE, _LOOK_BYTES)) else end


@dataclass(frozen=True, slots=True)
class Queue:
    """One consume queue of a store and its files, ascending."""

    topic: str
    queue_id: int
    files: tuple[StoreFile, ...]


_Work = TypeVar("_Work")
_CHUNK_UNITS = 1 << 16
_QUEUE_ID_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class QueuePiece:
    """Units [begin, end) of one queue file; queue offsets.

    `followed`: a later file exists, so all of them must be written.
    """

    topic: str
    queue_id: int
    path: str
    file_start: int
    begin: int
    end: int
    followed: bool = False

    @property
    def size(self) -> int:
        return (self.end - self.begin) * UNIT_SIZE


def list_queues(storage: Storage, store: str, selection: Selection) -> list[Queue]:
    """The wanted queues under `consumequeue`, by topic and number."""
    found: list[Queue] = []
    for topic in _folders(storage, f"{store}/consumequeue"):
        if not selection.wants_topic(str(topic.base_name)):
            continue
        for number in _folders(storage, topic.path):
            name = number.base_name
            if not (name.isascii() and name.isdecimal()) or int(name) > _QUEUE_ID_MAX:
                continue
            queue_id = int(name)
            if not selection.wants_queue(str(topic.base_name), queue_id):
                continue
            files = tuple(segments(storage, number.path))
            found.append(Queue(str(topic.base_name), queue_id, files))
    return sorted(found, key=lambda queue: (queue.topic, queue.queue_id))


def _folders(storage: Storage, path: str) -> list[fs.FileInfo]:
    return [info for info in storage.children(path) if info.type == fs.FileType.Directory]


def plan_pieces(
    storage: Storage, facts: StoreFacts, options: ReadOptions
) -> list[tuple[QueuePiece | Damage, ...]]:
    """The wanted offsets of every file of every wanted queue, and those that no file holds between
    two; small pieces together."""
    pieces: list[QueuePiece | Damage] = []
    for queue in list_queues(storage, facts.path, options.selection):
        name = MessageQueue(queue.topic, facts.broker or facts.path, queue.queue_id)
        pieces += _pieces(queue, options.selection.queue_offsets(name))
    return gather(pieces, lambda piece: piece.size, options.split_bytes)


def _pieces(queue: Queue, wanted: Span) -> Iterator[QueuePiece | Damage]:
    topic, queue_id = queue.topic, queue.queue_id
    usual = max((file.size for file in queue.files), default=0)
    for file, later in zip_longest(queue.files, queue.files[1:]):
        start, end = file.start // UNIT_SIZE, file.end // UNIT_SIZE
        first, behind = max(start, wanted.low), min(end, wanted.high + 1)
        if first < behind:
            yield QueuePiece(topic, queue_id, file.path, start, first, behind, later is not None)
        if later is None:
            return
        first, behind = max(end, wanted.low), min(later.start // UNIT_SIZE, wanted.high + 1)
        if first < behind:
            path = file.path
            if file.size == usual:
                path = f"{path.rpartition('/')[0]}/{file.end:020d}"
            what = f"no file of queue {topic} {queue_id} from queue offset {first} on"
            yield _damage(path, first, behind, what)


def _damage(path: str, first: int, behind: int, what: str) -> Damage:
    """Its offsets are bytes of the queue."""
    return Damage(path, first * UNIT_SIZE, (behind - first) * UNIT_SIZE, what, in_log=False)


def gather(
    works: Sequence[_Work], size_of: Callable[[_Work], int], size_bytes: int
) -> list[tuple[_Work, ...]]:
    """Neighbours together until a group has that many bytes: what is small shares a task."""
    groups: list[list[_Work]] = []
    held = 0
    for work in works:
        size = size_of(work)
        if not groups or held + size > size_bytes:
            groups.append([])
            held = 0
        groups[-1].append(work)
        held += size
    return [tuple(group) for group in groups]


def read_units(storage: Storage, piece: QueuePiece) -> Iterator[Units | Damage]:
    """The written units of a piece, in chunks, and what cannot be units."""
    with storage.open(piece.path) as file:
        end = piece.end
        if not piece.followed:
            end = min(end, piece.file_start + last_written(file))
        for begin in range(piece.begin, end, _CHUNK_UNITS):
            count = min(_CHUNK_UNITS, end - begin)
            data = file.read_at((begin - piece.file_start) * UNIT_SIZE, count * UNIT_SIZE)
            units, bad = decode_units(data, begin)
            yield units
            yield from bad_units(piece, bad)


def bad_units(piece: QueuePiece, bad: Int64s) -> Iterator[Damage]:
    """One for each run of queue offsets where no unit is."""
    for run in np.split(bad, np.flatnonzero(np.diff(bad) != 1) + 1):
        if len(run):
            first = int(run[0])
            what = f"no unit of {piece.topic} {piece.queue_id} at queue offset {first}"
            yield _damage(piece.path, first, first + len(run), what)


def confirmed_units(
    items: Iterator[Units | Damage], piece: QueuePiece, end: int | None
) -> Iterator[Units | Damage]:
    """Of what `read_units` gives, the units whose record ends at or below `end`; None: all.

    Units point ahead, so one that points above `end` and is followed by one that does not can be
    none.
    """
    beyond = np.empty(0, np.int64)
    for item in items:
        if end is None or isinstance(item, Damage):
            yield item
            continue
        confirmed = item.offset + item.size <= end
        held = np.flatnonzero(confirmed)
        count = int(held[-1]) + 1 if len(held) else 0
        bad = np.concatenate([beyond, item.index[:count][~confirmed[:count]]])
        yield item.keep(confirmed)
        if count:
            yield from bad_units(piece, bad)
            bad = bad[:0]
        beyond = np.concatenate([bad, item.index[count:]])
