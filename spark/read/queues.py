"""The consume queues of a store: their units as columns, pieces of them as work for partitions, and
which units a span of time means. Layout: `batonmq.protocol.layout`.

Free of Spark.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from pyarrow import fs

from batonmq.protocol.layout import FILLER_SIZE, UNIT, UNIT_SIZE
from batonmq.protocol.message import MessageQueue
from batonmq.protocol.records.columns import Int64s
from batonmq.spark.read.damage import Damage
from batonmq.spark.read.options import ReadOptions
from batonmq.spark.read.selection import Selection, Span
from batonmq.spark.read.storage import OpenFile, Storage, gather
from batonmq.spark.read.store_facts import StoreFacts, StoreFile, gaps, segments

_CHUNK_BYTES: Final = 1 << 20
_LOOK_BYTES: Final = 1 << 16
_CHUNK_UNITS: Final = 1 << 16
_QUEUE_ID_MAX: Final = 2**31 - 1  # of the column
_UNIT: Final = np.dtype(UNIT.dtype)
#: Rows of units: `index` is the queue offset.
Units = npt.NDArray[Any]
_ROW: Final = np.dtype([("index", "i8"), *((name, "i8") for name, _ in UNIT.dtype)])


def unit_chunks(file: OpenFile, file_start: int, begin: int, end: int) -> Iterator[Units]:
    """All whole units [begin, end) of a queue file, whatever they hold; these are queue offsets."""
    for first in range(begin, end, _CHUNK_UNITS):
        count = min(_CHUNK_UNITS, end - first)
        data = file.read_at((first - file_start) * UNIT_SIZE, count * UNIT_SIZE)
        raw = np.frombuffer(data, _UNIT, len(data) // UNIT_SIZE)
        units = np.empty(len(raw), _ROW)
        units["index"] = np.arange(first, first + len(raw))
        for name, _ in UNIT.dtype:
            units[name] = raw[name]
        yield units


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
    folder: str
    files: tuple[StoreFile, ...]


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


def list_queues(facts: StoreFacts, selection: Selection) -> list[Queue]:
    """The wanted queues under `consumequeue`, by topic and number."""
    found: list[Queue] = []
    storage = facts.storage
    for topic in _folders(storage, f"{facts.path}/consumequeue"):
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
            found.append(Queue(str(topic.base_name), queue_id, str(number.path), files))
    return sorted(found, key=lambda queue: (queue.topic, queue.queue_id))


def _folders(storage: Storage, path: str) -> list[fs.FileInfo]:
    return [info for info in storage.children(path) if info.type == fs.FileType.Directory]


def plan_pieces(facts: StoreFacts, options: ReadOptions) -> list[tuple[QueuePiece | Damage, ...]]:
    """The wanted offsets of every file of every wanted queue, and those that no file holds between
    two; small pieces together."""
    pieces: list[QueuePiece | Damage] = []
    for queue in list_queues(facts, options.selection):
        name = MessageQueue(queue.topic, facts.broker or facts.path, queue.queue_id)
        pieces += _pieces(queue, options.selection.queue_offsets(name))
    return gather(pieces, lambda piece: piece.size, options.split_bytes)


def _pieces(queue: Queue, wanted: Span) -> Iterator[QueuePiece | Damage]:
    topic, queue_id = queue.topic, queue.queue_id

    def units(begin: int, end: int) -> range:
        return range(max(begin // UNIT_SIZE, wanted.low), min(end // UNIT_SIZE, wanted.high + 1))

    lacking = {begin: (path, end) for path, begin, end in gaps(queue.folder, queue.files, 0)}
    for file in queue.files:
        if held := units(file.start, file.end):
            start, followed = file.start // UNIT_SIZE, file is not queue.files[-1]
            yield QueuePiece(topic, queue_id, file.path, start, held.start, held.stop, followed)
        path, end = lacking.get(file.end, ("", 0))
        if gap := units(file.end, end):
            what = f"no file of queue {topic} {queue_id} from queue offset {gap.start} on"
            yield _damage(path, gap.start, gap.stop, what)


def _damage(path: str, first: int, behind: int, what: str) -> Damage:
    """Its offsets are bytes of the queue."""
    return Damage(path, first * UNIT_SIZE, (behind - first) * UNIT_SIZE, what, in_log=False)


def read_units(storage: Storage, piece: QueuePiece) -> Iterator[Units | Damage]:
    """The written units of a piece in chunks, without filler, and what cannot be units: zeros, too,
    since all must be written."""
    with storage.open(piece.path) as file:
        end = piece.end
        if not piece.followed:
            end = min(end, piece.file_start + last_written(file))
        for units in unit_chunks(file, piece.file_start, piece.begin, end):
            wrong = (units["size"] <= 0) | (units["offset"] < 0)
            yield units[~wrong & (units["size"] != FILLER_SIZE)]
            yield from bad_units(piece, units["index"][wrong])


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
        confirmed = item["offset"] + item["size"] <= end
        held = np.flatnonzero(confirmed)
        count = int(held[-1]) + 1 if len(held) else 0
        bad = np.concatenate([beyond, item["index"][:count][~confirmed[:count]]])
        yield item[confirmed]
        if count:
            yield from bad_units(piece, bad)
            bad = bad[:0]
        beyond = np.concatenate([bad, item["index"][count:]])
