"""The queues of a store: for each (topic, queue id) its consume queue and its next offset.

`next_offset` covers the whole log, the consume queue only the confirmed part of it; the two meet
when everything is confirmed. Queues of system-record topics have a handler in the place of a
consume queue. Origin: Java `QueueOffsetOperator`, beside `ConsumeQueueStore`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from protocol.record import RecordHead
from store.consume_queue import ConsumeQueue
from store.consume_queue_store import ConsumeQueueStore

SCHEDULE_TOPIC: Final = "SCHEDULE_TOPIC_XXXX"

SystemRecordHandler = Callable[[RecordHead, bytes], None]


class Queue:
    """One (topic, queue id). `next_offset` is the offset of the next message put there."""

    __slots__ = (
        "consume_queue",
        "handler",
        "is_gapless",
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
        #: Whether each message is put at the offset behind the one before (not after a deletion).
        self.is_gapless = True

    @property
    def is_plain(self) -> bool:
        """Whether its records just go to the consume queue, with the hash of TAGS."""
        return self.handler is None and self.topic != SCHEDULE_TOPIC


class QueueTable:
    """All queues, those with messages above the confirmed end only included."""

    def __init__(self, consume_queues: ConsumeQueueStore) -> None:
        self.consume_queues = consume_queues
        self.queues: dict[tuple[str, int], Queue] = {}
        self._by_bytes: dict[tuple[bytes, int], Queue] = {}
        self.on_system_record: dict[str, SystemRecordHandler] = {}
        self.on_unknown_topic: Callable[[str, int], None] | None = None

    def adopt_loaded(self) -> None:
        """Take over what the consume queue store found on disk."""
        for consume_queue in self.consume_queues.queues():
            self.find_or_create(consume_queue.topic, consume_queue.queue_id)

    def of_bytes(self, topic: bytes, queue_id: int) -> Queue:
        """The queue that a record of the log belongs to; announced when it is first met.

        A queue found on disk is announced, too: its topic may not have been stored yet when the
        process before this one was killed.
        """
        queue = self._by_bytes.get((topic, queue_id))
        if queue is None:
            name = topic.decode("utf-8", "replace")
            queue = self._by_bytes[topic, queue_id] = self.find_or_create(name, queue_id)
            if self.on_unknown_topic is not None and queue.handler is None:
                self.on_unknown_topic(name, queue_id)
        return queue

    def get(self, topic: str, queue_id: int) -> Queue | None:
        return self.queues.get((topic, queue_id))

    def find_or_create(self, topic: str, queue_id: int) -> Queue:
        """The queue; a new one leaves nothing on disk before its first unit."""
        queue = self.queues.get((topic, queue_id))
        if queue is None:
            consume_queue = self.consume_queues.find_or_create(topic, queue_id)
            queue = self.queues[topic, queue_id] = Queue(topic, queue_id, consume_queue)
            queue.handler = self.on_system_record.get(topic)
        return queue

    def reset_next_offsets(self) -> None:
        """Let every queue go on behind its last unit; what lies above is then added by hand."""
        for queue in self.queues.values():
            queue.next_offset = queue.consume_queue.max_offset

    def delete_topic(self, topic: str) -> int:
        """Remove all queues of a topic, durably; how many there were."""
        gone = [key for key in self.queues if key[0] == topic]
        for key in gone:
            queue = self.queues.pop(key)
            self._by_bytes.pop((queue.topic_bytes, queue.queue_id), None)
        self.consume_queues.delete_topic(topic)
        return len(gone)

    def destroy_all(self) -> None:
        """Forget every queue (an empty log has none)."""
        self.queues.clear()
        self._by_bytes.clear()
        self.consume_queues.destroy_all()
