"""The features that live in the log: delays, timers, transactions, POP (`write.log_features`).

They begin and end with the mastership, and are notified of messages in their topics.
"""

from batonmq.auth.guard import Guard
from batonmq.broker.config import BrokerSections
from batonmq.broker.consume.consumer_manager import ConsumerManager
from batonmq.broker.pop.pop_service import PopService
from batonmq.broker.schedule.delivery import Delivery, ScheduleMessageService, TimerService
from batonmq.broker.schedule.delivery_progress import DeliveryProgress
from batonmq.broker.schedule.recall_processor import RecallProcessor
from batonmq.broker.tables.broker_tables import BrokerTables
from batonmq.broker.tables.topics import TopicService
from batonmq.broker.transaction.producer_check import ProducerCheck
from batonmq.broker.transaction.transaction_service import TransactionService
from batonmq.broker.write.log_features import LogFeature
from batonmq.broker.write.write_path import WritePath
from batonmq.protocol.codes import RequestCode
from batonmq.protocol.topic_name import SCHEDULE_TOPIC
from batonmq.remoting.connection import Processors


class LogFeatures:
    def __init__(
        self,
        config: BrokerSections,
        path: WritePath,
        tables: BrokerTables,
        topics: TopicService,
        clients: ConsumerManager,
    ) -> None:
        broker = config.broker
        self._store = path.store
        self.progress = DeliveryProgress(tables.delays)
        delivery, levels = Delivery(path, topics), config.store.delay_levels
        self.schedule = ScheduleMessageService(path, delivery, self.progress, levels)
        self.timers = TimerService(path, delivery, self.progress, levels)
        self._recall = RecallProcessor(config, path, topics)
        self.producers = ProducerCheck(clients, broker.broker_name, broker.store_host)
        self.transactions = TransactionService(config, path, topics, tables.offsets, self.producers)
        self.pop = PopService(path, topics, tables.offsets, broker)
        self.features: tuple[LogFeature, ...] = (
            self.schedule, self.timers, self.transactions, self.pop,
        )  # fmt: skip
        self._by_topic = {topic: one for one in self.features for topic in one.TOPICS}

    def guarded_by(self, guard: Guard | None) -> None:
        """Who may end a transaction, and be asked for its state; None: everyone."""
        if guard is not None:
            self.transactions.require = guard.require_also
            self.producers.may = guard.may_publish

    def register(self, processors: Processors) -> None:
        self.transactions.register(processors)
        self._recall.register(processors)
        processors.register(RequestCode.GET_TIMER_METRICS, self.timers.metrics)

    def runtime_info(self) -> dict[str, str]:
        """Part of the status, under Java's names: for each delay level the next offset to deliver
        and the end of its queue; the numbers of timers that wait, and of those not read yet."""
        ends = self._store.queries.max_offset_in_queue
        delays = {
            f"scheduleMessageOffset_{level}": f"{offset},{ends(SCHEDULE_TOPIC, level - 1)}"
            for level, offset in sorted(self.progress.delays.items())
        }
        waiting, unread = self.timers.backlog()
        return delays | {"timerOffsetBehind": str(unread), "timerCongestNum": str(waiting)}

    def begin(self) -> None:
        """This broker becomes master and takes writes from now on."""
        for feature in self.features:
            feature.begin()

    def end(self) -> None:
        """It stops taking writes. Unconfirmed records may be cut: the log decides."""
        for feature in self.features:
            feature.end()
        self.progress.role_left()

    def arrived(self, topic: str, queue_id: int, _max_offset: int) -> None:
        feature = self._by_topic.get(topic)
        if feature is not None:
            feature.arrived(queue_id)
