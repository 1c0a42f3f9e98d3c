"""Replication under controllers: HA service, ReplicasManager and role actions.

The HA service confirms writes and proposes SyncStateSets. The ReplicasManager takes the proposals
to the controllers, and changes the role through `RoleActions` when a new role view arrives.
"""

import asyncio
import logging
from collections.abc import Iterator, Mapping
from typing import Final

from batonmq.auth.guard import Guard
from batonmq.broker.config import BrokerSections
from batonmq.broker.replication.replication import BrokerHooks, Replication
from batonmq.broker.replication.role_actions import RoleActions
from batonmq.broker.request_fields import number
from batonmq.broker.tables.broker_tables import BrokerTables
from batonmq.broker.tables.slave_sync import SlaveSynchronize
from batonmq.broker.write.write_path import MembersConfirm, WritePath
from batonmq.ha.java_peer import PeerIdentity
from batonmq.ha.service import AutoSwitchHAService
from batonmq.ha.sync_state import SetProposal
from batonmq.ha.wire import HAIdentity
from batonmq.history.event import full_disk_reason
from batonmq.protocol.bodies import (
    PROBLEMS_KEY,
    EpochCacheEntry,
    EpochEntryCache,
    KVTable,
    TopicConfigAndMappingSerializeWrapper,
)
from batonmq.protocol.codes import HA_ADDRESS_FIELD, INCARNATION_FIELD, LOG_ID_FIELD, RequestCode
from batonmq.protocol.errors import BatonError, CorruptLogError
from batonmq.protocol.role_view import RoleView
from batonmq.remoting.command import RemotingCommand
from batonmq.remoting.connection import Connection
from batonmq.remoting.endpoint import RemotingClient
from batonmq.replicas_manager.service import ReplicasManager
from batonmq.runtime.metrics import MetricsPage

log = logging.getLogger(__name__)

FULL_MS: Final = 2_000
HAND_OVER_AGAIN_MS: Final = 30_000
ASK_MS: Final = 1_000


def has_disk_space(status: Mapping[str, str], percent: int) -> bool:
    """Whether a broker's status (GET_BROKER_RUNTIME_INFO, 28; a Java broker's, too) says that at
    most `percent` of its disks are used, and that no write found one full."""
    try:
        used = [float(status[key]) for key in ("commitLogDiskRatio", "consumeQueueDiskRatio")]
    except (KeyError, ValueError):
        return False
    full = "disk is full" in status.get(PROBLEMS_KEY, "")
    return not full and all(0 <= ratio * 100 <= percent for ratio in used)


class UnfitHandover:
    """When an unfit master hands over: its disk is full (R45), or its log is damaged (R24). If the
    next master is unfit too, it also hands over; each at most once in HAND_OVER_AGAIN_MS."""

    def __init__(self) -> None:
        self._since_ms: int | None = None
        self._not_before_ms = 0

    def due(self, reason: str, now_ms: int) -> bool:
        """`reason`: why this master is unfit; empty if it is not."""
        if not reason:
            self._since_ms = None
            return False
        if self._since_ms is None:
            self._since_ms = now_ms
        # The next master may be unfit, too: without the pause two would pass the role to and fro.
        if now_ms < max(self._since_ms + FULL_MS, self._not_before_ms):
            return False
        self._not_before_ms = now_ms + HAND_OVER_AGAIN_MS
        return True

    def lasts_ms(self, now_ms: int) -> int:
        """How long this master has been unfit."""
        return 0 if self._since_ms is None else now_ms - self._since_ms

    def failed(self, now_ms: int) -> None:
        """It could not hand over: no controller leads, or there was no other member."""
        self._not_before_ms = now_ms + FULL_MS


class JavaMasterClient:
    """What a slave asks a Java master: its HA address, which Java's controllers do not know, its
    identity and its epochs. Java's epoch list refuses an epoch that begins where the one before
    began, as after an election without a write in between. So a Java master may act in an epoch
    that its list lacks; the version of its topic table has it. Implements
    `batonmq.ha.java_peer.JavaMaster`. Every method raises BatonError where the broker does not
    answer or refuses. Origin: AdminBrokerProcessor, EpochFileCache.appendEntry,
    ReplicasManager.changeToMaster in Java."""

    def __init__(self, client: RemotingClient) -> None:
        self._client = client

    async def ha_address(self, view: RoleView) -> str:
        """ "" while it is no master."""
        reply = await self._ask(view, RequestCode.EXCHANGE_BROKER_HA_INFO)
        return reply.ext.get("masterHaAddress") or ""

    async def identity(self, view: RoleView) -> PeerIdentity:
        """Raises ValueError, too, for a reply that makes no sense."""
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
        return await self._client.call(view.master_address, request, ASK_MS)


class ControllerReplication(Replication):
    """Implements `batonmq.ha.shells.AutoSwitchListener`."""

    def __init__(
        self,
        config: BrokerSections,
        path: WritePath,
        tables: BrokerTables,
        slave_sync: SlaveSynchronize,
        client: RemotingClient,
        hooks: BrokerHooks,
        *,
        guard: Guard | None,
    ) -> None:
        super().__init__(config, path, slave_sync, hooks, guard)
        self._full_disk = UnfitHandover()
        self._without_heir = False
        self._damage = UnfitHandover()
        self._client = client
        self._tables = tables
        self.ha = AutoSwitchHAService(
            path.store,
            config.ha,
            self,
            identity_of=self._identity,
            java_master=JavaMasterClient(client),
            clock_ms=path.clock_ms,
        )
        self.actions = RoleActions(path, self.ha, tables, slave_sync, hooks, self._report)
        slave_sync.on_tables = self.ha.tables_followed
        sign = guard.signer if guard is not None else None
        settings = config.replicas_manager(sign)
        self.manager = ReplicasManager(settings, self.actions, self.ha, on_fatal=hooks.fatal)
        lease_valid, first_acked = self.manager.lease_valid, self.actions.first_acked
        path.rule = MembersConfirm(path, self.ha, lease_valid, first_acked)

    @property
    def service(self) -> AutoSwitchHAService:
        return self.ha

    def broker_id(self) -> int:
        return self.manager.broker_id

    def _identity(self) -> HAIdentity:
        """How this process names itself on HA connections (R41)."""
        broker = self._config.broker
        return HAIdentity(
            broker.broker_cluster_name,
            broker.broker_name,
            self.manager.broker_id,
            self.manager.incarnation,
            self._path.store.log.log_id,
        )

    def other_members(self) -> list[str]:
        view, own = self.manager.view, self.broker_id()
        replicas = view.replicas if view is not None else ()
        return [one.address for one in replicas if one.address and one.broker_id != own]

    def followed_master(self) -> RoleView | None:
        return self.ha.followed

    async def start(self) -> None:
        self._path.store.flushed_listeners.append(self._path.flushed)
        # Before it registers: the role views that follow give its HA address to other replicas.
        await self._listen()
        await self.manager.start()

    async def hand_over(self) -> None:
        if self._path.gate.is_master:
            await self.manager.hand_over("the master stops")

    async def _close(self, reason: str) -> None:
        # First. It waits for a running role change: none may begin while HA is being closed.
        await self.manager.end()
        for task in self._tasks:
            task.cancel()
        await self.ha.close()
        await self.manager.close(reason)  # last (R44): after its Goodbye its log must not change

    def tick(self, now_ms: int) -> None:
        """Lease, required set and disk space may have changed with time."""
        path = self._path
        full = path.store.disk_space.reason if path.gate.is_master else ""
        if self._full_disk.due(full, now_ms):
            self._spawn(self._hand_over_full_disk(full), "not_handed_over")
        trust = path.store.trust
        is_unfit = path.gate.is_master and trust.must_refetch
        if self._damage.due(trust.reason if is_unfit else "", now_ms):
            self._spawn(self._hand_over_damaged(trust.reason), "not_handed_over")
        path.gate.update(
            lease=self.manager.lease_valid(now_ms), required_set_whole=self.ha.required_set_whole
        )

    async def _hand_over_full_disk(self, full: str) -> None:
        handed, refused_ms = False, self._full_disk.lasts_ms(self._path.clock_ms())
        try:
            # Replicas may share a file system, and pass the mastership to and fro while it is full.
            heirs = await self._members_with_disk_space()
            if not heirs and not self._without_heir:  # once, and not at each look
                log.warning("no_member_has_disk_space reason=%s", full)
            self._without_heir = not heirs
            if heirs and self._path.store.disk_space.reason:
                log.warning("master_with_full_disk_hands_over reason=%s", full)
                handed = await self.manager.hand_over(full_disk_reason(refused_ms, full), heirs)
        finally:
            if not handed:
                self._full_disk.failed(self._path.clock_ms())

    async def _members_with_disk_space(self) -> set[int]:
        """The other members of the set that say so themselves."""
        view = self.manager.view
        if view is None:
            return set()
        ids = view.sync_state_set - {self.broker_id()}
        others = [each for each in view.replicas if each.broker_id in ids]
        answers = await asyncio.gather(*(self._has_disk_space(each.address) for each in others))
        return {each.broker_id for each, has in zip(others, answers, strict=True) if has}

    async def _has_disk_space(self, address: str) -> bool:
        request = RemotingCommand.request(RequestCode.GET_BROKER_RUNTIME_INFO)
        try:
            reply = await self._client.call(address, request, ASK_MS)
            status = KVTable.decode(reply.body).table
        except BatonError:
            return False
        return has_disk_space(status, self._config.store.puts_again_percent)

    def on_damage_found(self, error: CorruptLogError) -> None:
        """A master hands over. The next master's bytes then replace what is damaged here."""
        # Before the log counts as suspect, since that causes an unplanned election. Without another
        # member this one stays the master: nothing is cut of the only copy.
        if not self._path.gate.is_master:
            super().on_damage_found(error)
            return
        self.on_damage(str(error))
        self._spawn(self._hand_over_found(error), "not_handed_over")

    async def _hand_over_found(self, error: CorruptLogError) -> None:
        try:
            await self._hand_over_damaged(str(error))
        finally:
            self._path.store.trust.note_rot(error)

    async def _hand_over_damaged(self, reason: str) -> None:
        if self._path.gate.is_master:
            log.warning("master_with_damaged_log_hands_over reason=%s", reason)
            await self.manager.hand_over(f"its log is damaged: {reason}")

    def _role_changed(self, request: RemotingCommand, connection: Connection) -> RemotingCommand:
        """Raises BrokerRefusal INVALID_PARAMETER for an epoch that is no number."""
        self.manager.on_remoting_role_notice(
            number(request, "masterEpoch", 0), number(request, "syncStateSetEpoch", 0)
        )
        return super()._role_changed(request, connection)

    def on_confirm_offset(self, offset: int) -> None:
        self._path.confirmed(offset)
        # Clients wait while sends are held (R33): the switch sees the last ack now, not at its
        # timer.
        if self._path.hold.active:
            self.manager.acks_changed()

    def on_proposal(self, proposal: SetProposal) -> None:
        self.manager.propose(proposal.new_set, proposal.reason, proposal.confirm_offset)

    def on_slave_following(self, broker_id: int) -> None:
        log.info("slave_following broker_id=%d", broker_id)

    def on_truncated(self, from_offset: int, to_offset: int) -> None:
        log.warning("log_truncated from_offset=%d to_offset=%d", from_offset, to_offset)
        self._report("truncated", fromOffset=from_offset, toOffset=to_offset)
        self._spawn(self.actions.log_truncated(), "offsets_not_clamped")

    def on_diverged(self, reason: str) -> None:
        log.error("log_diverged reason=%s", reason)
        self._report("diverged", reason=reason)

    def on_damage(self, reason: str) -> None:
        super().on_damage(reason)
        self._report("diverged", reason=f"its own log is damaged: {reason}")

    def _report(self, kind: str, **fields: object) -> None:
        self.manager.report_event(kind, **fields)

    def epoch_cache(self) -> tuple[EpochEntryCache, dict[str, str]]:
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

    def status(self) -> dict[str, str]:
        path, manager, view = self._path, self.manager, self.manager.view
        return {
            "brokerId": str(manager.broker_id),
            "masterLease": str(manager.lease_valid(path.clock_ms())).lower(),
            "requiredSet": ",".join(map(str, sorted(self.ha.required_set))),
            "syncStateSetEpoch": str(view.sync_state_set_epoch if view else 0),
            "lastEpoch": str(path.store.epochs.last_epoch),
            "consumerOffsetsClamped": str(self._tables.offsets.lowered),
            "tablesEpoch": str(self._slave_sync.held_epoch),
            "slavesWithoutTables": ",".join(self._slaves_without_tables()),
        }

    def _slaves_without_tables(self) -> list[str]:
        """As master: ids of the connected slaves that lack this mastership's tables, or do not
        follow them any more (R42)."""
        sync, view = self.ha.sync_state, self.manager.view
        if sync is None or view is None:
            return []
        followers = (sync.follower(replica.broker_id) for replica in view.replicas)
        return [
            str(follower.broker_id)
            for follower in followers
            if follower is not None
            and follower.connection_id is not None
            and not follower.follows_tables(sync.master_epoch)
        ]

    def collect(self, page: MetricsPage) -> None:
        view = self.manager.view
        if view is None:
            return
        size = len(view.sync_state_set)
        page.gauge("batonmq_sync_state_set_size", "members, the master among them", size)
        page.gauge("batonmq_sync_state_set_epoch", "of the set", view.sync_state_set_epoch)
        page.gauge("batonmq_replicas_known", "registered replicas", len(view.replicas))
        least = self._config.store.min_in_sync_replicas
        page.gauge("batonmq_min_in_sync_replicas", "with fewer, writes are refused", least)
        if self._path.gate.is_master:
            valid = self.manager.lease_valid(self._path.clock_ms())
            page.gauge("batonmq_master_lease_valid", "1 while its lease runs", valid)

    def slaves(self) -> Iterator[tuple[str, int, bool]]:
        sync, view = self.ha.sync_state, self.manager.view
        if sync is None or view is None:
            return
        for replica in view.replicas:
            follower = sync.follower(replica.broker_id)
            if follower is not None and replica.broker_id != sync.broker_id:
                lag = self._path.store.max_phy_offset - max(0, follower.held)
                yield str(replica.broker_id), lag, replica.broker_id in view.sync_state_set

    @property
    def why_not_in_sync(self) -> str:
        view, learner = self.manager.view, self._config.ha.async_learner
        if learner or view is None or self.broker_id() in view.sync_state_set:
            return ""
        return "it is not in the SyncStateSet: it catches up"

    def problems(self) -> dict[str, str]:
        return super().problems() | {
            "its start waits for disk space": self.manager.start_retry.missing,
            "is not registered": self.manager.registration_refusal,
            "does not join yet": self._path.store.positions.why_not_whole,
        }
