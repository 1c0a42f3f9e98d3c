"""Delivering what is due: when it is looked at, and how a waiting message gets into the log again.

A subclass knows what is due and when to look next. Here is what both have in common: nothing is
delivered while this master takes no writes, within a planned switch, or while the replicas are far
behind; a turn of the loop has one slice; between two looks nothing runs. The wall clock may jump,
so no pause is longer than LOOK_AGAIN_MS.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from batonmq.broker.schedule.progress import ProgressRecord
from batonmq.broker.tables.topics import TopicService
from batonmq.broker.write.write_path import WritePath
from batonmq.process.clock import wall_ms
from batonmq.protocol.errors import CorruptLogError
from batonmq.protocol.properties import find_property
from batonmq.protocol.record import NewMessage
from batonmq.protocol.topic_name import PROGRESS_TOPIC, TRANS_HALF_TOPIC
from batonmq.store.errors import PutRefused

log = logging.getLogger(__name__)

SLICE: Final = 64
"""How many messages are delivered in one turn of the loop."""
UNCONFIRMED_BYTES_MAX: Final = 16 << 20
LOOK_AGAIN_MS: Final = 1000
BLOCKED_MS: Final = 10
"""Until it is tried again while this master takes no writes, or replicas lag."""
REFUSED_MS: Final = 100
DAMAGED_MS: Final = 10_000


class Delivery:
    """Puts a waiting message into its own topic."""

    def __init__(self, path: WritePath, topics: TopicService) -> None:
        self._path = path
        self._store = path.store
        self._topics = topics

    def deliver(self, message: NewMessage) -> bool:
        """False if it has to wait. Messages of a topic that was deleted are deleted, too (R39).
        Raises PutRefused."""
        topic = (find_property(message.properties, b"REAL_TOPIC") or b"").decode("utf-8", "replace")
        queue_id = find_property(message.properties, b"REAL_QID") or b""
        if topic in self._store.deleting_topics:
            return False
        if topic == TRANS_HALF_TOPIC or not queue_id.isdigit() or self._topics.get(topic) is None:
            log.warning("waiting_message_dropped topic=%s queue_id=%r", topic, queue_id)
            return True
        message.topic, message.queue_id = topic, int(queue_id)
        result = self._store.appender.put_message(message)
        self._path.stats.put(topic, 1, result.size)
        self._path.schedule_flush()
        return True


class DueService:
    """On the broker's loop. `damaged` is called with the fault of a bad record."""

    def __init__(self, path: WritePath, damaged: Callable[[str], None]) -> None:
        self._path = path
        self._store = path.store
        self._damaged = damaged
        self._timer: asyncio.Handle | None = None
        self._is_running = False

    def begin(self) -> None:
        """This broker has become master."""
        self._is_running = True
        self._wake_in(0)

    def end(self) -> None:
        """It is not master any more: a slave delivers nothing."""
        self._is_running = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def now_ms(self) -> int:
        """The wall clock that due times are of."""
        return wall_ms()

    def _slice(self, now_ms: int) -> int:
        """Does some of what is due; the least pause in ms before the next slice. Raises
        CorruptLogError."""
        raise NotImplementedError

    def _note(self, progress: ProgressRecord) -> None:
        """Says how far this is, behind what was put in the same turn. Where nothing is taken
        nothing was put, and the next record says it."""
        try:
            self._path.put_system_record(PROGRESS_TOPIC, progress.encode())
        except PutRefused as error:
            log.info("progress_waits reason=%s", error)

    @property
    def _look_ms(self) -> int:
        """When to look next, wall clock ms."""
        raise NotImplementedError

    def _wake_in(self, delay_ms: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(delay_ms / 1000, self._wake)

    def _wake(self) -> None:
        self._timer = None
        if not self._is_running:
            return
        path, store = self._path, self._store
        behind = store.max_phy_offset - store.confirm_offset
        if path.gate.refusal is not None or path.hold.active or behind > UNCONFIRMED_BYTES_MAX:
            self._wake_in(BLOCKED_MS)
            return
        try:
            pause_ms = self._slice(wall_ms())
        except CorruptLogError as error:
            log.error("waiting_message_damaged reason=%s", error)
            self._damaged(str(error))
            pause_ms = DAMAGED_MS
        if self._timer is None:
            due_in_ms = self._look_ms - wall_ms()
            self._wake_in(max(pause_ms, min(due_in_ms, LOOK_AGAIN_MS)))
