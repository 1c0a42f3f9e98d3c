"""The table of all consume queues of a store, under `consumequeue/<topic>/<queueId>/`.

Queues are made when first written to; their files share a bounded set of descriptors.
Origin: Java `ConsumeQueueStore`. One thread owns the table (see `consume_queue`).
"""

import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from epoch.durable_file import sync_directory, sync_file
from protocol.errors import CorruptLogError
from store.consume_queue import ConsumeQueue
from store.file_handles import FileHandles

log = logging.getLogger(__name__)


class ConsumeQueueStore:
    """(topic, queue id) -> ConsumeQueue, and what is done to all of them at once."""

    def __init__(self, root: Path, *, file_size: int = 6_000_000, open_files_max: int = 512):
        """`root` is the `consumequeue` folder, `file_size` is mappedFileSizeConsumeQueue."""
        self._root = root
        self._file_size = file_size
        self._handles = FileHandles(open_files_max)
        self._queues: dict[tuple[str, int], ConsumeQueue] = {}

    def load(self, safe_offset: int = 0) -> list[CorruptLogError]:
        """Find every queue on disk, each cut behind its last good unit.

        `safe_offset`: units of records below it were synced before the last start's end. A queue
        with damaged files is removed whole and its error returned: the caller builds it
        anew by dispatching the log from its beginning.
        """
        damaged: list[CorruptLogError] = []
        for topic, queue_id in self._queues_on_disk():
            queue = self._new_queue(topic, queue_id)
            try:
                queue.load(safe_offset)
            except CorruptLogError as error:
                log.error(
                    "consume_queue_damaged topic=%s queue_id=%d what=%s", topic, queue_id, error
                )
                damaged.append(error)
                queue.destroy()
                continue
            self._queues[topic, queue_id] = queue
        return damaged

    def _queues_on_disk(self) -> Iterator[tuple[str, int]]:
        if not self._root.is_dir():
            return
        for topic in sorted(os.listdir(self._root)):
            folder = self._root / topic
            if folder.is_dir():
                for name in sorted(os.listdir(folder)):
                    if name.isdigit():
                        yield topic, int(name)

    def _new_queue(self, topic: str, queue_id: int) -> ConsumeQueue:
        return ConsumeQueue(
            self._root / topic / str(queue_id),
            topic,
            queue_id,
            file_size=self._file_size,
            handles=self._handles,
        )

    # -- lookup

    def find(self, topic: str, queue_id: int) -> ConsumeQueue | None:
        return self._queues.get((topic, queue_id))

    def find_or_create(self, topic: str, queue_id: int) -> ConsumeQueue:
        """The queue, new and empty if it was not known; nothing is written to disk yet."""
        queue = self._queues.get((topic, queue_id))
        if queue is None:
            queue = self._queues[topic, queue_id] = self._new_queue(topic, queue_id)
        return queue

    def queues(self) -> Iterator[ConsumeQueue]:
        return iter(tuple(self._queues.values()))

    def queues_of(self, topic: str) -> list[ConsumeQueue]:
        """All queues of a topic by queue id."""
        found = [queue for (name, _), queue in self._queues.items() if name == topic]
        return sorted(found, key=lambda queue: queue.queue_id)

    def topics(self) -> set[str]:
        return {topic for topic, _ in self._queues}

    def __len__(self) -> int:
        return len(self._queues)

    # -- against the log

    @property
    def last_physical_end(self) -> int:
        """End (exclusive) in the log of the newest record that any queue holds; 0 if none."""
        return max((queue.last_physical_end for queue in self._queues.values()), default=0)

    def next_offsets(self) -> dict[tuple[str, int], int]:
        """max_offset of every queue: where a master goes on counting."""
        return {key: queue.max_offset for key, queue in self._queues.items()}

    def drop_rotten(self, phy_offset: int, *, expects_none: bool) -> bool:
        """Removes the queues whose units above `phy_offset` can only be damage, to be built anew by
        dispatching the log from its beginning. Whether there were any."""
        rotten = []
        for key, queue in self._queues.items():
            try:
                queue.check_cut(phy_offset, expects_none=expects_none)
            except CorruptLogError as error:
                log.error("consume_queue_damaged topic=%s queue_id=%d what=%s", *key, error)
                rotten.append(key)
        for key in rotten:
            self._queues.pop(key).destroy()
        return bool(rotten)

    def truncate_dirty(self, phy_offset: int) -> int:
        """Drop units of records at or above `phy_offset`, durably; how many queues had some."""
        return sum(queue.truncate_dirty(phy_offset) for queue in self._queues.values())

    def correct_min_offsets(self, log_min_offset: int) -> None:
        for queue in self._queues.values():
            queue.correct_min_offset(log_min_offset)

    def delete_expired(self, log_min_offset: int) -> int:
        """Remove files that hold only units below `log_min_offset`; how many."""
        return sum(queue.delete_expired(log_min_offset) for queue in self._queues.values())

    # -- flush and life

    def write_back(self) -> list[Path]:
        """Bring all tails into the page cache; the paths that `sync_file` then makes durable.

        Call it on the owner's thread, and `sync_file` for each path on any thread.
        """
        paths: list[Path] = []
        for queue in self._queues.values():
            paths += queue.write_back()
        return paths

    def flush(self) -> None:
        """Everything appended so far is durable on return."""
        for path in self.write_back():
            sync_file(path)

    def delete_topic(self, topic: str) -> int:
        """Remove all queues of a topic from table and disk; how many there were."""
        keys = [key for key in self._queues if key[0] == topic]
        for key in keys:
            self._queues.pop(key).destroy()
        folder = self._root / topic
        if folder.is_dir():
            shutil.rmtree(folder, ignore_errors=True)
            sync_directory(self._root)
        return len(keys)

    def destroy_all(self) -> None:
        """Remove every queue (an empty log has none)."""
        for topic in self.topics():
            self.delete_topic(topic)

    def close(self) -> None:
        """Write back and close descriptors. Call `flush` before for durability."""
        for queue in self._queues.values():
            queue.close()
        self._handles.close()
