"""Replication in classic mode: the role of the configuration, and the classic HA service.

ASYNC_MASTER acknowledges what is on its own disk, SYNC_MASTER what `inSyncReplicas - 1` slaves have
as well. Consumers see a write at once in both, as with Java. A slave follows the master of its
configuration, or the one that a name server knows. Before it takes its role, and afterwards, the
broker checks its group (`group_watch`): it takes no role that another broker has, and a slave may
act for an absent master.

`PreOnline` is what a master does with each slave before it registers. While it was absent, a slave
may have acted for it (`enableSlaveActingMaster`) and taken offsets of groups. The master announces
its HA address to that slave (EXCHANGE_BROKER_HA_INFO, 906), waits for its connection, and takes
back offsets that are ahead of its own. If the slave has a longer log, the master takes no role.
Origin: Java BrokerController and DefaultHAService without controllers, and BrokerPreOnlineService,
which takes whole tables by their versions, and does not look at the log.
"""

import asyncio
import logging
from functools import partial
from typing import Final

from batonmq.auth.guard import Guard
from batonmq.broker.config import BrokerSections
from batonmq.broker.replication.group_watch import GroupWatch
from batonmq.broker.replication.replication import BrokerHooks, Replication
from batonmq.broker.request_fields import number
from batonmq.broker.tables.broker_tables import BrokerTables
from batonmq.broker.tables.offset_clamp import queue_end
from batonmq.broker.tables.slave_sync import Followed, SlaveSynchronize
from batonmq.broker.write.write_path import OwnDiskConfirms, WritePath
from batonmq.ha.classic.service import ClassicHAService
from batonmq.ha.classic.slave_core import MasterAddresses
from batonmq.protocol.bodies import ConsumerOffsetSerializeWrapper, HARuntimeInfo
from batonmq.protocol.codes import HA_LINK_FIELD, SLAVE_NAME_FIELD, RequestCode, ResponseCode
from batonmq.protocol.errors import CorruptLogError
from batonmq.protocol.json_body import decoded_in_steps
from batonmq.remoting.command import RemotingCommand
from batonmq.remoting.connection import Connection, Processors
from batonmq.remoting.endpoint import RemotingClient
from batonmq.runtime.turns import in_turns, result_of
from batonmq.store.message_store import MessageStore

log = logging.getLogger(__name__)

ASK_MS: Final = 3000
CONNECT_S: Final = 10.0
"""How long a slave has to connect; Java's slaves check for a new address every 5 s."""
CLASSIC_EPOCH: Final = 0
LOG_END_TIMEOUT_MS: Final = 1000
SLAVE_REMARK: Final = "this broker is a slave"
POLL_S: Final = 0.05


class PreOnline:
    """`meet` once for each slave."""

    def __init__(
        self,
        store: MessageStore,
        tables: BrokerTables,
        ha: ClassicHAService,
        client: RemotingClient,
    ) -> None:
        self._store = store
        self._tables = tables
        self._ha = ha
        self._client = client

    async def meet(self, address: str, own: dict[str, str]) -> str:
        """Returns why this master may not take its role, "" if it may. `own`: the fields of
        EXCHANGE_BROKER_HA_INFO (906). Raises BatonError, or ValueError for an invalid reply."""
        reply = await self._ask(address, RequestCode.GET_BROKER_HA_STATUS)
        end = HARuntimeInfo.decode(reply.body).ha_client_runtime_info.max_offset
        own_end = self._store.max_phy_offset
        # This master has lost messages that the slave has: it must not write another history over
        # them.
        if end > own_end:
            return (
                f"its log ends at {end}, above the end of this one, {own_end}: it holds what this"
                " master has lost; make it the master, or stop it and empty its store"
            )
        await self._ask(address, RequestCode.EXCHANGE_BROKER_HA_INFO, own)
        await self._connected(address.rpartition(":")[0])
        reply = await self._ask(address, RequestCode.GET_ALL_CONSUMER_OFFSET)
        offsets = await result_of(decoded_in_steps(ConsumerOffsetSerializeWrapper, reply.body))
        topics = self._tables.topics
        here = {
            key: of_queues
            for key, of_queues in offsets.offset_table.items()
            if key.partition("@")[0] in topics
        }
        taken, ends = 0, partial(queue_end, self._store)
        async for count in in_turns(self._tables.offsets.taken_back(here, ends)):
            taken += count
        delays = await self._ask(address, RequestCode.GET_ALL_DELAY_OFFSET)
        if delays.body:
            self._tables.delays.apply_from_master(delays.body)
        log.info("pre_online_met address=%s offsets_taken=%d", address, taken)
        return ""

    async def _connected(self, host: str) -> None:
        """Waits until a slave follows from that host, at most CONNECT_S."""
        try:
            async with asyncio.timeout(CONNECT_S):
                while not self._ha.is_followed_from(host):  # noqa: ASYNC110  seen by its reports
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            log.warning("pre_online_without_slave host=%s waited_s=%g", host, CONNECT_S)

    async def _ask(
        self, address: str, code: int, ext: dict[str, str] | None = None
    ) -> RemotingCommand:
        return await self._client.call(address, RemotingCommand.request(code, ext), ASK_MS)


class ClassicReplication(Replication):
    """Implements `batonmq.ha.shells.ClassicListener` and `group_watch.GroupActions`."""

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
        self._tables = tables
        self._client = client
        self._master = MasterAddresses(ha=config.ha.ha_master_address)
        self._init_end = 0
        self.ha = ClassicHAService(
            path.store,
            config.ha,
            self,
            needed_slaves=config.needed_slaves,
            log_end_of=self._log_end_of,
            clock_ms=path.clock_ms,
        )
        self.group = GroupWatch(config, client, self, path.clock_ms)
        self._pre_online = PreOnline(path.store, tables, self.ha, client)
        self._confirms = OwnDiskConfirms(path, self.ha, waits=config.needed_slaves > 0)

    @property
    def service(self) -> ClassicHAService:
        return self.ha

    def broker_id(self) -> int:
        return self._config.broker.broker_id if self._config.is_classic_slave else 0

    def register(self, processors: Processors) -> None:
        super().register(processors)
        self.group.register(processors)
        processors.register(RequestCode.EXCHANGE_BROKER_HA_INFO, self._exchange_ha_info)

    def problems(self) -> dict[str, str]:
        return super().problems() | {"its group is not well": self.group.core.problem}

    async def start(self) -> None:
        """Listens. A master takes writes, a slave follows, as soon as no other broker has its
        id."""
        path = self._path
        path.store.flushed_listeners += [path.flushed, self.ha.notify_flushed]
        self._init_end = max(0, path.store.max_phy_offset)
        await self._listen()
        log.info(
            "classic_role role=%s needed_slaves=%d",
            self._config.broker.broker_role,
            self._config.needed_slaves,
        )
        if not self._config.is_classic_slave:
            # Before the role is taken: pre-online waits for the connections of the slaves.
            self.ha.lead()
        await self.group.start()

    async def _close(self, reason: str) -> None:
        await self.group.close()
        await self.ha.close()

    # -- effects of the group core

    def take_role(self) -> None:
        path = self._path
        if self._config.is_classic_slave:
            path.store.stop_writes(SLAVE_REMARK)
            # R27: no segment expires until the master says where its log begins.
            path.store.positions.master_begins_at(None)
            path.gate.follow(CLASSIC_EPOCH)
            self.ha.follow(self._master)
        else:
            path.acks.begin_epoch(CLASSIC_EPOCH)
            # Without controllers this broker's own disk decides: all that its start has found
            # counts as confirmed.
            path.store.advance_confirm_offset(path.store.max_phy_offset)
            self._tables.locks.renew_all(path.clock_ms())
            path.gate.opening(CLASSIC_EPOCH)
            path.rule = self._confirms
            path.gate.open()
            self._hooks.master_opened()
        self._hooks.routes_changed()

    def act(self, on: bool) -> None:
        """As slave: serves groups while the master is absent, or no longer."""
        log.warning("classic_acting_master on=%s", str(on).lower())
        self._path.gate.act(self.group.takes_offsets if on else None)
        if on:
            # Groups commit here from now on: offsets of the absent master must not replace theirs.
            self._slave_sync.follow(None)
            self._tables.offsets.act_for_master()
            self._tables.locks.renew_all(self._path.clock_ms())
        elif self._master.remoting:
            self._slave_sync.follow(Followed(self._master.remoting, CLASSIC_EPOCH))

    def register_again(self) -> None:
        self._hooks.routes_changed()

    def stand_back(self, reason: str) -> None:
        path = self._path
        path.gate.fence()
        path.gate.close(reason)
        path.acks.fail_all(ResponseCode.SERVICE_NOT_AVAILABLE, reason)
        self._hooks.role_left()
        path.store.stop_writes(reason)

    async def meet(self, address: str) -> str:
        return await self._pre_online.meet(address, self._ha_info())

    def _ha_info(self) -> dict[str, str]:
        return {
            "masterHaAddress": self._config.ha_address,
            "masterFlushOffset": str(self._init_end),
            "masterAddress": self._config.broker.address,
        }

    def _exchange_ha_info(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        """A returning master gives its HA address, or, without one, asks for ours
        (EXCHANGE_BROKER_HA_INFO, 906)."""
        ha_address = request.ext.get("masterHaAddress")
        if ha_address and self._config.is_classic_slave:
            self.group.master_announced()
            fixed = self._config.ha.ha_master_address
            address = request.ext.get("masterAddress") or ""
            self.ha.follow(MasterAddresses(fixed or ha_address, address))
        is_asked = not ha_address and not self._config.is_classic_slave
        return RemotingCommand.response_to(request, ext=self._ha_info() if is_asked else {})

    def _reset_flush_offset(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        """Takes the master's flush offset, for the HA status only."""
        if self._config.is_classic_slave:
            self.ha.master_flush_offset = number(request, "masterFlushOffset")
        return RemotingCommand.response_to(request)

    def master_named(self, address: str, ha_address: str) -> bool:
        """Only a slave uses it; `haMasterAddress` takes precedence. "" for both: unknown."""
        if not self._config.is_classic_slave:
            return True
        # A name server may still list this broker as the master: it must not follow itself.
        if address == self._config.broker.address:
            address = ha_address = ""
        fixed = self._config.ha.ha_master_address
        master = MasterAddresses(fixed or ha_address or self._master.ha, address)
        if master != self._master:
            log.info("classic_master_named address=%s ha_address=%s", address, master.ha)
            if address != self._master.remoting:
                self._path.gate.follow(CLASSIC_EPOCH, address)
                followed = Followed(address, CLASSIC_EPOCH) if address else None
                if not self._path.gate.is_acting:  # else when the core ends the acting
                    self._slave_sync.follow(followed)
                self.group.hint()
            self._master = master
            self.ha.follow(master)
        return bool(address)

    def note_slave(self, link: str, name: str) -> None:
        self.ha.note_slave(link, name)

    async def _log_end_of(self, address: str) -> int:
        broker, link = self._config.broker, self.ha.own_link
        name = f"{broker.broker_name}:{broker.broker_id} {broker.address}"
        own = {HA_LINK_FIELD: link, SLAVE_NAME_FIELD: name} if link else {}
        request = RemotingCommand.request(RequestCode.GET_BROKER_HA_STATUS, own)
        reply = await self._client.call(address, request, LOG_END_TIMEOUT_MS)
        info = HARuntimeInfo.decode(reply.body)
        if not info.master:
            raise ValueError(f"the broker at {address} is no master")
        return info.master_commit_log_max_offset

    def on_damage_found(self, error: CorruptLogError) -> None:
        """A slave fetches the damaged part again. A master has no member to hand over to: it serves
        what is good, and reports the rest."""
        super().on_damage_found(error)
        if self._config.is_classic_slave:
            try:
                self.ha.fetch_damaged_again(self._master)
            except OSError as failure:
                log.warning("damage_not_fetched_again reason=%s", failure)

    # -- events of the HA service

    def on_acknowledged(self, offset: int) -> None:
        self._confirms.held_by_slaves(offset)

    def on_slaves_missing(self, wanted: int, present: int) -> None:
        self._path.acks.fail_all(
            ResponseCode.SLAVE_NOT_AVAILABLE,
            f"stored, but {present} of {wanted} slaves that must have it are near enough",
        )

    def on_diverged(self, reason: str) -> None:
        log.error("classic_slave_cannot_follow reason=%s", reason)

    def on_master_lost(self) -> None:
        self.group.hint()
        self._hooks.routes_changed()  # the reply to a registration names the master
