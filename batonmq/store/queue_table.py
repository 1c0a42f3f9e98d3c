"""The queues of a store: for each (topic, queue id) its consume queue and its next offset.

`next_offset` covers the whole log, the consume queue only the confirmed part of it; the two meet
when everything is confirmed. Queues of system-record topics have a handler in the place of a
consume queue. Files are under `consumequeue/<topic>/<queueId>/`; they share a bounded set of
descriptors. Origin: Java `QueueOffsetOperator`, `ConsumeQueueStore`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from batonmq.protocol.errors import CorruptLogError
from batonmq.protocol.records.codec import RecordHead
from batonmq.protocol.topic_name import DUE_TOPICS, METADATA_TOPIC, is_file_name
from batonmq.runtime import disk
from batonmq.runtime.durable_file import sync_below, sync_directory
from batonmq.store.consume_queue import ConsumeQueue, whole_units
from batonmq.store.file_handles import FileHandles, Making
from batonmq.store.health import StoreHealth
from batonmq.store.queue_positions import POSITIONS_QUEUE, QueuePositions, decode_positions

SystemRecordHandler = Callable[[RecordHead, bytes], None]

log = logging.getLogger(__name__)


def remove_folders(folders: list[Path]) -> None:
    """Remove what was taken away; for any thread. What cannot be removed stays until the next
    start tries again."""
    for folder in folders:
        try:
            disk.rmtree(folder)
        except OSError as error:
            log.warning("deleted_queues_stay folder=%s error=%s", folder, error)


class DeletedFolders:
    """Folders of queues that are taken away by one rename, and removed later by another thread."""

    def __init__(self, place: Path) -> None:
        """`place` is where they go."""
        self._place = place
        self._waiting: list[Path] = []
        self._number = 0

    def remove_earlier(self) -> None:
        """Remove what earlier starts have left."""
        if self._place.is_dir():
            remove_folders([self._place])

    def take_away(self, parent: Path, name: str) -> None:
        """Takes the folder `name` of `parent` away durably: whatever happens later to its files,
        none of them is found again under its name. What is no name of a child is not touched (R46).
        Raises OSError."""
        if not is_file_name(name):
            log.error("folder_not_taken_away parent=%s name=%r", parent, name)
            return
        folder = parent / name
        if folder.is_symlink() or not folder.is_dir():
            return
        try:
            aside = self._new_place()
            disk.rename(folder, aside / folder.name)
            self._waiting.append(aside)
        except OSError as error:  # perhaps a full disk, and to unlink takes no room
            log.warning("queue_folder_not_renamed folder=%s error=%s", folder, error)
            disk.rmtree(folder)
        sync_directory(folder.parent)

    def _new_place(self) -> Path:
        disk.makedirs(self._place)
        if not self._number:  # what earlier starts have left may still be there
            names = disk.listdir(self._place)
            self._number = max((int(name) for name in names if name.isdigit()), default=0)
        self._number += 1
        folder = self._place / str(self._number)
        disk.mkdir(folder)
        return folder

    def taken(self) -> list[Path]:
        """What was taken away since the last call, for `remove_folders`."""
        folders, self._waiting = self._waiting, []
        return folders


def may_have_folder(topic: str, queue_id: int) -> bool:
    """Whether a queue's folder is a direct child of its topic's, and that of `consumequeue`."""
    return queue_id >= 0 and is_file_name(topic)


class ConsumeQueueStore:
    """(topic, queue id) -> ConsumeQueue, and what is done to all of them at once."""

    def __init__(
        self,
        root: Path,
        *,
        file_size: int = 6_000_000,
        open_files_max: int = 512,
        health: StoreHealth | None = None,
        before_rebuild: Callable[[], None] = lambda: None,
    ) -> None:
        """`root` is the `consumequeue` folder, `file_size` is mappedFileSizeConsumeQueue.

        `before_rebuild` notes durably that the log is to be dispatched from its beginning. It is
        called before a damaged queue is removed: without its files the next start would not know.
        """
        self.root = root
        self.deleted = DeletedFolders(root.with_name(f"{root.name}.deleted"))
        self.health = health or StoreHealth()
        self._before_rebuild = before_rebuild
        self._file_size = whole_units(file_size)
        self._handles = FileHandles(open_files_max)
        self._dirty: dict[ConsumeQueue, None] = {}
        self._queues: dict[tuple[str, int], ConsumeQueue] = {}
        self._ids: dict[str, set[int]] = {}

    def load(self, safe_offset: int = 0) -> list[CorruptLogError]:
        """Find every queue on disk, each cut behind its last good unit.

        `safe_offset`: units of records below it were synced before the last start's end. A queue
        with damaged files is removed whole and its error returned: the caller builds it
        anew by dispatching the log from its beginning. Raises OSError, before anything is removed
        if that cannot be noted.
        """
        damaged: list[CorruptLogError] = []
        cut: list[Path] = []
        self.deleted.remove_earlier()
        for topic, queue_id in self._queues_on_disk():
            queue = self._new_queue(topic, queue_id)
            try:
                cut += queue.load(safe_offset)
            except CorruptLogError as error:
                log.error(
                    "consume_queue_damaged topic=%s queue_id=%d what=%s", topic, queue_id, error
                )
                if not damaged:
                    self._before_rebuild()
                damaged.append(error)
                self._destroy(queue)
                continue
            self._add(queue)
        self._sync(cut)
        return damaged

    def _queues_on_disk(self) -> Iterator[tuple[str, int]]:
        if not self.root.is_dir():
            return
        for topic in sorted(disk.listdir(self.root)):
            folder = self.root / topic
            if folder.is_dir():
                for name in sorted(disk.listdir(folder)):
                    if name.isdigit():
                        yield topic, int(name)

    def _new_queue(self, topic: str, queue_id: int) -> ConsumeQueue:
        return ConsumeQueue(
            f"{self.root}/{topic}/{queue_id}",
            topic,
            queue_id,
            file_size=self._file_size,
            handles=self._handles,
            health=self.health,
            dirty=self._dirty,
        )

    def _add(self, queue: ConsumeQueue) -> None:
        self._queues[queue.topic, queue.queue_id] = queue
        self._ids.setdefault(queue.topic, set()).add(queue.queue_id)

    def _remove(self, topic: str, queue_id: int) -> ConsumeQueue:
        ids = self._ids[topic]
        ids.remove(queue_id)
        if not ids:
            del self._ids[topic]
        return self._queues.pop((topic, queue_id))

    # Lookup.

    def find(self, topic: str, queue_id: int) -> ConsumeQueue | None:
        return self._queues.get((topic, queue_id))

    def find_or_create(self, topic: str, queue_id: int) -> ConsumeQueue:
        """The queue, new and empty if it was not known; nothing is written to disk yet. One that
        can have no folder is not kept: nothing may be put there."""
        queue = self._queues.get((topic, queue_id))
        if queue is None:
            queue = self._new_queue(topic, queue_id)
            if may_have_folder(topic, queue_id):
                self._add(queue)
        return queue

    def queues(self) -> Iterator[ConsumeQueue]:
        return iter(tuple(self._queues.values()))

    def topics(self) -> set[str]:
        return set(self._ids)

    def ids_of(self, topic: str) -> list[int]:
        """The queues of a topic, ascending."""
        return sorted(self._ids.get(topic, ()))

    def __len__(self) -> int:
        return len(self._queues)

    # Against the log.

    @property
    def last_physical_end(self) -> int:
        """End (exclusive) in the log of the newest record that any queue holds; 0 if none."""
        return max((queue.last_physical_end for queue in self._queues.values()), default=0)

    def drop_rotten(self, phy_offset: int, *, expects_none: bool) -> bool:
        """Removes the queues whose units above `phy_offset` can only be damage, to be rebuilt by
        dispatching the log from its beginning. Whether there were any."""
        rotten = []
        for key, queue in self._queues.items():
            try:
                queue.check_cut(phy_offset, expects_none=expects_none)
            except CorruptLogError as error:
                log.error("consume_queue_damaged topic=%s queue_id=%d what=%s", *key, error)
                rotten.append(queue)
        self.rebuild(rotten)
        return bool(rotten)

    def rebuild(self, queues: Sequence[ConsumeQueue]) -> None:
        """Removes them: the caller builds them anew by dispatching the log from its beginning."""
        if queues:
            self._before_rebuild()
        for queue in queues:
            self._destroy(self._remove(queue.topic, queue.queue_id))

    def truncate_dirty(self, phy_offset: int) -> int:
        """Drop units of records at or above `phy_offset`, durably; how many queues had some."""
        cuts = (queue.truncate_dirty(phy_offset) for queue in self._queues.values())
        cut = [paths for paths in cuts if paths is not None]
        self._sync([path for paths in cut for path in paths])
        return len(cut)

    def _sync(self, paths: list[Path]) -> None:
        if paths:
            sync_below(self.root, paths)

    def correct_min_offsets(self, log_min_offset: int) -> None:
        for queue in self._queues.values():
            queue.correct_min_offset(log_min_offset)

    # Flushing and deletion.

    def dirty(self) -> list[ConsumeQueue]:
        """The queues that have something for `ConsumeQueue.write_back` now."""
        return list(self._dirty)

    def missing_files(self, queues: Sequence[ConsumeQueue]) -> Making | None:
        """What makes the files that these would make, in a thread; `note_made` when it has."""
        paths = [path for queue in queues if (path := queue.missing_file) is not None]
        return self._handles.new_files.make(paths, self._file_size) if paths else None

    def note_made(self, making: Making) -> None:
        self._handles.new_files.note(making)

    def write_back(self) -> list[Path]:
        """Bring all tails into the page cache; the paths that `sync_file` then makes durable.

        Call it on the owner's thread, and `sync_file` for each path on any thread. Raises OSError
        (disk full).
        """
        return [path for queue in self.dirty() for path in queue.write_back()]

    def delete_topic(self, topic: str) -> int:
        """Remove all queues of a topic from table and disk; how many there were.

        Raises OSError if the folder cannot be taken away; then the deletion is to be repeated
        before anything else is put there.
        """
        ids = self._ids.pop(topic, set())
        for queue_id in ids:
            self._queues.pop((topic, queue_id)).forget_files()
        self.deleted.take_away(self.root, topic)
        return len(ids)

    def destroy_empty(self) -> list[tuple[str, int]]:
        """Remove the queues that hold no message, with their place; which they were."""
        gone = [key for key, queue in self._queues.items() if not queue.last_physical_end]
        for key in gone:
            self._destroy(self._remove(*key))
        return gone

    def _destroy(self, queue: ConsumeQueue) -> None:
        queue.forget_files()
        self.deleted.take_away(self.root / queue.topic, str(queue.queue_id))

    def destroy_all(self) -> None:
        """Remove every queue (an empty log has none)."""
        for topic in self.topics():
            self.delete_topic(topic)

    def close(self, *, write_back: bool = True) -> None:
        """Write back the tails, or drop them, and close descriptors; nothing is synced."""
        if write_back:
            self.write_back()
        self._handles.close()


class Queue:
    """One (topic, queue id). `next_offset` is the offset of the next message put there."""

    __slots__ = (
        "consume_queue",
        "handler",
        "is_gapless",
        "is_plain",
        "next_offset",
        "queue_id",
        "topic",
        "topic_bytes",
    )

    def __init__(self, topic: str, queue_id: int, consume_queue: ConsumeQueue) -> None:
        self.topic = topic
        self.topic_bytes = topic.encode("utf-8")
        self.queue_id = queue_id
        self.consume_queue = consume_queue
        self.next_offset = consume_queue.max_offset
        self.handler: SystemRecordHandler | None = None
        #: Whether its records just go to the consume queue, with the hash of TAGS.
        self.is_plain = topic not in DUE_TOPICS
        #: Whether each message is put at the offset behind the one before (not after a deletion).
        self.is_gapless = True

    def handled_by(self, handler: SystemRecordHandler | None) -> None:
        """Its records go to `handler`, unless that is None."""
        self.handler = handler
        self.is_plain = self.is_plain and handler is None


class QueueTable:
    """All queues, those with messages above the confirmed end only included.

    `positions` is where they go on counting beside their messages (R38).
    """

    def __init__(
        self,
        consume_queues: ConsumeQueueStore,
        positions: QueuePositions,
        on_system_record: dict[str, SystemRecordHandler],
        on_unknown_topic: Callable[[str, int], None] | None,
        on_new_beginning: Callable[[], None],
    ) -> None:
        """The hooks are those of `MessageStore`."""
        self.consume_queues = consume_queues
        self.positions = positions
        self.queues: dict[tuple[str, int], Queue] = {}
        #: While a new master takes over records that are not confirmed.
        self.shows_unconfirmed = False
        self._by_bytes: dict[tuple[bytes, int], Queue] = {}
        self._on_system_record = on_system_record
        self._on_unknown_topic = on_unknown_topic
        self._on_new_beginning = on_new_beginning

    def adopt_loaded(self) -> None:
        """Take over what the consume queue store found on disk, and positions without files."""
        for consume_queue in self.consume_queues.queues():
            self.find_or_create(consume_queue.topic, consume_queue.queue_id)
        for topic, positions in self.positions.placed.items():
            for queue_id, position in positions.items():
                queue = self.find_or_create(topic, queue_id)
                if position > queue.consume_queue.max_offset:
                    queue.consume_queue.begin_at(position, 0)
                    queue.next_offset = position

    def of_bytes(self, topic: bytes, queue_id: int) -> Queue:
        """The queue that a record of the log belongs to; announced at its first record.

        A queue found on disk is announced, too: its topic may not have been stored yet when the
        process before this one was killed.
        """
        queue = self._by_bytes.get((topic, queue_id))
        if queue is None:
            name = topic.decode("utf-8", "replace")
            queue = self._by_bytes[topic, queue_id] = self.find_or_create(name, queue_id)
            if self._on_unknown_topic is not None and queue.handler is None:
                self._on_unknown_topic(name, queue_id)
        return queue

    def _skip(self, head: RecordHead, body: bytes) -> None:
        """A record for a queue that can have no folder: it stays in the log, and no member shows it
        (R46)."""
        self.consume_queues.health.skipped(head.topic, head.queue_id, head.physical_offset)

    def topics_with_odd_queues(self) -> set[bytes]:
        """The topics of which some queue is not `is_plain`."""
        names = {METADATA_TOPIC, *DUE_TOPICS, *self._on_system_record}
        return {name.encode("utf-8") for name in names}

    def get(self, topic: str, queue_id: int) -> Queue | None:
        return self.queues.get((topic, queue_id))

    def find_or_create(self, topic: str, queue_id: int) -> Queue:
        """The queue; a new one leaves nothing on disk before its first unit."""
        queue = self.queues.get((topic, queue_id))
        if queue is None:
            consume_queue = self.consume_queues.find_or_create(topic, queue_id)
            queue = self.queues[topic, queue_id] = Queue(topic, queue_id, consume_queue)
            if (topic, queue_id) == (METADATA_TOPIC, POSITIONS_QUEUE):
                queue.handled_by(self._take_positions)
            elif not may_have_folder(topic, queue_id):
                queue.handled_by(self._skip)
            else:
                queue.handled_by(self._on_system_record.get(topic))
        return queue

    def _take_positions(self, head: RecordHead, body: bytes) -> None:
        """A master's statement of positions, in its place in the log. Raises CorruptLogError."""
        record = decode_positions(body)
        if record is None:
            return
        end = head.physical_offset + head.size
        for topic, positions in record.positions.items():
            name = topic.encode("utf-8")
            for queue_id, position in positions.items():
                self._take_position(self.of_bytes(name, queue_id), position, end)
        if record.whole and not self.shows_unconfirmed:
            self.positions.note_round(record.since, end)

    def _take_position(self, queue: Queue, position: int, record_end: int) -> None:
        if position > queue.next_offset:
            queue.next_offset = position
            queue.is_gapless = False
        if self.shows_unconfirmed:
            return
        if position > queue.consume_queue.max_offset:
            queue.consume_queue.begin_at(position, record_end)
            self.positions.note_placed(queue.topic, queue.queue_id, position, record_end)

    def reset_next_offsets(self) -> None:
        """Set every queue's next offset behind its last unit; the caller counts on from there."""
        for queue in self.queues.values():
            queue.next_offset = queue.consume_queue.max_offset

    def log_ends_at(self, offset: int, log_begin: int) -> None:
        """The log was cut at `offset`, or ends there after a start: so do the queues. Positions
        that were stated behind it count no more. Raises OSError."""
        if self.positions.log_ends_at(offset, log_begin):
            for key in self.consume_queues.destroy_empty():
                self._forget(key)
        self.reset_next_offsets()

    def _forget(self, key: tuple[str, int]) -> None:
        queue = self.queues.pop(key, None)
        if queue is not None:
            self._by_bytes.pop((queue.topic_bytes, queue.queue_id), None)

    def delete_topic(self, topic: str) -> int:
        """Remove all queues of a topic, durably; how many there were. Raises OSError: then the
        deletion is to be repeated."""
        gone = self.consume_queues.ids_of(topic)
        for queue_id in gone:
            self._forget((topic, queue_id))
        self.positions.forget_topic(topic)
        self.consume_queues.delete_topic(topic)
        return len(gone)

    def begin_at(self, offset: int) -> None:
        """Forget every queue: the log begins anew, empty, at `offset`. Raises OSError."""
        self.positions.begin_at(offset)
        self._on_new_beginning()
        self.queues.clear()
        self._by_bytes.clear()
        self.consume_queues.destroy_all()
