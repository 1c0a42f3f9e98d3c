"""Replication as the broker uses it: HA service, ReplicasManager and role actions, or none of them.

In controller mode the HA service confirms writes and proposes SyncStateSets; the ReplicasManager
gets the proposals, and changes the role through `RoleActions`. Outside controller mode the
configuration gives the role (`broker.replication.classic`).

A Java master is known to its controllers by its remoting address only, so a slave asks it: 906
gives the HA address, 1007 who it is and its epochs. An epoch that begins where the one before began
(an election without a write in between) is refused by Java's own list, so a Java master may act in
an epoch that its list lacks; the version of its topic table (21) has it all the same.
Origin: AdminBrokerProcessor (exchangeBrokerHaInfo, getBrokerEpochCache), EpochFileCache.appendEntry
and ReplicasManager.changeToMaster in Java.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any, Final

from batonmq.broker.config import BrokerSections
from batonmq.broker.replication.classic import ClassicReplication
from batonmq.broker.replication.role_actions import BrokerHooks, RoleActions
from batonmq.broker.request_fields import number
from batonmq.broker.tables.slave_sync import BrokerTables, SlaveSynchronize
from batonmq.broker.write.write_path import WritePath
from batonmq.ha.classic.service import ClassicHAService
from batonmq.ha.proof import PeerIdentity
from batonmq.ha.service import AutoSwitchHAService
from batonmq.ha.sync_state import Proposal
from batonmq.ha.wire import HAIdentity
from batonmq.protocol.bodies import (
    EpochCacheEntry,
    EpochEntryCache,
    TopicConfigAndMappingSerializeWrapper,
)
from batonmq.protocol.codes import (
    HA_ADDRESS_FIELD,
    INCARNATION_FIELD,
    LOG_ID_FIELD,
    RequestCode,
    ResponseCode,
)
from batonmq.protocol.errors import BatonError
from batonmq.protocol.role_view import RoleView
from batonmq.remoting.command import RemotingCommand
from batonmq.remoting.endpoint import RemotingClient
from batonmq.replicas_manager.service import ReplicasManager
from batonmq.runtime.turns import in_slices

log = logging.getLogger(__name__)

TIMEOUT_MS: Final = 1000

LAST_ACKS_S: Final = 0.3
FULL_MS: Final = 2_000
HAND_OVER_AGAIN_MS: Final = 30_000


class JavaMasterClient:
    """Implements `batonmq.ha.ports.JavaMaster`. Every method raises BatonError where the broker
    does not answer or refuses."""

    def __init__(self, client: RemotingClient) -> None:
        self._client = client

    async def ha_address(self, view: RoleView) -> str:
        """ "" while it is no master."""
        reply = await self._ask(view, RequestCode.EXCHANGE_BROKER_HA_INFO)
        return reply.ext.get("masterHaAddress") or ""

    async def identity(self, view: RoleView) -> PeerIdentity:
        """Raises ValueError for an answer of nonsense, too."""
        reply = await self._ask(view, RequestCode.GET_BROKER_EPOCH_CACHE)
        cache = EpochEntryCache.decode(reply.body)
        last = max((entry.epoch for entry in cache.epoch_list), default=-1)
        table_epoch = -1
        if last < view.master_epoch:
            topics = await self._ask(view, RequestCode.GET_ALL_TOPIC_CONFIG)
            table = TopicConfigAndMappingSerializeWrapper.decode(topics.body)
            table_epoch = table.data_version.state_version
        return PeerIdentity(
            cache.cluster_name, cache.broker_name, cache.broker_id, last, table_epoch
        )

    async def _ask(self, view: RoleView, code: int) -> RemotingCommand:
        request = RemotingCommand.request(code)
        return await self._client.call(view.master_address, request, TIMEOUT_MS)


class WithoutRoom:
    """When a master whose disk is full hands over (R45): another member may have room. If that one
    has none either, it hands over in its turn: each at most once in HAND_OVER_AGAIN_MS."""

    def __init__(self) -> None:
        self._since_ms: int | None = None
        self._not_before_ms = 0

    def due(self, full: str, now_ms: int) -> bool:
        """`full`: why this master refuses writes for want of room; empty if it does not."""
        if not full:
            self._since_ms = None
            return False
        if self._since_ms is None:
            self._since_ms = now_ms
        if now_ms < max(self._since_ms + FULL_MS, self._not_before_ms):
            return False
        self._not_before_ms = now_ms + HAND_OVER_AGAIN_MS
        return True

    def failed(self, now_ms: int) -> None:
        """No controller leads, or there was no other member: there may be one soon."""
        self._not_before_ms = now_ms + FULL_MS


async def _last_acks(path: WritePath) -> None:
    """Without a new master what waits is confirmed here or not at all: the slaves still follow, and
    an asynchronous send of a stock client is not tried again after a refusal."""
    if len(path.acks) and not path.store.health.has_failed:
        with contextlib.suppress(TimeoutError, BatonError):
            async with asyncio.timeout(LAST_ACKS_S):
                await path.wait_confirmed(path.store.max_phy_offset, "the last acks")


class Replication:
    """Implements `batonmq.ha.ports.HAListener`. One per broker, on its loop.

    `ha` and `manager` are None outside controller mode, `classic` is None in it.
    """

    def __init__(
        self,
        config: BrokerSections,
        path: WritePath,
        tables: BrokerTables,
        slave_sync: SlaveSynchronize,
        client: RemotingClient,
        hooks: BrokerHooks,
    ) -> None:
        self._config = config
        self._path = path
        self._tables = tables
        self._hooks = hooks
        self.slave_sync = slave_sync
        self.ha: AutoSwitchHAService | None = None
        self.manager: ReplicasManager | None = None
        self.actions: RoleActions | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._without_room = WithoutRoom()
        self.classic: ClassicReplication | None = None
        if not config.controller_mode:
            self.classic = ClassicReplication(config, path, tables, slave_sync, client, hooks)
            return
        self.ha = AutoSwitchHAService(
            path.store,
            config.ha,
            self,
            store_config=config.store,
            identity_of=self._identity,
            java_master=JavaMasterClient(client),
            clock_ms=path.clock_ms,
        )
        self.actions = actions = RoleActions(path, self.ha, tables, slave_sync, hooks, self._report)
        slave_sync.on_tables = self.ha.tables_followed
        self.manager = self._new_manager(actions, self.ha)
        path.replicate(self.ha, self.manager.lease_valid, actions.first_acked)

    def _new_manager(self, actions: RoleActions, ha: AutoSwitchHAService) -> ReplicasManager:
        return ReplicasManager(
            self._config.replicas_manager(), actions, ha, on_fatal=self._hooks.fatal
        )

    def broker_id(self) -> int:
        """The id that the controllers assigned, 0 until then; outside controller mode the one of
        the configuration."""
        if self.classic is not None:
            return self.classic.broker_id
        return self.manager.broker_id if self.manager is not None else 0

    def _identity(self) -> HAIdentity:
        """What this process names itself on HA connections (R41)."""
        assert self.manager is not None
        broker = self._config.broker
        return HAIdentity(
            broker.broker_cluster_name,
            broker.broker_name,
            self.manager.broker_id,
            self.manager.incarnation,
            self._path.store.log.log_id,
        )

    def other_members(self) -> list[str]:
        """The addresses of the other replicas that the controllers know; none outside controller
        mode."""
        view = self.manager.view if self.manager is not None else None
        replicas = view.replicas if view is not None else ()
        own = self.broker_id()
        return [one.address for one in replicas if one.address and one.broker_id != own]

    async def start(self) -> None:
        """Begins to register, or takes its role at once outside controller mode."""
        path = self._path
        path.store.flushed_listeners.append(path.flushed)
        if self.classic is not None:
            path.store.flushed_listeners.append(self.classic.ha.notify_flushed)
            await self.classic.start()
        elif self.ha is not None and self.manager is not None:
            await self.ha.start(self._config.broker.bind_host)
            await self.manager.start()

    async def hand_over(self) -> None:
        """Before a planned stop a master makes another member master, if there is one."""
        if self.manager is not None and self._path.gate.is_master:
            await self.manager.hand_over("the master stops")

    async def close(self, reason: str) -> None:
        """`reason` goes to the controllers, and from there into the history."""
        self._path.hold.release()
        await _last_acks(self._path)
        self._path.acks.fail_all(ResponseCode.SERVICE_NOT_AVAILABLE, "this broker is stopping")
        await in_slices(self._path.acks.answer_failed)
        if self.manager is not None:
            await self.manager.end()
        for task in self._tasks:
            task.cancel()
        if self.ha is not None:
            await self.ha.close()
        if self.manager is not None:
            await self.manager.close(reason)  # R44: behind a good-bye its log changes no more
        if self.classic is not None:
            await self.classic.close()

    def tick(self, now_ms: int) -> None:
        """Lease, required set and room may have changed with time."""
        full = self._path.store.room.reason if self._path.gate.is_master else ""
        if self.manager is not None and self._without_room.due(full, now_ms):
            log.warning("master_without_room_hands_over reason=%s", full)
            handing = asyncio.get_running_loop().create_task(
                self._hand_over_without_room(self.manager, full), name="not_handed_over"
            )
            self._tasks.add(handing)
            handing.add_done_callback(self._ended)
        if self.manager is not None and self.ha is not None:
            self._path.gate.standing(
                lease=self.manager.lease_valid(now_ms),
                required_set_whole=self.ha.required_set_whole,
            )

    async def _hand_over_without_room(self, manager: ReplicasManager, full: str) -> None:
        handed = False
        try:
            handed = await manager.hand_over(f"no room: {full}")
        finally:
            if not handed:
                self._without_room.failed(self._path.clock_ms())

    @property
    def offsets_clamped(self) -> int:
        """How many offsets of groups lay above the end of their queue, since the start (R44)."""
        return self.actions.offsets_clamped if self.actions is not None else 0

    @property
    def missing_room(self) -> str:
        """What this broker finds no room for before it can register (R45)."""
        return self.manager.start_room.missing if self.manager is not None else ""

    def in_sync_count(self) -> int:
        """The size of the recorded SyncStateSet, or the master and its slaves within the gap."""
        return self.service.in_sync_count

    @property
    def service(self) -> AutoSwitchHAService | ClassicHAService:
        """The HA service, whichever mode this broker is in."""
        service = self.ha if self.classic is None else self.classic.ha
        assert service is not None
        return service

    def master_told(self, address: str, ha_address: str) -> bool:
        """A name server's reply; whether no other answer is needed."""
        return self.classic is None or self.classic.master_told(address, ha_address)

    def role_notice(self, request: RemotingCommand) -> None:
        """1008: a hint that the role changed. Raises BrokerRefusal 29 for what is no number."""
        if self.manager is not None:
            self.manager.on_remoting_role_notice(
                number(request, "masterEpoch", 0),
                number(request, "syncStateSetEpoch", 0),
            )

    def on_confirm_offset(self, offset: int) -> None:
        self._path.confirmed(offset)
        if self._path.hold.active and self.manager is not None:
            self.manager.acks_changed()

    def on_proposal(self, proposal: Proposal) -> None:
        assert self.manager is not None
        self.manager.propose(proposal)

    def on_slave_following(self, broker_id: int) -> None:
        log.info("slave_following broker_id=%d", broker_id)

    def on_truncated(self, from_offset: int, to_offset: int) -> None:
        log.warning("log_truncated from_offset=%d to_offset=%d", from_offset, to_offset)
        self._report("truncated", fromOffset=from_offset, toOffset=to_offset)
        if self.actions is not None:
            clamping = asyncio.get_running_loop().create_task(
                self.actions.log_truncated(), name="offsets_not_clamped"
            )
            self._tasks.add(clamping)
            clamping.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (failed := task.exception()) is not None:
            log.error("%s", task.get_name(), exc_info=failed)

    def on_diverged(self, reason: str) -> None:
        log.error("log_diverged reason=%s", reason)
        self._report("diverged", reason=reason)

    def on_damage(self, reason: str) -> None:
        log.error("log_damaged reason=%s", reason)
        self._report("diverged", reason=f"its own log is damaged: {reason}")

    def on_fatal(self, exc: BaseException) -> None:
        self._hooks.fatal(exc)

    def _report(self, kind: str, **fields: object) -> None:
        """Adds an event to the history; outside controller mode there is none."""
        if self.manager is not None:
            self.manager.report_event(kind, **fields)

    def epoch_cache(self) -> tuple[EpochEntryCache, dict[str, str]] | None:
        """The answer to 1007, and in extFields which process this is (R41); None outside controller
        mode."""
        if self.manager is None:
            return None
        own, store = self._identity(), self._path.store
        cache = EpochEntryCache(
            cluster_name=own.cluster_name,
            broker_name=own.broker_name,
            broker_id=own.broker_id,
            epoch_list=[
                EpochCacheEntry(
                    epoch=entry.epoch, start_offset=entry.start_offset, end_offset=entry.end_offset
                )
                for entry in store.epochs.entries
            ],
            max_offset=store.max_phy_offset,
        )
        return cache, {
            INCARNATION_FIELD: own.incarnation,
            LOG_ID_FIELD: own.log_id,
            HA_ADDRESS_FIELD: self._config.ha_address,
        }
