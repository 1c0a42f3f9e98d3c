"""The broker process, put together: store, HA, role, processors, door, and what runs beside them.

Start: the store is opened and recovered; everything listens; then the ReplicasManager registers and
the broker waits, fenced, for a role. Outside controller mode it is a master at once. Stop: writes
are refused, Goodbye is said, then everything is closed from the outside in.
Origin: BrokerController and BrokerStartup in Java.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass

from broker.admin_processor import AdminProcessor
from broker.client_processor import ClientProcessor
from broker.config import BrokerConfig, ReplicasConfig
from broker.consumer_manager import ConsumerManager
from broker.metadata_log import METADATA_TOPIC
from broker.name_server_registrar import NameServerRegistrar
from broker.offset_processor import OffsetProcessor
from broker.pending_acks import PendingAcks
from broker.pull_processor import PullProcessor
from broker.query_processor import QueryProcessor
from broker.replication import Replication
from broker.role_gate import RoleGate
from broker.runtime_info import RuntimeInfo, Throughput
from broker.send_processor import SendProcessor
from broker.slave_source_processor import SlaveSourceProcessor
from broker.slave_sync import NO_MASTER_EPOCH, SlaveSynchronize
from broker.topics import TopicService
from broker.turn import SendTurn
from ha.config import HAConfig
from protocol.codes import RequestCode
from protocol.message_id import host_bytes
from protocol.record import RecordHead, scan_record
from remoting.client import RemotingClient
from remoting.command import RemotingCommand
from remoting.connection import Connection, boottime_ms
from remoting.processors import Processors
from remoting.server import RemotingServer
from store.config import StoreConfig
from store.consumer_offset import ConsumerOffsetManager
from store.index_service import IndexService
from store.message_store import MessageStore
from store.subscription_group import SubscriptionGroupManager
from store.topic_config import TopicConfigManager

log = logging.getLogger(__name__)

TICK_S = 0.1
WARM_UP_AFTER_S = 1.0
SECOND_MS = 1000
CLIENT_SCAN_MS = 10_000


@dataclass(frozen=True, slots=True)
class BrokerSections:
    """The sections of a broker's configuration file."""

    broker: BrokerConfig
    store: StoreConfig
    ha: HAConfig
    replicas: ReplicasConfig


class BrokerService:
    """One broker. `start` once, `close` once, both on the loop that serves it.

    `on_fatal` is called when the process must end: its disk failed, or its log cannot be trusted.
    """

    def __init__(self, config: BrokerSections, on_fatal: Callable[[BaseException], None]) -> None:
        broker = config.broker
        self.config = config
        self._on_fatal = on_fatal
        self._stops_for = "planned stop"
        self._loop = asyncio.get_running_loop()
        store_host = host_bytes(broker.broker_ip1, broker.listen_port)
        self.store = MessageStore(
            config.store, store_host=store_host, controller_mode=broker.enable_controller_mode
        )
        folder = config.store.root / "config"
        self.topic_table = TopicConfigManager(
            folder / "topics.json",
            cluster_name=broker.broker_cluster_name,
            broker_name=broker.broker_name,
            auto_create_topic=broker.auto_create_topic_enable,
            default_queue_nums=broker.default_topic_queue_nums,
        )
        self.group_table = SubscriptionGroupManager(folder / "subscriptionGroup.json")
        self.offset_table = ConsumerOffsetManager(folder / "consumerOffset.json")
        self.gate = RoleGate()
        self.acks = PendingAcks(config.store.slave_timeout)
        self.topics = TopicService(
            self.topic_table,
            self.group_table,
            auto_create_topic=broker.auto_create_topic_enable,
            auto_create_group=broker.auto_create_subscription_group,
            append=self._append_metadata,
            changed=self._tables_changed,
            dropped=self._topic_dropped,
        )
        self.turn = SendTurn(self._loop, self._end_turn)
        self._client = RemotingClient(name="broker-out")
        self.slave_sync = SlaveSynchronize(
            self._client,
            self.topic_table,
            self.group_table,
            self.offset_table,
            broker.slave_sync_interval,
            self._tables_changed,
        )
        self.replication = Replication(
            config,
            self.store,
            self.gate,
            self.acks,
            self.topic_table,
            self.offset_table,
            self.slave_sync,
            self._client,
            clock_ms=boottime_ms,
            routes_changed=self._routes_changed,
            role_left=self._role_left,
            on_fatal=self._fatal,
        )
        self.registrar = NameServerRegistrar(
            self._client,
            broker.name_servers,
            broker.register_name_server_period,
            self.replication.registration,
        )
        self._build_processors(store_host)
        self._server = RemotingServer(self.processors, name="broker")
        self._server.on_disconnect = self._disconnected
        self._tasks: list[asyncio.Task[None]] = []
        self.address = broker.address

    def _build_processors(self, store_host: bytes) -> None:
        config, broker = self.config, self.config.broker
        clients = ConsumerManager()
        self.send = SendProcessor(
            self.store,
            self.topics,
            self.gate,
            self.acks,
            self.turn,
            cluster_name=broker.broker_cluster_name,
            region_id=broker.region_id,
            store_host=store_host,
            min_in_sync_replicas=config.store.min_in_sync_replicas,
            in_sync_count=self.replication.in_sync_count,
            clock_ms=boottime_ms,
            hold=self.replication.hold,
        )
        self.pull = PullProcessor(
            self.store,
            self.topics,
            clients,
            self.offset_table,
            self.gate,
            boottime_ms,
            long_polling=broker.long_polling_enable,
            damaged=self.replication.on_damage,
        )
        self.clients = ClientProcessor(clients, self.topics, self.gate, boottime_ms)
        self.throughput = Throughput()
        runtime = RuntimeInfo(
            self.throughput, self._store_info, self.replication.runtime_info, self._totals
        )
        admin = AdminProcessor(
            self.topics,
            self.gate,
            self.acks,
            boottime_ms,
            runtime_info=runtime.table,
            ha_status=self.replication.ha_status,
            epoch_cache=self.replication.epoch_cache,
            repair=self.store.repair,
        )
        self.processors = Processors()
        for processor in (
            self.send,
            self.pull,
            self.clients,
            admin,
            OffsetProcessor(self.store, self.offset_table, self.gate),
            QueryProcessor(self.store),
            SlaveSourceProcessor(
                self.topic_table,
                self.group_table,
                self.offset_table,
                lambda: self.gate.master_epoch if self.gate.is_master else NO_MASTER_EPOCH,
            ),
        ):
            processor.register(self.processors)
        self.processors.register(RequestCode.NOTIFY_BROKER_ROLE_CHANGED, self._role_notice)

    async def start(self) -> None:
        """Opens, listens, registers. Raises BatonError or OSError that says what is in the way."""
        broker = self.config.broker
        self.store.on_system_record[METADATA_TOPIC] = self._metadata_record
        self.store.on_unknown_topic = self._unknown_topic
        self.store.before_checkpoint = self._persist_what_the_log_shows
        # Before the store: its recovery shows records again that may be newer than these files.
        for table in (self.topic_table, self.group_table, self.offset_table):
            table.load()
        self.store.open()
        try:
            self.store.start(self._loop, self._fatal)
            self.store.on_arrival(self.pull.arrived)
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
        """Refuses writes, says good-bye, closes everything. Idempotent."""
        self.gate.close("this broker is stopping: ask the name server for the master")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        await self.replication.close(self._stops_for)
        await self.registrar.close()
        await self.slave_sync.close()
        await self._server.close()
        await self._client.close()
        self._persist_tables()
        self.store.close()

    # --- the end of a turn, and what follows confirmation ---

    def _end_turn(self) -> None:
        self.replication.written(self.store.end_turn())

    def _append_metadata(self, body: bytes) -> int:
        if self.gate.refusal is not None:
            return self.store.max_phy_offset
        result = self.store.put_message(
            METADATA_TOPIC,
            0,
            body,
            b"",
            0,
            None,
            None,
            born_timestamp=0,
            born_host=b"\0" * 8,
        )
        self.turn.touched()
        return result.end_offset

    # --- hooks of the store ---

    def _metadata_record(self, head: RecordHead, body: bytes) -> None:
        if self.store.shows_unconfirmed:
            self.topics.take_over_record(body)
        elif self.gate.is_master:
            self.topics.own_record_confirmed(body)
        else:
            self.topics.apply_record(body)

    def _topic_dropped(self, topic: str) -> None:
        self.store.delete_topic(topic)

    def _unknown_topic(self, topic: str, queue_id: int) -> None:
        self.topics.seen_in_log(topic, queue_id)

    # --- hooks of the other parts ---

    def _tables_changed(self) -> None:
        self.send.topics_changed()
        self._routes_changed()

    def _routes_changed(self) -> None:
        self.registrar.changed()

    def _role_left(self) -> None:
        self.pull.role_changed()
        self.topics.role_left()

    def _disconnected(self, connection: Connection) -> None:
        self.pull.disconnected(connection)
        self.clients.disconnected(connection)

    def _role_notice(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        self.replication.role_notice(request)
        return RemotingCommand.response_to(request)

    def _fatal(self, exc: BaseException) -> None:
        log.critical("broker_fatal error=%s", exc)
        self.gate.close(f"this broker cannot trust its disk: {exc}")
        self._stops_for = f"it cannot trust its disk: {exc}"
        self._on_fatal(exc)

    def _store_info(self) -> dict[str, str]:
        first = self.store.look_message_by_offset(self.store.min_phy_offset)
        head = scan_record(first) if first is not None else None
        earliest = head.store_timestamp if head is not None else -1
        return self.store.runtime_info() | {"earliestMessageTimeStamp": str(earliest)}

    def _totals(self) -> tuple[int, int]:
        return self.send.stored_total, self.pull.messages_total

    # --- what time brings ---

    async def _warm_up(self) -> None:
        """Loads what the first busy turn would otherwise stop for (numpy: 100 ms).

        Meanwhile threads take turns ten times as often: the loop must not wait 5 ms for each of
        its own while a failover is under way.
        """
        await asyncio.sleep(WARM_UP_AFTER_S)
        interval_s = sys.getswitchinterval()
        sys.setswitchinterval(interval_s / 10)
        try:
            await asyncio.to_thread(IndexService.preload)
        finally:
            sys.setswitchinterval(interval_s)

    async def _tick_forever(self) -> None:
        next_second = next_scan = next_persist = boottime_ms()
        while True:
            await asyncio.sleep(TICK_S)
            now_ms = boottime_ms()
            self.replication.tick(now_ms)
            self.pull.tick(now_ms)
            if now_ms >= next_second:
                next_second = now_ms + SECOND_MS
                self.throughput.tick(now_ms, *self._totals())
            if now_ms >= next_scan:
                next_scan = now_ms + CLIENT_SCAN_MS
                self.clients.expire(now_ms)
            if now_ms >= next_persist:
                next_persist = now_ms + self.config.broker.flush_consumer_offset_interval
                self._persist_tables()

    def _persist_what_the_log_shows(self) -> list[Callable[[], None]]:
        """Topics and groups: below a checkpoint the log does not show them again (R31)."""
        return [*self.topic_table.writes_due(), *self.group_table.writes_due()]

    def _persist_tables(self) -> None:
        for table in (self.topic_table, self.group_table, self.offset_table):
            for job in table.writes_due():
                self.store.run_job(job)
