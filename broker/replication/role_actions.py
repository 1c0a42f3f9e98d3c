"""Role changes of this broker, in an order that loses nothing acknowledged.

Becoming master: refuse new writes, fail pending writes (R4), let HA truncate an incomplete tail and
write the epoch (R25, R26), open, register at the name servers. Becoming slave: the same first two
steps, then follow. All steps before the first await happen in one loop turn, so no ack of the old
role can leave in between.
Origin: ReplicasManager.changeToMaster and changeToSlave in Java.
"""

import logging
from collections.abc import Awaitable, Callable

from batonmq.broker.replication.replication import BrokerHooks
from batonmq.broker.tables.broker_tables import BrokerTables
from batonmq.broker.tables.offset_clamp import OffsetClamp
from batonmq.broker.tables.slave_sync import Followed, SlaveSynchronize
from batonmq.broker.write.write_path import WritePath
from batonmq.ha.service import AutoSwitchHAService
from batonmq.protocol.codes import ResponseCode
from batonmq.protocol.role_view import RoleView
from batonmq.replicas_manager.link import LogFacts
from batonmq.replicas_manager.switch import SwitchProgress

log = logging.getLogger(__name__)

ROLE_CHANGED_REMARK = "the role of this broker changed while the message waited: send it again"


class RoleActions:
    """The only place that changes the role in `path.gate`, and with it HA and store. Implements
    `batonmq.replicas_manager.link.BrokerActions`."""

    def __init__(
        self,
        path: WritePath,
        ha: AutoSwitchHAService,
        tables: BrokerTables,
        slave_sync: SlaveSynchronize,
        hooks: BrokerHooks,
        report: Callable[..., None],
    ) -> None:
        """`report` adds an event, by its kind and fields, to the history of the group."""
        self._path = path
        self._store = path.store
        self._gate = path.gate
        self._acks = path.acks
        self._hold = path.hold
        self._ha = ha
        self._tables = tables
        self._slave_sync = slave_sync
        self._hooks = hooks
        self._report = report
        self._lease_lost_ms: int | None = None
        self._clamp = OffsetClamp(tables, path.store)

    def log_facts(self) -> LogFacts:
        store = self._store
        return LogFacts(
            epoch=store.epochs.last_epoch,
            max_offset=store.trust.end,
            confirm_offset=store.confirm_offset,
            min_offset=store.positions.whole_from,
            log_id=store.log.log_id,
            suspect=store.trust.reason,
        )

    async def become_master(self, view: RoleView, role_durable: Awaitable[None]) -> None:
        self._leave_role(view.master_epoch)
        self._slave_sync.follow(None)
        log_end = await self._ha.change_to_master(view)
        # R38: `_leave_role` ended the rounds, also for a master that is elected again, whose store
        # does not change otherwise.
        self._store.positions.begin_mastership()
        # R44: now, because the log has its final end and no write has come yet. With an offset
        # above that end a group would skip the new messages that get the offsets of cut ones.
        clamped = await self._clamp.for_view(view)
        await role_durable  # R2: a crash must not forget an epoch with acknowledged writes
        self._acks.begin_epoch(view.master_epoch)
        self._tables.topics.set_state_version(view.master_epoch)
        self._tables.offsets.set_state_version(view.master_epoch)
        self._lease_lost_ms = None
        self._tables.locks.renew_all(self._path.clock_ms())
        self._gate.after_unclean = view.unclean_epoch > 0
        # The gate first: the held sends are handled within `release`, and a closed gate refuses
        # them.
        self._gate.open()
        self._hold.release()
        self._hooks.master_opened()
        self._hooks.routes_changed()
        log.info(
            "master_opened failover=%s/%d log_end=%d", view.broker_name, view.master_epoch, log_end
        )
        about_offsets = {"offsetsClamped": clamped} if clamped else {}
        confirmed = self._store.confirm_offset
        self._report("opened", maxOffset=log_end, confirmOffset=confirmed, **about_offsets)

    async def become_slave(self, view: RoleView) -> None:
        self._leave_role(view.master_epoch, view.master_address)
        self._store.stop_writes()
        self._hooks.role_left()
        self._slave_sync.follow(None)
        # Before the new master's offsets come: with its epoch in the table the own offsets would
        # count as lowered already.
        await self._clamp.for_view(view)
        self._slave_sync.follow(Followed(view.master_address, view.master_epoch))
        await self._ha.change_to_slave(view)
        self._gate.follow(view.master_epoch, view.master_address)
        self._hold.release()
        self._tables.topics.set_state_version(view.master_epoch)
        self._hooks.routes_changed()

    def master_moved(self, view: RoleView) -> None:
        followed = Followed(view.master_address, view.master_epoch)
        known = self._slave_sync.followed
        # A newer masterEpoch comes as a role change of its own, which fences first (R2).
        if known is None or known.master_epoch != view.master_epoch or known == followed:
            return
        log.info("master_moved from=%s to=%s", known.address, view.master_address)
        self._slave_sync.follow(followed)
        self._gate.follow(view.master_epoch, view.master_address)

    async def stand_down(self, view: RoleView) -> None:
        self._leave_role(view.master_epoch)
        self._gate.fence()
        self._store.stop_writes()
        self._hooks.role_left()
        self._slave_sync.follow(None)
        self._hold.release()
        await self._ha.stand_down()

    async def log_truncated(self) -> None:
        """Groups may have consumed what this replica has cut: their offsets go back to the end of
        the queues, until the master's replace them (R44)."""
        await self._clamp.run()
        self._slave_sync.fetch_offsets_again()

    def lease_changed(self, valid: bool) -> None:
        """The lease began or ended. Reports to the history how a mastership continued without
        it."""
        if not valid:
            self._lease_lost_ms = self._path.clock_ms()
            self._gate.was_cut_off = False
        elif self._lease_lost_ms is not None and self._gate.is_master:
            self._report(
                "lease_back",
                awayMs=self._path.clock_ms() - self._lease_lost_ms,
                writesRefused=self._gate.was_cut_off,
            )
            self._lease_lost_ms = None
        self._gate.update(lease=valid, required_set_whole=self._ha.required_set_whole)

    def first_acked(self, waited_ms: int) -> None:
        """The first ack of a mastership ends the failover in the history. `waited_ms`: how long
        that write waited; else a time without writes would look like an outage."""
        self._report("first_ack", confirmOffset=self._store.confirm_offset, waitedMs=waited_ms)

    def hold_sends(self) -> int:
        self._hold.begin()
        # What this turn has put belongs to the log end that the election names (R33).
        self._path.end_turn()
        return self._store.max_phy_offset

    def release_sends(self) -> None:
        self._hold.release()

    def switch_progress(self, broker_id: int) -> SwitchProgress:
        sync = self._ha.sync_state
        follower = sync.follower(broker_id) if sync is not None else None
        if sync is None or follower is None:
            return SwitchProgress(self._store.max_phy_offset, -1, -1, 0, False)
        return SwitchProgress(
            log_end=self._store.max_phy_offset,
            confirm_offset=sync.log.confirm_offset,
            ack=follower.ack,
            ack_ms=follower.ack_ms,
            member=broker_id in sync.recorded,
            tables=follower.follows_tables(sync.master_epoch),
        )

    def role_will_change(self, view: RoleView, *, master: bool) -> None:
        """Called before the role change, which waits for the disk. Waiting clients get the new
        master's address now, and early sends at the new master are held until it opens."""
        # From here on this broker acks nothing to an older master (R2).
        self._ha.fence(view.master_epoch)
        if master:
            self._hold.begin()
        elif self._gate.is_master:
            self._leave_role(view.master_epoch, view.master_address)
            self._hold.release()

    def _leave_role(self, master_epoch: int, master_address: str = "") -> None:
        """R4: fails pending writes before a byte is cut, and refuses new ones."""
        if master_address:
            self._gate.leave(master_epoch, master_address)
        else:
            self._gate.opening(master_epoch)
        # The records of this turn are written now: the log must not grow after HA has read its end.
        self._store.end_turn()
        self._store.positions.end_mastership()  # R27: as a slave it keeps all that its master has
        failed = self._acks.fail_all(ResponseCode.SERVICE_NOT_AVAILABLE, ROLE_CHANGED_REMARK)
        if failed:
            log.warning("pending_acks_failed count=%d master_epoch=%d", failed, master_epoch)
