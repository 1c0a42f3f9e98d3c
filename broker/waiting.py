"""What waits in the log until the master acts on it: delays, timers, transactions, POP.

All begin and end with the mastership, get the arrivals of their topics, and learn from the log how
far the group is. Their services and cores decide what is due.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from batonmq.broker.config import BrokerSections
from batonmq.broker.consume.consumer_manager import ConsumerManager
from batonmq.broker.pop.pop_service import PopService
from batonmq.broker.schedule.delivery import Delivery, ScheduleMessageService, TimerService
from batonmq.broker.schedule.due_queues import DeliveryProgress
from batonmq.broker.schedule.recall_processor import RecallProcessor
from batonmq.broker.tables.slave_sync import BrokerTables
from batonmq.broker.tables.topics import TopicService
from batonmq.broker.transaction.producer_check import ProducerCheck
from batonmq.broker.transaction.transaction_service import TransactionService
from batonmq.broker.write.write_path import WritePath
from batonmq.protocol.codes import RequestCode
from batonmq.protocol.errors import RemoteProtocolError
from batonmq.protocol.records.codec import RecordHead
from batonmq.protocol.topic_name import (
    SCHEDULE_TOPIC,
    TIMER_TOPIC,
    TRANS_HALF_TOPIC,
    TRANS_OP_HALF_TOPIC,
)
from batonmq.remoting.connection import Processors

log = logging.getLogger(__name__)


class WaitingMessages:
    """One for a broker. `damaged` is called with the fault of a bad record."""

    def __init__(
        self,
        config: BrokerSections,
        path: WritePath,
        tables: BrokerTables,
        topics: TopicService,
        clients: ConsumerManager,
        damaged: Callable[[str], None],
    ) -> None:
        broker = config.broker
        self._store = path.store
        self.progress = DeliveryProgress(tables.delays)
        delivery, levels = Delivery(path, topics), config.store.delay_levels
        self.schedule = ScheduleMessageService(path, delivery, self.progress, levels, damaged)
        self.timers = TimerService(path, delivery, self.progress, levels, damaged)
        self._recall = RecallProcessor(config, path, topics)
        self.producers = ProducerCheck(clients, broker.broker_name, broker.store_host)
        self.transactions = TransactionService(
            config, path, topics, tables.offsets, self.producers, damaged
        )
        self._listeners: dict[str, Callable[[int], None]] = {
            SCHEDULE_TOPIC: self.schedule.arrived,
            TIMER_TOPIC: self.timers.arrived,
            TRANS_HALF_TOPIC: self.transactions.arrived,
            TRANS_OP_HALF_TOPIC: self.transactions.arrived,
        }
        self.pop = PopService(path, topics, tables.offsets, broker, damaged)

    def register(self, processors: Processors) -> None:
        self.transactions.register(processors)
        self._recall.register(processors)
        processors.register(RequestCode.GET_TIMER_METRICS, self.timers.metrics)

    def runtime_info(self) -> dict[str, str]:
        """For 28, under Java's names: of each delay level the next offset to deliver and the end of
        its queue, how many timed messages wait, and how many of those are not read yet."""
        ends = self._store.queries.max_offset_in_queue
        delays = {
            f"scheduleMessageOffset_{level}": f"{offset},{ends(SCHEDULE_TOPIC, level - 1)}"
            for level, offset in sorted(self.progress.delays.items())
        }
        waiting, unread = self.timers.backlog()
        return delays | {"timerOffsetBehind": str(unread), "timerCongestNum": str(waiting)}

    def begin(self) -> None:
        """This broker takes writes as the master from now on. It may have been master before, in an
        earlier epoch, without standing down in between (R55): each `begin` starts with `end`."""
        self.schedule.begin()
        self.timers.begin()
        self.transactions.begin()
        self.pop.begin()

    def end(self) -> None:
        """It takes none any more. What was not confirmed may be cut: the log decides."""
        self.schedule.end()
        self.timers.end()
        self.transactions.end()
        self.pop.end()
        self.progress.role_left()

    def arrived(self, topic: str, queue_id: int, _max_offset: int) -> None:
        """Listens to arrivals of the store."""
        listener = self._listeners.get(topic)
        if listener is not None:
            listener(queue_id)

    def progress_record(self, head: RecordHead, body: bytes) -> None:
        """A record of PROGRESS_TOPIC, in its place in the log. One that cannot be read is left out:
        the messages behind it matter more."""
        end = head.physical_offset + head.size
        try:
            if self._store.shows_unconfirmed:
                self.progress.take_over(body, end)
            else:
                self.progress.confirmed(body, end)
        except RemoteProtocolError as exc:
            log.error("progress_record_skipped reason=%s", exc)
