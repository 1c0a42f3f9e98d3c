"""Delivers delayed messages when they are due. Only a master does.

The shell around `delay_queues`: it reads units when that asks for them, puts what is due into the
log again, and behind it the progress record (`broker.schedule.progress`), in one turn.
Origin: org.apache.rocketmq.broker.schedule.ScheduleMessageService.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from batonmq.broker.schedule import delivery
from batonmq.broker.schedule.delay_queues import DelayQueues, Look
from batonmq.broker.schedule.delivery import REFUSED_MS, Delivery, DueService
from batonmq.broker.schedule.progress import DeliveryProgress, ProgressRecord
from batonmq.broker.tables.offset_clamp import queue_end
from batonmq.broker.write.write_path import WritePath
from batonmq.protocol.record import message_to_store
from batonmq.protocol.topic_name import SCHEDULE_TOPIC
from batonmq.store.delay_levels import DelayLevels
from batonmq.store.errors import PutRefused

log = logging.getLogger(__name__)


class ScheduleMessageService(DueService):
    """One for a broker, on its loop."""

    def __init__(
        self,
        path: WritePath,
        deliverer: Delivery,
        progress: DeliveryProgress,
        levels: DelayLevels,
        damaged: Callable[[str], None],
    ) -> None:
        super().__init__(path, damaged)
        self._deliverer = deliverer
        self._progress = progress
        self._levels = levels
        self._queues = DelayQueues(lambda queue_id: levels.delay_ms(queue_id + 1))

    def begin(self) -> None:
        """This broker has become master: it goes on where its log says."""
        table, queries = self._progress.delays, self._store.queries
        offsets = {}
        for queue_id in range(max(len(self._levels), *table, 0)):
            least = queries.min_offset_in_queue(SCHEDULE_TOPIC, queue_id)
            most = queue_end(self._store, SCHEDULE_TOPIC, queue_id)
            offsets[queue_id] = min(max(table.get(queue_id + 1, 0), least), most)
        self._queues.begin(offsets)
        super().begin()

    def end(self) -> None:
        super().end()
        self._queues.end()

    def arrived(self, queue_id: int) -> None:
        """There is more in a queue of SCHEDULE_TOPIC."""
        if self._queues.arrived(queue_id):
            self._wake_in(0)

    @property
    def _look_ms(self) -> int:
        return self._queues.wake_ms

    def _slice(self, now_ms: int) -> int:
        moved: dict[int, int] = {}
        left, pause_ms = delivery.SLICE, 0
        try:
            while left > 0 and not pause_ms:
                look = self._queues.next_look(now_ms)
                if look is None:
                    break
                count, pause_ms = self._deliver_from(look, left, now_ms)
                left -= count
                if count:
                    moved[look.queue_id + 1] = self._queues.offset_of(look.queue_id)
        finally:
            if moved:
                self._note(ProgressRecord(delays=moved))
        return pause_ms

    def _deliver_from(self, look: Look, left: int, now_ms: int) -> tuple[int, int]:
        """How many messages of a queue were delivered, and the least pause in ms after them."""
        queries = self._store.queries
        least = queries.min_offset_in_queue(SCHEDULE_TOPIC, look.queue_id)
        if look.offset < least:
            self._queues.skip_to(look.queue_id, least)
            return 0, 0
        units = queries.units(SCHEDULE_TOPIC, look.queue_id, look.offset, left)
        due = self._queues.due_of(look.queue_id, [unit[2] for unit in units], now_ms)
        count = 0
        try:
            for phy_offset, size, _ in units[:due]:
                record = queries.record_at(phy_offset, size)
                if record is not None and not self._deliverer.deliver(message_to_store(record)):
                    return count, REFUSED_MS
                count += 1
        except PutRefused as error:
            log.warning("delayed_message_waits queue_id=%d reason=%s", look.queue_id, error)
            return count, REFUSED_MS
        finally:
            if count:
                self._queues.delivered(look.queue_id, count)
        return count, 0
