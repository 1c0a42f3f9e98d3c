"""The broker process: store, write path, replication, processors, endpoint, and its timers.

Start: the endpoint listens, the store is opened and recovered, the endpoint opens. In controller
mode the ReplicasManager then registers, and the broker waits, fenced, for a role; in classic mode
it takes the role of its configuration. Stop: a master hands over, writes are refused, the
controllers get a Goodbye, then everything is closed from the outside in. Origin: BrokerController
and BrokerStartup in Java.
"""

import asyncio
import logging
import sys
from collections.abc import Callable, Collection
from functools import partial

from msgspec import structs

from batonmq.auth.policy import UserWrapper
from batonmq.broker.admin_processor import AdminProcessor
from batonmq.broker.broker_endpoint import BrokerEndpoint
from batonmq.broker.config import BrokerConfig, BrokerSections
from batonmq.broker.consume.client_processor import ClientProcessor, ConsumerLists
from batonmq.broker.consume.connection_processor import ConnectionProcessor
from batonmq.broker.consume.consumer_manager import ConsumerManager, ConsumerSightings
from batonmq.broker.consume.group_admin import GroupAdminProcessor
from batonmq.broker.consume.lock_processor import LockProcessor
from batonmq.broker.consume.pull_processor import PullProcessor
from batonmq.broker.consume.pull_request import PullChecks
from batonmq.broker.consume.query_processor import OffsetProcessor, QueryProcessor
from batonmq.broker.features import LogFeatures
from batonmq.broker.filter import subscription_filter
from batonmq.broker.filter.consumer_filter import ConsumerFilterManager
from batonmq.broker.housekeeping import Housekeeping
from batonmq.broker.name_server_registrar import NameServerRegistrar, RegistrationByMembers
from batonmq.broker.pop.ack_processor import AckProcessor
from batonmq.broker.pop.assignment import AssignmentProcessor
from batonmq.broker.pop.pop_processor import PopProcessor
from batonmq.broker.replication.classic import ClassicReplication
from batonmq.broker.replication.controlled import ControllerReplication
from batonmq.broker.replication.replication import Replication
from batonmq.broker.send.reply_processor import ReplyProcessor
from batonmq.broker.send.send_back import SendBackProcessor
from batonmq.broker.send.send_processor import SendProcessor
from batonmq.broker.settings_processor import SettingsProcessor, broker_settings
from batonmq.broker.status import BrokerStatus, Totals
from batonmq.broker.tables.broker_tables import BrokerTables
from batonmq.broker.tables.consumer_offset import ConsumerOffsetManager
from batonmq.broker.tables.delay_offset import DelayOffsetManager
from batonmq.broker.tables.offset_clamp import OffsetClamp
from batonmq.broker.tables.queue_locks import QueueLockManager
from batonmq.broker.tables.slave_sync import SlaveSourceProcessor, SlaveSynchronize
from batonmq.broker.tables.subscription_group import (
    MessageRequestModeManager,
    SubscriptionGroupManager,
)
from batonmq.broker.tables.topic_config import TopicConfigManager, topic_config
from batonmq.broker.tables.topics import TopicService
from batonmq.broker.tables.users import UserService, UserTable
from batonmq.broker.user_processor import UserProcessor
from batonmq.broker.write.log_features import RecordKind, SystemRecords
from batonmq.broker.write.pending_acks import FlowControl
from batonmq.broker.write.put_hooks import PutHooks
from batonmq.broker.write.write_path import WritePath
from batonmq.protocol.bodies import PERM_INHERIT, PERM_READ, PERM_WRITE
from batonmq.protocol.pop import ANY_QUEUE
from batonmq.protocol.topic_name import (
    AUTO_CREATE_TOPIC,
    METADATA_TOPIC,
    PROGRESS_TOPIC,
    USERS_TOPIC,
)
from batonmq.remoting.connection import Connection, Processors
from batonmq.remoting.endpoint import RemotingClient
from batonmq.runtime.clock import boot_ms
from batonmq.runtime.turns import in_slices, to_the_end
from batonmq.store.errors import PutRefused
from batonmq.store.index_service import IndexService
from batonmq.store.message_store import MessageStore
from batonmq.store.recovery import ConfirmedByLog, ConfirmedBySet

log = logging.getLogger(__name__)

TICK_S = 0.25
WARM_UP_AFTER_S = 1.0
SECOND_MS = 1000
CLIENT_SCAN_MS = 10_000
OnFatal = Callable[[BaseException], None]
PLANNED_STOP = "planned stop"


class BrokerService:
    """One broker. Call `start` and `close` once, on the loop that serves it. `on_fatal` is called
    when the process must end: its disk failed, or its log is damaged. `endpoint` may listen
    already.
    """

    def __init__(
        self, config: BrokerSections, on_fatal: OnFatal, endpoint: BrokerEndpoint | None = None
    ) -> None:
        self.config, broker = config, config.broker
        self._settings = broker_settings(config)
        self._settings.on_change = self._settings_changed
        self._permission = self._settings.current.broker_permission
        self.endpoint = BrokerEndpoint(config) if endpoint is None else endpoint
        self.relay, self.address = self.endpoint.relay, broker.address
        self._on_fatal, self._stop_reason = on_fatal, PLANNED_STOP
        self._clients_due = asyncio.Event()
        self._lacks_first_user = False
        self._tasks: list[asyncio.Task[None]] = []
        self.store = _store(config)
        self.path = _write_path(config, self.store, self.endpoint)
        self.tables = _tables(config)
        self.topics = TopicService(
            self.tables,
            self.store.deleting_topics,
            settings=broker,
            append=lambda body: self.path.put_system_record(METADATA_TOPIC, body),
            changed=self._tables_changed,
            dropped=self.store.delete_topic,
            deleted=self._topic_deleted,
        )
        sign = self.endpoint.sign
        self._client = RemotingClient(name="broker-out", tls=config.tls, sign=sign)
        self.users = self._new_users()
        self.slave_sync = SlaveSynchronize(
            self._client, self.tables, broker.slave_sync_interval, self._tables_changed, self.store
        )
        self.replication = self._new_replication()
        self.filters = ConsumerFilterManager(config.store.root / "config" / "consumerFilter.json")
        self.consumers = clients = ConsumerManager()
        self.features = LogFeatures(config, self.path, self.tables, self.topics, clients)
        self.status = BrokerStatus(
            config,
            self.path,
            self.tables,
            self.replication,
            self._totals,
            self.relay,
            self.features,
        )
        self.registrar = self._new_registrar()
        self._processors = self._build_processors(clients)
        self.housekeeping = self._new_housekeeping(clients)
        self.endpoint.server.on_disconnect = self._disconnected

    def _new_replication(self) -> Replication:
        parts = self.config, self.path, self.tables, self.slave_sync, self._client, self
        kind = ControllerReplication if self.config.controller_mode else ClassicReplication
        return kind(*parts, guard=self.endpoint.guard)

    def _new_users(self) -> UserService:
        guard, broker = self.endpoint.guard, self.config.broker
        if guard is not None:
            self.tables.users.follow(guard.book(broker.broker_name, broker.broker_cluster_name))
        return UserService(
            self.tables.users,
            append=lambda body: self.path.put_system_record(USERS_TOPIC, body),
            changed=self.routes_changed,
        )

    def _new_registrar(self) -> NameServerRegistrar:
        broker = self.config.broker
        self._by_members = RegistrationByMembers(
            self._client, self.replication.other_members, self.status.registration_of_master
        )
        return NameServerRegistrar(
            self._client,
            broker.name_servers,
            broker.register_name_server_period,
            self.status.registration,
            self.replication.master_named,
            self._users_of_master if self.endpoint.guard is not None else None,
            self._by_members,
        )

    def _users_of_master(self) -> UserWrapper:
        """The table, with the masterEpoch with which this broker registers."""
        wrapper, epoch = self.tables.users.wrapper(), self.tables.topics.data_version.state_version
        wrapper.data_version = structs.replace(wrapper.data_version, state_version=epoch)
        return wrapper

    def _build_processors(self, clients: ConsumerManager) -> Processors:
        """The table in `batonmq/broker/__init__.py` says which processor answers which codes."""
        path, topics, offsets = self.path, self.topics, self.tables.offsets
        in_sync, half_comes = self.replication.in_sync_count, self.features.transactions.half_comes
        self.send = SendProcessor(
            self.config, path, topics, in_sync, self.relay, half_comes, self.registrar.when_known
        )
        broker, known = self.config.broker, self.registrar.known
        checks = PullChecks(topics, clients, self.filters, broker, path)
        self.pull = PullProcessor(path, checks, offsets, broker, relay=self.relay)
        sightings = ConsumerSightings(clients)
        self.clients = ClientProcessor(clients, topics, path, self.filters, sightings, broker)
        self.consumer_lists = ConsumerLists(
            clients, sightings, self._client, self.replication.other_members, path.clock_ms
        )
        self.locks = LockProcessor(path, topics, self.tables.locks)
        self.features.guarded_by(self.endpoint.guard)
        self._register_pop(processors := Processors())
        for processor in (
            self.replication,
            self._by_members,
            self.send,
            self.features,
            self.pull,
            self.clients,
            self.consumer_lists,
            self.locks,
            SendBackProcessor(path, topics, self.endpoint.require),
            ReplyProcessor(path, self.send, clients, broker),
            AdminProcessor(path, topics, self.status, self.replication, known, broker),
            SettingsProcessor(self.config, self._settings, path.gate, self.replication.proof_state),
            UserProcessor(path, self.users, self.endpoint.guard),
            OffsetProcessor(path, topics, offsets),
            ConnectionProcessor(clients, path.clock_ms),
            GroupAdminProcessor(path, topics, clients, offsets, self.pull, broker),
            QueryProcessor(self.store, clients, self.filters),
            SlaveSourceProcessor(
                self.tables,
                path.gate,
                log_begin=lambda: self.store.min_phy_offset,
                confirm_offset=lambda: self.store.confirm_offset,
                timers_until_ms=self.features.timers.delivered_until_ms,
            ),
        ):
            processor.register(processors)
        self.endpoint.stand_before(processors)
        return processors

    def _new_housekeeping(self, clients: ConsumerManager) -> Housekeeping:
        def water_marks() -> dict[str, int]:
            return {
                "sends": len(self.path.acks),
                "held_sends": len(self.path.hold),
                "held_pulls": self.pull.held,
                "held_pops": self.pop.held,
                "relayed": len(self.relay),
            }

        return Housekeeping(
            self.path,
            self.topics,
            clients,
            self.tables.offsets,
            self.config.broker,
            water_marks,
            self.replication.service.runtime_info,
        )

    def _register_pop(self, processors: Processors) -> None:
        path, topics, popped = self.path, self.topics, self.features.pop
        broker = self.config.broker
        has_users = self.endpoint.guard is not None
        self.pop = PopProcessor(path, topics, popped, broker, has_users=has_users)
        self.pull.on_reset = popped.reset
        self.pop.register(processors)
        AckProcessor(path, topics, popped).register(processors)
        members = self.consumer_lists.client_ids
        AssignmentProcessor(
            path, topics, members, broker, self._client, popped.pulls_again
        ).register(processors)

    async def start(self) -> None:
        """Listens, opens, registers. Raises BatonError or OSError."""
        broker = self.config.broker
        self._connect_store()
        try:
            if not self.endpoint.is_listening:
                await self.endpoint.listen()
            await self.endpoint.start_retry.wait(self._opened_store)
        except BaseException:
            await self.endpoint.close()
            raise
        try:
            self.store.start(asyncio.get_running_loop(), self.fatal)
            self.store.arrival_listeners += [
                self.pull.arrived,
                self.pop.arrived,
                self.features.arrived,
            ]
            self.store.disk_space.on_space = self.replication.service.dial_now
            self.consumer_lists.started()
            await self.endpoint.open(self._processors)
            ticks = [
                asyncio.create_task(self._tick_forever(), name="broker-tick"),
                asyncio.create_task(self._tick_clients(), name="broker-clients"),
            ]
            for tick in ticks:
                tick.add_done_callback(self._tick_ended)
            warm_up = asyncio.create_task(self._warm_up(), name="broker-warm-up")
            self._tasks = [*ticks, warm_up]
            await self.replication.start()  # it may wait long for disk space
        except BaseException:
            await self.close()
            raise
        # Both need a role: they wait until there is one.
        self.registrar.start()
        self.slave_sync.start()
        log.info(
            "broker_started address=%s name=%s cluster=%s controller_mode=%s %s",
            broker.address,
            broker.broker_name,
            broker.broker_cluster_name,
            self.config.controller_mode,
            self.endpoint.laps.end("role"),
        )

    def _connect_store(self) -> None:
        """Sets the store's callbacks, which it calls from its recovery on."""
        kinds: dict[str, RecordKind] = {
            METADATA_TOPIC: self.topics,
            PROGRESS_TOPIC: self.features.progress,
            USERS_TOPIC: self.users,
        }
        SystemRecords(self.store, self.path.gate, kinds)
        self.store.on_unknown_topic = self.topics.seen_in_log
        self.store.before_checkpoint = self.tables.shown_by_the_log
        self.slave_sync.on_log_begin = lambda at: self.store.positions.master_begins_at(at)
        self.store.on_new_beginning = self._new_beginning
        self.store.on_damage_found = self.replication.on_damage_found

    async def _opened_store(self) -> None:
        try:
            # A thread cannot be cancelled, so the store is closed only after its end.
            await to_the_end(asyncio.to_thread(self._open_store))
            self.endpoint.laps.end("store")
        except asyncio.CancelledError:
            self.store.close()
            raise

    def _open_store(self) -> None:
        """Runs in a thread, while the loop serves only the endpoint."""
        self.store.on_dropped.append(self.topics.unwritten.dropped)
        self.store.on_dropped.append(self.users.unwritten.dropped)
        # Tables first: recovery applies log records, which may be newer than these files.
        self.tables.load()
        self.filters.load()
        self.tables.offsets.deletions.epochs = lambda: self.store.epochs.entries
        self.store.open()
        self.tables.offsets.deletions.opened(self.store.confirm_offset, self.store.max_phy_offset)
        if self.store.trust.reason:
            OffsetClamp(self.tables, self.store).of_suspect_log()

    async def close(self) -> None:
        """Hands over, refuses writes, sends Goodbye, closes everything. Idempotent."""
        # After a fault it takes part in no switch: the end of its sessions causes an election.
        if self._stop_reason == PLANNED_STOP:
            await self.replication.hand_over()
        self.path.gate.close("this broker is stopping: ask the name server for the master")
        self.features.end()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        await self.consumer_lists.close()
        # While the endpoint still writes: the last acknowledgements and refusals leave by it.
        await self.replication.close(self._stop_reason)
        await self.registrar.close()
        await self.slave_sync.close()
        await self.endpoint.close()
        await self._client.close()
        # Last: until here a record or a request may change them. After a failed write or sync
        # nothing more may be recorded (R40).
        if not self.store.health.has_failed:
            self._persist_tables()
        self.store.close()

    def _new_beginning(self) -> None:
        self.tables.offsets.clear_for_new_log()
        self.tables.delays.clear_for_new_log()
        self.slave_sync.fetch_offsets_again()

    def _topic_deleted(self, topic: str) -> None:
        self.pull.queues_deleted(topic)
        self.pop.read_again(("", topic, ANY_QUEUE))

    def _tables_changed(self, topics: Collection[str] | None = None) -> None:
        """`topics`: only these were created or changed."""
        self.send.topics_changed(topics)
        if topics is None:
            self.routes_changed()
        elif self.path.gate.is_master:  # name servers accept topics only from a master
            self.registrar.topics_changed(topics)

    def _settings_changed(self, broker: BrokerConfig) -> None:
        """Settings were changed by UPDATE_BROKER_CONFIG (25). autoCreateTopicEnable needs the
        template topic, which a start creates only if that is set; brokerPermission is registered
        with a new version, since name servers ignore topics of one that they know."""
        if broker.auto_create_topic_enable and self.topics.get(AUTO_CREATE_TOPIC) is None:
            queues, perm = broker.default_topic_queue_nums, PERM_INHERIT | PERM_READ | PERM_WRITE
            self.tables.topics.put(topic_config(AUTO_CREATE_TOPIC, queues, perm))
            self._tables_changed((AUTO_CREATE_TOPIC,))
        if broker.broker_permission != self._permission:
            self._permission = broker.broker_permission
            if self.path.gate.is_master:
                self.tables.topics.set_state_version(self.path.gate.master_epoch)
            self.routes_changed()

    def routes_changed(self) -> None:
        self.registrar.changed()

    def master_opened(self) -> None:
        self._lacks_first_user = self.endpoint.guard is not None
        self._put_first_user()
        self.consumer_lists.became_master()
        self.features.begin()

    def _put_first_user(self) -> None:
        """Makes the configured first user, once in a mastership, unless there is one."""
        first = self.config.auth.first_user if self._lacks_first_user else None
        # While writes are refused the user would get no record, so no slave would have it.
        if self.path.gate.refusal is not None:
            return
        try:
            if first is not None and first.username not in self.tables.users:
                self.users.put(first)
        except PutRefused as error:  # a full disk (R45): the next second tries again
            log.warning("first_user_waits reason=%s", error)
        else:
            self._lacks_first_user = False

    def role_left(self) -> None:
        self._lacks_first_user = False
        self.features.end()
        self.consumer_lists.role_left()
        self.pull.role_changed()
        self.pop.role_changed()
        self.topics.role_left()

    def _disconnected(self, connection: Connection) -> None:
        self.pull.disconnected(connection)
        self.pop.disconnected(connection)
        self.clients.disconnected(connection)

    def fatal(self, exc: BaseException) -> None:
        log.critical("broker_fatal reason=%s", exc)
        self.store.health.give_up(exc)
        self._end("cannot trust its disk", exc)

    def _tick_ended(self, task: asyncio.Task[None]) -> None:
        """The timer failed. Without it a master would no longer check its lease, so the process
        ends and another replica leads. The log stays trusted, since the disk did not fail."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            name = task.get_name()
            log.critical("broker_task_failed task=%s reason=%r", name, error, exc_info=error)
            self._end(f"ends, its task {name} failed", error)

    def _end(self, why: str, exc: BaseException) -> None:
        self.path.gate.close(f"this broker {why}: {exc}")
        self._stop_reason = f"it {why}: {exc}"
        self._on_fatal(exc)

    def _totals(self) -> Totals:
        pull = self.pull
        return Totals(
            self.send.stored_total,
            pull.messages_total + self.pop.messages_total,
            pull.found_total,
            pull.missed_total,
            pull.longest_read_ms,
        )

    async def _warm_up(self) -> None:
        """Imports in threads what would delay the first busy turn (numpy: 100 ms)."""
        await asyncio.sleep(WARM_UP_AFTER_S)  # a failover that restarted this process comes first
        interval_s = sys.getswitchinterval()
        sys.setswitchinterval(interval_s / 10)  # else each thread switch takes up to 5 ms
        try:
            await asyncio.to_thread(IndexService.preload)
            await asyncio.to_thread(subscription_filter.preload)
        finally:
            sys.setswitchinterval(interval_s)

    async def _tick_forever(self) -> None:
        next_second = next_persist = boot_ms()
        while True:
            await asyncio.sleep(TICK_S)
            now_ms = boot_ms()
            self._clients_due.set()  # in this turn: a second timer would double the cost
            self.replication.tick(now_ms)
            self.path.tick(now_ms)
            if now_ms >= next_second:
                next_second = now_ms + SECOND_MS
                self.status.tick(now_ms)
                self.locks.tick(now_ms)
                self._put_first_user()
                self.path.stats.tick(now_ms)
            if now_ms >= next_persist:
                next_persist = now_ms + self.config.broker.flush_consumer_offset_interval
                self._persist_tables()

    async def _tick_clients(self) -> None:
        """Work for clients in slices, since there may be 10,000 of them."""
        next_scan = boot_ms()
        while True:
            await self._clients_due.wait()
            self._clients_due.clear()
            now_ms = boot_ms()
            await in_slices(partial(self.path.fail_late, now_ms))
            await in_slices(partial(self.relay.tick, now_ms))
            await in_slices(partial(self.pull.tick, now_ms))
            await in_slices(partial(self.pop.tick, now_ms))
            await in_slices(self.clients.tick)
            await in_slices(partial(self.consumer_lists.tick, now_ms))
            await self.housekeeping.tick(now_ms)
            if now_ms >= next_scan:
                next_scan = now_ms + CLIENT_SCAN_MS
                await in_slices(partial(self.clients.expire, now_ms))

    def _persist_tables(self) -> None:
        if self.store.health.pauses:
            return  # else files would pile up behind writes that wait for disk space
        for job in (*self.tables.writes_due(), *self.filters.writes_due()):
            self.store.background.run_job(job)


def _store(config: BrokerSections) -> MessageStore:
    rule = ConfirmedBySet() if config.controller_mode else ConfirmedByLog()
    return MessageStore(config.store, store_host=config.broker.store_host, confirm_rule=rule)


def _write_path(config: BrokerSections, store: MessageStore, endpoint: BrokerEndpoint) -> WritePath:
    return WritePath(
        store,
        ack_wait_ms=config.store.slave_timeout,
        sync_flush=config.store.sync_flush,
        clock_ms=boot_ms,
        gate=endpoint.gate,
        hooks=PutHooks(config.store),
        flow=FlowControl(config.broker, config.store),
    )


def _tables(config: BrokerSections) -> BrokerTables:
    folder = config.store.root / "config"
    return BrokerTables(
        TopicConfigManager(folder / "topics.json", config.broker),
        SubscriptionGroupManager(folder / "subscriptionGroup.json"),
        ConsumerOffsetManager(folder / "consumerOffset.json"),
        DelayOffsetManager(folder / "delayOffset.json"),
        QueueLockManager(folder / "queueLocks.json"),
        MessageRequestModeManager(folder / "messageRequestMode.json"),
        UserTable(folder / "users.json"),
    )
