"""The queues of a store: for each (topic, queue id) its consume queue and next offset.
`next_offset` covers the whole log, the consume queue its confirmed part. Queues of system-record
topics have a handler instead. Files are in `consumequeue/<topic>/<queueId>/` and share a bounded
set of descriptors. Origin: Java `QueueOffsetOperator`, `ConsumeQueueStore`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from batonmq.protocol.errors import CorruptLogError
from batonmq.protocol.numbers import INT_MAX, natural_number
from batonmq.protocol.records.codec import RecordHead
from batonmq.protocol.topic_name import DUE_TOPICS, METADATA_TOPIC, is_file_name
from batonmq.runtime import disk
from batonmq.runtime.durable_file import sync_below, sync_directory
from batonmq.store.consume_queue import ConsumeQueue, SharedByQueues, whole_units
from batonmq.store.disk_health import StoreHealth
from batonmq.store.file_handles import FileHandles, Making
from batonmq.store.queue_positions import POSITIONS_QUEUE, QueuePositions, decode_positions

SystemRecordHandler = Callable[[RecordHead, bytes], None]

log = logging.getLogger(__name__)


def remove_folders(folders: list[Path]) -> None:
    """Removes what was taken away, in any thread. What cannot be removed stays for
    the next start."""
    for folder in folders:
        try:
            disk.rmtree(folder)
        except OSError as error:
            log.warning("deleted_queues_stay folder=%s reason=%s", folder, error)


class DeletedFolders:
    """Queue folders that are taken away by one rename and removed later by another thread."""

    def __init__(self, place: Path) -> None:
        """`place`: where they go."""
        self._place = place
        self._waiting: list[Path] = []
        self._number = 0

    def remove_earlier(self) -> None:
        """Removes what earlier starts left."""
        if self._place.is_dir():
            remove_folders([self._place])

    def take_away(self, parent: Path, name: str) -> None:
        """Takes the folder `name` out of `parent` durably, so that none of its files is found under
        that name again. A name that is no child's name is left alone (R46). Raises OSError."""
        if not is_file_name(name):
            log.error("folder_not_taken_away parent=%s name=%r", parent, name)
            return
        folder = parent / name
        # What a link points to is not the store's, and files of queues are only in folders.
        if folder.is_symlink() or not folder.is_dir():
            return
        try:
            aside = self._new_place()
            disk.rename(folder, aside / folder.name)
            self._waiting.append(aside)
        except OSError as error:  # perhaps a full disk: unlinking needs no space
            log.warning("queue_folder_not_renamed folder=%s reason=%s", folder, error)
            disk.rmtree(folder)
        sync_directory(folder.parent)

    def _new_place(self) -> Path:
        disk.makedirs(self._place)
        if not self._number:  # earlier starts may have left some
            names = disk.listdir(self._place)
            self._number = max((natural_number(name) or 0 for name in names), default=0)
        self._number += 1
        folder = self._place / str(self._number)
        disk.mkdir(folder)
        return folder

    def taken(self) -> list[Path]:
        """What was taken away since the last call, for `remove_folders`."""
        folders, self._waiting = self._waiting, []
        return folders


def may_have_folder(topic: str, queue_id: int) -> bool:
    """Whether the queue's folder is a direct child of its topic's, and that of `consumequeue`."""
    return queue_id >= 0 and is_file_name(topic)


class ConsumeQueueStore:
    """(topic, queue id) -> ConsumeQueue, and what is done to all of them."""

    def __init__(
        self,
        root: Path,
        *,
        file_size: int = 6_000_000,
        open_files_max: int = 512,
        health: StoreHealth | None = None,
        before_rebuild: Callable[[], None] = lambda: None,
    ) -> None:
        """`root`: the `consumequeue` folder; `file_size`: mappedFileSizeConsumeQueue.
        `before_rebuild` notes durably that the log must be dispatched from its beginning; it is
        called before a damaged queue is removed, because the next start would not see that."""
        self.root = root
        self.deleted = DeletedFolders(root.with_name(f"{root.name}.deleted"))
        self.health = health or StoreHealth()
        self.before_rebuild = before_rebuild
        self._file_size = whole_units(file_size)
        self._handles = FileHandles(open_files_max, self.health)
        self._shared = SharedByQueues()
        self._queues: dict[tuple[str, int], ConsumeQueue] = {}
        self._ids: dict[str, set[int]] = {}

    def load(self, safe_offset: int = 0) -> list[Exception]:
        """Finds every queue on disk, each cut behind its last good unit. `safe_offset`: units of
        lower records were synced. A queue with damaged files is removed and its error returned:
        dispatch the log from its beginning to rebuild it. Raises OSError, before anything is
        removed if that cannot be noted."""
        damaged: list[Exception] = []
        cut: list[Path] = []
        self.deleted.remove_earlier()
        for topic, queue_id in self._queues_on_disk():
            queue = self._new_queue(topic, queue_id)
            try:
                cut += queue.load(safe_offset)
            except (CorruptLogError, OSError) as error:
                disk.check_unreadable(error)
                log.error(
                    "consume_queue_damaged topic=%s queue_id=%d reason=%s", topic, queue_id, error
                )
                if not damaged:  # once, and before the first of them is removed
                    self.before_rebuild()
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
                    queue_id = natural_number(name, INT_MAX)
                    if queue_id is not None:
                        yield topic, queue_id

    def _new_queue(self, topic: str, queue_id: int) -> ConsumeQueue:
        return ConsumeQueue(
            f"{self.root}/{topic}/{queue_id}",
            topic,
            queue_id,
            file_size=self._file_size,
            handles=self._handles,
            health=self.health,
            shared=self._shared,
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
        """The queue, new and empty if unknown; nothing is written yet. One that can have no folder
        is not kept: nothing may be put there."""
        queue = self._queues.get((topic, queue_id))
        if queue is None:
            queue = self._new_queue(topic, queue_id)
            if may_have_folder(topic, queue_id):
                self._add(queue)
        return queue

    def queues(self) -> Iterator[ConsumeQueue]:
        return iter(tuple(self._queues.values()))  # upkeep walks in slices, and queues come and go

    def topics(self) -> set[str]:
        return set(self._ids)

    def ids_of(self, topic: str) -> list[int]:
        """Queue ids of a topic, ascending."""
        return sorted(self._ids.get(topic, ()))

    def __len__(self) -> int:
        return len(self._queues)

    # Against the log.

    @property
    def last_physical_end(self) -> int:
        """End (exclusive) in the log of the newest record in any queue; 0 if none."""
        return max((queue.last_physical_end for queue in self._queues.values()), default=0)

    @property
    def ends_total(self) -> int:
        """The sum of the next offsets of all queues that have a file or a unit."""
        return self._shared.ends_total

    @property
    def begins_total(self) -> int:
        """The sum of the first units in the files of these queues."""
        return self._shared.begins_total

    def drop_damaged(self, phy_offset: int, *, expects_none: bool) -> bool:
        """Removes queues whose units above `phy_offset` must be damage, to be rebuilt from the log;
        whether there were any."""
        damaged = []
        for key, queue in self._queues.items():
            try:
                queue.check_cut(phy_offset, expects_none=expects_none)
            except CorruptLogError as error:
                log.error("consume_queue_damaged topic=%s queue_id=%d reason=%s", *key, error)
                damaged.append(queue)
        self.rebuild(damaged)
        return bool(damaged)

    def rebuild(self, queues: Sequence[ConsumeQueue]) -> None:
        """Removes them; the caller rebuilds them by dispatching the log from its beginning."""
        if queues:
            self.before_rebuild()
        for queue in queues:
            self._destroy(self._remove(queue.topic, queue.queue_id))

    def drop_unreadable(self, error: CorruptLogError) -> bool:
        """Removes the queue whose file the error names, as `rebuild` does; whether there is one."""
        folder = Path(error.file).parent
        found = [queue for queue in self._queues.values() if queue.folder == folder]
        self.rebuild(found)
        return bool(found)

    def truncate_dirty(self, phy_offset: int) -> int:
        """Drops units of records at or above `phy_offset`, durably; how many queues had some."""
        cuts = (queue.truncate_dirty(phy_offset) for queue in self._queues.values())
        cut = [paths for paths in cuts if paths is not None]
        self._sync([path for paths in cut for path in paths])
        return len(cut)

    def _sync(self, paths: list[Path]) -> None:
        if paths:
            sync_below(self.root, paths)

    # Flushing and deletion.

    def dirty(self) -> list[ConsumeQueue]:
        """Queues that now have something for `ConsumeQueue.write_back`."""
        return list(self._shared.dirty)

    def missing_files(self, queues: Sequence[ConsumeQueue]) -> Making | None:
        """What makes the files that these queues need, in a thread; then call `note_made`."""
        paths = [path for queue in queues if (path := queue.missing_file) is not None]
        return self._handles.new_files.make(paths, self._file_size) if paths else None

    def note_made(self, making: Making) -> None:
        self._handles.new_files.note(making)

    def write_back(self) -> list[Path]:
        """Writes all tails to the page cache; the paths for `sync_file`, which any thread may call.
        Raises OSError (disk full)."""
        return [path for queue in self.dirty() for path in queue.write_back()]

    def delete_topic(self, topic: str) -> int:
        """Removes all queues of a topic from table and disk; how many. Raises OSError if the folder
        cannot be taken away; repeat the deletion before anything is put there."""
        ids = self._ids.pop(topic, set())
        for queue_id in ids:
            self._queues.pop((topic, queue_id)).forget_files()
        # Also without a known queue: an earlier attempt may have failed here.
        self.deleted.take_away(self.root, topic)
        return len(ids)

    def destroy_empty(self) -> list[tuple[str, int]]:
        """Removes queues without messages, which may have a position; returns which they were."""
        gone = [key for key, queue in self._queues.items() if not queue.last_physical_end]
        for key in gone:
            self._destroy(self._remove(*key))
        return gone

    def _destroy(self, queue: ConsumeQueue) -> None:
        queue.forget_files()
        self.deleted.take_away(self.root / queue.topic, str(queue.queue_id))

    def destroy_all(self) -> None:
        """Removes every queue (an empty log has none)."""
        for topic in self.topics():
            self.delete_topic(topic)

    def close(self, *, write_back: bool = True) -> None:
        """Writes the tails, or drops them, and closes descriptors; nothing is synced."""
        if write_back:
            self.write_back()
        self._handles.close()


class StoredQueue:
    """One (topic, queue id). `next_offset`: of the next message put there."""

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
        #: Whether its records only go to the consume queue, with the hash of TAGS.
        self.is_plain = topic not in DUE_TOPICS
        #: Whether messages have consecutive offsets (not after a deletion).
        self.is_gapless = True

    def handled_by(self, handler: SystemRecordHandler | None) -> None:
        self.handler = handler
        self.is_plain = self.is_plain and handler is None


class QueueTable:
    """All queues, also those with unconfirmed messages only. `positions`: see R38."""

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
        self.queues: dict[tuple[str, int], StoredQueue] = {}
        #: While a new master takes over unconfirmed records.
        self.shows_unconfirmed = False
        self._by_bytes: dict[tuple[bytes, int], StoredQueue] = {}
        self._on_system_record = on_system_record
        self._on_unknown_topic = on_unknown_topic
        self._on_new_beginning = on_new_beginning

    def adopt_loaded(self) -> None:
        """Takes over the queues found on disk, and positions without files."""
        for consume_queue in self.consume_queues.queues():
            self.find_or_create(consume_queue.topic, consume_queue.queue_id)
        for topic, positions in self.positions.placed.items():
            for queue_id, position in positions.items():
                queue = self.find_or_create(topic, queue_id)
                if position > queue.consume_queue.max_offset:
                    queue.consume_queue.begin_at(position, 0)
                    queue.next_offset = position

    def of_bytes(self, topic: bytes, queue_id: int) -> StoredQueue:
        """The queue of a record in the log; announced at its first record, even if found on disk:
        an earlier process may have been killed before its topic was stored."""
        queue = self._by_bytes.get((topic, queue_id))
        if queue is None:
            name = topic.decode("utf-8", "replace")
            queue = self._by_bytes[topic, queue_id] = self.find_or_create(name, queue_id)
            if self._on_unknown_topic is not None and queue.handler is None:
                self._on_unknown_topic(name, queue_id)
        return queue

    def _skip(self, head: RecordHead, body: bytes) -> None:
        """A record for a queue that can have no folder stays in the log, and no member shows it
        (R46)."""
        self.consume_queues.health.skipped(head.topic, head.queue_id, head.physical_offset)

    def topics_with_odd_queues(self) -> set[bytes]:
        """Topics that have a queue that is not `is_plain`."""
        names = {METADATA_TOPIC, *DUE_TOPICS, *self._on_system_record}
        return {name.encode("utf-8") for name in names}

    def get(self, topic: str, queue_id: int) -> StoredQueue | None:
        return self.queues.get((topic, queue_id))

    def find_or_create(self, topic: str, queue_id: int) -> StoredQueue:
        """The queue; a new one leaves nothing on disk before its first unit."""
        queue = self.queues.get((topic, queue_id))
        if queue is None:
            consume_queue = self.consume_queues.find_or_create(topic, queue_id)
            queue = self.queues[topic, queue_id] = StoredQueue(topic, queue_id, consume_queue)
            if (topic, queue_id) == (METADATA_TOPIC, POSITIONS_QUEUE):
                queue.handled_by(self._take_positions)
            elif not may_have_folder(topic, queue_id):
                queue.handled_by(self._skip)
            else:
                queue.handled_by(self._on_system_record.get(topic))
        return queue

    def _take_positions(self, head: RecordHead, body: bytes) -> None:
        """A master's statement of positions, at its place in the log. Raises CorruptLogError."""
        record = decode_positions(body)
        if record is None:
            return
        end = head.physical_offset + head.size
        for topic, positions in record.positions.items():
            name = topic.encode("utf-8")
            for queue_id, position in positions.items():
                self._take_position(self.of_bytes(name, queue_id), position, end)
        # The records that state the other queues could still be cut.
        if record.whole and not self.shows_unconfirmed:
            self.positions.note_round(record.since, end)

    def _take_position(self, queue: StoredQueue, position: int, record_end: int) -> None:
        if position > queue.next_offset:
            queue.next_offset = position
            queue.is_gapless = False
        if self.shows_unconfirmed:  # the consume queue is for confirmed records: it comes again
            return
        if position > queue.consume_queue.max_offset:
            queue.consume_queue.begin_at(position, record_end)
            self.positions.note_placed(queue.topic, queue.queue_id, position, record_end)

    def reset_next_offsets(self) -> None:
        """Sets each queue's next offset behind its last unit; the caller counts the rest."""
        for queue in self.queues.values():
            queue.next_offset = queue.consume_queue.max_offset

    def log_ends_at(self, offset: int, log_begin: int) -> None:
        """The log ends at `offset`, after a cut or a start: so do the queues, and positions stated
        behind it do not count. Raises OSError."""
        if self.positions.log_ends_at(offset, log_begin):
            for key in self.consume_queues.destroy_empty():
                self._forget(key)
        self.reset_next_offsets()

    def _forget(self, key: tuple[str, int]) -> None:
        queue = self.queues.pop(key, None)
        if queue is not None:
            self._by_bytes.pop((queue.topic_bytes, queue.queue_id), None)

    def delete_topic(self, topic: str) -> int:
        """Removes all queues of a topic, durably; how many. Raises OSError; then repeat the
        deletion."""
        gone = self.consume_queues.ids_of(topic)
        for queue_id in gone:
            self._forget((topic, queue_id))
        self.positions.forget_topic(topic)
        self.consume_queues.delete_topic(topic)
        return len(gone)

    def begin_at(self, offset: int) -> None:
        """Drops every queue: the log starts again, empty, at `offset`. Raises OSError."""
        # Durable before the first queue goes: else a start would number from what is left of them.
        self.positions.begin_at(offset)
        self._on_new_beginning()
        self.queues.clear()
        self._by_bytes.clear()
        self.consume_queues.destroy_all()
