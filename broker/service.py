"""The broker process: store, write path, replication, processors, endpoint, and its timers.

Start: the store is opened and recovered; everything listens; then the ReplicasManager registers and
the broker waits, fenced, for a role. Outside controller mode it is a master at once. Stop: writes
are refused, the controllers get a Goodbye, then everything is closed from the outside in.
Origin: BrokerController and BrokerStartup in Java.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable

from batonmq.broker.admin_processor import AdminProcessor
from batonmq.broker.client_processor import ClientProcessor
from batonmq.broker.config import BrokerSections
from batonmq.broker.consumer_manager import ConsumerManager
from batonmq.broker.name_server_registrar import NameServerRegistrar
from batonmq.broker.pull_processor import PullProcessor
from batonmq.broker.query_processor import OffsetProcessor, QueryProcessor
from batonmq.broker.relay import Relay
from batonmq.broker.replication import Replication
from batonmq.broker.send_processor import SendProcessor
from batonmq.broker.slave_sync import BrokerTables, SlaveSourceProcessor, SlaveSynchronize
from batonmq.broker.status import BrokerStatus
from batonmq.broker.topics import TopicService
from batonmq.broker.write_path import WritePath
from batonmq.process.clock import boot_ms
from batonmq.protocol.codes import RequestCode
from batonmq.protocol.record import RecordHead
from batonmq.protocol.topic_name import METADATA_TOPIC
from batonmq.remoting.command import RemotingCommand
from batonmq.remoting.connection import Connection, Processors
from batonmq.remoting.endpoint import RemotingClient, RemotingServer
from batonmq.store.consumer_offset import ConsumerOffsetManager
from batonmq.store.index_service import IndexService
from batonmq.store.message_store import MessageStore
from batonmq.store.subscription_group import SubscriptionGroupManager
from batonmq.store.topic_config import TopicConfigManager

log = logging.getLogger(__name__)

TICK_S = 0.1
WARM_UP_AFTER_S = 1.0
SECOND_MS = 1000
CLIENT_SCAN_MS = 10_000


class BrokerService:
    """One broker. `start` once, `close` once, both on the loop that serves it.

    `on_fatal` is called when the process must end: its disk failed, or its log cannot be trusted.
    """

    def __init__(self, config: BrokerSections, on_fatal: Callable[[BaseException], None]) -> None:
        broker = config.broker
        self.config = config
        self.address = broker.address
        self._on_fatal = on_fatal
        self._stop_reason = "planned stop"
        self._tasks: list[asyncio.Task[None]] = []
        self.store = MessageStore(
            config.store,
            store_host=broker.store_host,
            controller_mode=broker.enable_controller_mode,
        )
        self.path = WritePath(
            self.store,
            ack_wait_ms=config.store.slave_timeout,
            sync_flush=config.store.sync_flush,
            clock_ms=boot_ms,
        )
        self.tables = _tables(config)
        self.topics = TopicService(
            self.tables,
            self.store.deleting_topics,
            auto_create_topic=broker.auto_create_topic_enable,
            auto_create_group=broker.auto_create_subscription_group,
            append=lambda body: self.path.put_system_record(METADATA_TOPIC, body),
            changed=self._tables_changed,
            dropped=self.store.delete_topic,
        )
        self._client = RemotingClient(name="broker-out")
        self.slave_sync = SlaveSynchronize(
            self._client, self.tables, broker.slave_sync_interval, self._tables_changed
        )
        self.replication = Replication(
            config, self.path, self.tables, self.slave_sync, self._client, self
        )
        self.relay = Relay(self.path.gate, boot_ms, enabled=config.relays)
        self.status = BrokerStatus(
            config, self.path, self.tables, self.replication, self._totals, self.relay
        )
        self.registrar = NameServerRegistrar(
            self._client,
            broker.name_servers,
            broker.register_name_server_period,
            self.status.registration,
        )
        self._server = RemotingServer(self._build_processors(), name="broker")
        self._server.on_disconnect = self._disconnected

    def _build_processors(self) -> Processors:
        """Which processor answers which request codes is in `batonmq.broker`."""
        path, topics, offsets = self.path, self.topics, self.tables.offsets
        clients = ConsumerManager()
        self.send = SendProcessor(
            self.config, path, topics, self.replication.in_sync_count, self.relay
        )
        self.pull = PullProcessor(
            path,
            topics,
            clients,
            offsets,
            long_polling=self.config.broker.long_polling_enable,
            damaged=self.replication.on_damage,
            relay=self.relay,
        )
        self.clients = ClientProcessor(clients, topics, path)
        processors = Processors()
        for processor in (
            self.send,
            self.pull,
            self.clients,
            AdminProcessor(path, topics, self.status),
            OffsetProcessor(self.store, self.tables, path.gate),
            QueryProcessor(self.store),
            SlaveSourceProcessor(self.tables, path.gate, lambda: self.store.confirm_offset),
        ):
            processor.register(processors)
        processors.register(RequestCode.NOTIFY_BROKER_ROLE_CHANGED, self._role_notice)
        self.relay.stand_before(processors)
        return processors

    async def start(self) -> None:
        """Opens, listens, registers. Raises BatonError or OSError."""
        broker = self.config.broker
        self.store.on_system_record[METADATA_TOPIC] = self._metadata_record
        self.store.on_unknown_topic = self.topics.seen_in_log
        self.store.before_checkpoint = self.tables.shown_by_the_log
        self.store.on_new_beginning = self._new_beginning
        # Before the store: its recovery shows records again that may be newer than these files.
        self.tables.load()
        self.store.open()
        # Which of these records were deletions is not known any more: the last may be one.
        self.tables.offsets.deleted_end = self.store.confirm_offset
        try:
            self.store.start(asyncio.get_running_loop(), self.fatal)
            self.store.arrival_listeners.append(self.pull.arrived)
            if self.replication.ha is not None:
                self.store.room.on_room = self.replication.ha.dial_now
            await self._server.listen(broker.bind_host, broker.listen_port)
            await self._server.listen(broker.bind_host, broker.listen_port - 2)
            await self.replication.start()
        except BaseException:
            await self.close()
            raise
        self.registrar.start()
        self.slave_sync.start()
        self._tasks = [
            asyncio.create_task(self._tick_forever(), name="broker-tick"),
            asyncio.create_task(self._warm_up(), name="broker-warm-up"),
        ]
        log.info(
            "broker_started address=%s name=%s cluster=%s controller_mode=%s",
            broker.address,
            broker.broker_name,
            broker.broker_cluster_name,
            broker.enable_controller_mode,
        )

    async def close(self) -> None:
        """Refuses writes, sends Goodbye, closes everything. Idempotent."""
        self.path.gate.close("this broker is stopping: ask the name server for the master")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        await self.replication.close(self._stop_reason)
        await self.relay.close()
        await self.registrar.close()
        await self.slave_sync.close()
        await self._server.close()
        await self._client.close()
        if not self.store.health.has_failed:
            self._persist_tables()
        self.store.close()

    def _metadata_record(self, head: RecordHead, body: bytes) -> None:
        if self.store.shows_unconfirmed:
            self.topics.take_over_record(body)
        elif self.path.gate.is_master:
            self.topics.own_record_confirmed(body, head.physical_offset + head.size)
        else:
            self.topics.apply_record(body, head.physical_offset + head.size)

    def _new_beginning(self) -> None:
        self.tables.offsets.begin_anew()
        self.slave_sync.fetch_offsets_again()

    def _tables_changed(self) -> None:
        self.send.topics_changed()
        self.routes_changed()

    def routes_changed(self) -> None:
        self.registrar.changed()

    def role_left(self) -> None:
        self.pull.role_changed()
        self.topics.role_left()

    def _disconnected(self, connection: Connection) -> None:
        self.pull.disconnected(connection)
        self.clients.disconnected(connection)

    def _role_notice(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        self.replication.role_notice(request)
        return RemotingCommand.response_to(request)

    def fatal(self, exc: BaseException) -> None:
        log.critical("broker_fatal error=%s", exc)
        self.store.health.give_up(exc)
        self.path.gate.close(f"this broker cannot trust its disk: {exc}")
        self._stop_reason = f"it cannot trust its disk: {exc}"
        self._on_fatal(exc)

    def _totals(self) -> tuple[int, int]:
        return self.send.stored_total, self.pull.messages_total

    async def _warm_up(self) -> None:
        """Loads what the first busy turn would otherwise wait for (numpy: 100 ms).

        Meanwhile the interpreter switches threads ten times as often: the loop must not wait 5 ms
        at each switch while a failover is under way.
        """
        await asyncio.sleep(WARM_UP_AFTER_S)
        interval_s = sys.getswitchinterval()
        sys.setswitchinterval(interval_s / 10)
        try:
            await asyncio.to_thread(IndexService.preload)
        finally:
            sys.setswitchinterval(interval_s)

    async def _tick_forever(self) -> None:
        next_second = next_scan = next_persist = boot_ms()
        while True:
            await asyncio.sleep(TICK_S)
            now_ms = boot_ms()
            self.replication.tick(now_ms)
            self.path.tick(now_ms)
            self.pull.tick(now_ms)
            self.relay.tick(now_ms)
            if now_ms >= next_second:
                next_second = now_ms + SECOND_MS
                self.status.tick(now_ms)
            if now_ms >= next_scan:
                next_scan = now_ms + CLIENT_SCAN_MS
                self.clients.expire(now_ms)
            if now_ms >= next_persist:
                next_persist = now_ms + self.config.broker.flush_consumer_offset_interval
                self._persist_tables()

    def _persist_tables(self) -> None:
        if self.store.health.pauses:
            return  # they would pile up behind what waits for room
        for job in self.tables.writes_due():
            self.store.background.run_job(job)


def _tables(config: BrokerSections) -> BrokerTables:
    broker, folder = config.broker, config.store.root / "config"
    return BrokerTables(
        TopicConfigManager(
            folder / "topics.json",
            cluster_name=broker.broker_cluster_name,
            broker_name=broker.broker_name,
            auto_create_topic=broker.auto_create_topic_enable,
            default_queue_nums=broker.default_topic_queue_nums,
        ),
        SubscriptionGroupManager(folder / "subscriptionGroup.json"),
        ConsumerOffsetManager(folder / "consumerOffset.json"),
    )
