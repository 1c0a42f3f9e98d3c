"""A broker's HA service with controllers: a listener, and a master or slave side by its role. A
lock serializes role changes. Before a new master accepts the first connection, its slave side has
ended (R1), its log is whole and durable (R26), and its epoch file ends with the new epoch (R25).
The broker has already failed the pending acks of the old role (R4). Origin: Java
AutoSwitchHAService."""

from __future__ import annotations

import asyncio
import logging
import secrets
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from batonmq.ha.config import HAConfig
from batonmq.ha.java_peer import JavaMaster
from batonmq.ha.lineage import SAMPLE_BYTES, LogSample
from batonmq.ha.links import SlaveLink, WaitingLinks
from batonmq.ha.master_core import MasterCore
from batonmq.ha.master_shell import AutoSwitchLink, MasterShell, append_epoch
from batonmq.ha.proof import Registrations
from batonmq.ha.shells import AutoSwitchListener, HAService, slave_info
from batonmq.ha.slave_core import SlaveCore, SlavePhase
from batonmq.ha.slave_shell import SlaveShell, local_log
from batonmq.ha.sync_state import RecordedSet, SyncState, WrittenLog
from batonmq.ha.wire import SLAVE_OPENING_SIZE_MAX, HAIdentity, SlaveFrameReader
from batonmq.protocol.bodies import HARuntimeInfo
from batonmq.protocol.errors import FencedError
from batonmq.protocol.role_view import RoleView
from batonmq.runtime.clock import boot_ms

if TYPE_CHECKING:
    from batonmq.store.message_store import MessageStore

log = logging.getLogger(__name__)


class StoreSamples:
    """Samples of a store's log, for comparing two logs in a handshake (R47). They do not cross
    segments of `segment_size`, because logs may begin at different ones."""

    def __init__(self, store: MessageStore, segment_size: int) -> None:
        self._store = store
        self._segment_size = segment_size

    @property
    def lost_epochs(self) -> bool:
        return self._store.trust.lost_epochs

    @property
    def lineage(self) -> str:
        return self._store.log.lineage.name

    def take(self, end: int) -> LogSample | None:
        segment_start = (end - 1) - (end - 1) % self._segment_size
        size = end - max(segment_start, end - SAMPLE_BYTES)
        crc = self.crc(end, size)
        return None if crc is None else LogSample(end, size, crc)

    def crc(self, end: int, size: int) -> int | None:
        begin = end - size
        if not 0 < size <= SAMPLE_BYTES or begin < max(0, self._store.min_phy_offset):
            return None
        held = self._store.log.view(begin, size)
        return zlib.crc32(held) if len(held) == size else None

    def fault_before(self, end: int) -> str:
        return self._store.trust.fault_before(end)


class AutoSwitchHAService(HAService):
    """Sends the log as master, receives it as slave, or does neither. `identity_of` is called at
    each role change, when the broker is registered. `java_master` asks a Java master for its
    identity and HA address."""

    _mode = "controllers"

    def __init__(
        self,
        store: MessageStore,
        config: HAConfig,
        listener: AutoSwitchListener,
        *,
        identity_of: Callable[[], HAIdentity],
        java_master: JavaMaster,
        clock_ms: Callable[[], int] = boot_ms,
    ) -> None:
        super().__init__(store, config, clock_ms)
        self._listener = listener
        self._identity_of = identity_of
        self._java_master = java_master
        self._samples = StoreSamples(store, store.config.mapped_file_size_commit_log)
        self._lock = asyncio.Lock()
        self._master: MasterShell | None = None
        self._slave: SlaveShell | None = None
        self._dead: frozenset[int] = frozenset()
        self._tables_epoch = -1
        self._waiting_links: WaitingLinks[SlaveFrameReader] = WaitingLinks()

    async def close(self) -> None:
        async with self._lock:
            self._end(slave=True, master=True)
            self._waiting_links.end_all()
            await self._open_links.close()

    # -- role

    async def change_to_master(self, view: RoleView) -> int:
        """Becomes master of `view.master_epoch`; returns the log's end. Raises FencedError if the
        epoch file has this epoch or a newer one (a restarted broker never continues its old epoch,
        R3), and what the store raises."""
        async with self._lock:
            self._store.log.health.check_usable()
            epoch = view.master_epoch
            master = self._master
            if master is not None and master.core.sync.master_epoch == epoch:
                # A repetition: another part of the broker failed in this role change.
                master.adopt(view)
                return master.core.sync.epoch_start_offset
            if epoch <= self._store.epochs.last_epoch:
                raise FencedError("change to master", epoch, self._store.epochs.last_epoch)
            if master is not None:
                # Elected again: its log is already the group's log, and slaves stay connected.
                return master.begin_next_epoch(view)
            # The confirmed end that it knows as a slave; its store may show less so far.
            confirmed = self._slave.core.log.known_confirm if self._slave is not None else 0
            self._end(slave=True)
            await self._show_confirmed(confirmed)
            # R17: an operator may have elected a suspect log; then its damaged part is dropped.
            chosen_suspect = view.unclean_epoch == epoch
            log_end = self._store.prepare_master(discard_damage=chosen_suspect)
            self._store.epochs.drop_above(log_end)
            begins = log_end
            if not self._store.epochs.entries:
                # After classic mode there are no epochs, and without one slaves could not fetch the
                # old bytes.
                begins = self._store.min_phy_offset
            lineage = self._store.log.lineage
            if not lineage.name or log_end == 0:
                # R47: this log shares no byte with an earlier history, so it begins its own.
                lineage.enter(secrets.token_hex(16))
            append_epoch(self._store.epochs, epoch, begins)
            self._begin_mastership(view, log_end)
            log.info("ha_master master_epoch=%d log_end=%d", epoch, log_end)
            return log_end

    async def change_to_slave(self, view: RoleView) -> None:
        """Follows `view.master_ha_address`. A connection to that master stays, unless this log is
        damaged: then it is cut there and fetched again (R24), except on a member of the set, which
        may be elected for those bytes. Raises FencedError if this log has a newer epoch (R2), and
        what the store raises."""
        async with self._lock:
            self._store.log.health.check_usable()
            last_epoch = self._store.epochs.last_epoch
            if view.master_epoch < last_epoch:
                raise FencedError("change to slave", view.master_epoch, last_epoch)
            self._end(master=True)
            member = self._identity_of().broker_id in view.sync_state_set
            if self._slave is not None and (member or not self._store.trust.must_refetch):
                self._slave.follow(view)
                return
            self._end(slave=True)
            self._store.trust.discard_damaged_tail()
            now_ms = self._now_ms()
            core = SlaveCore(
                self._identity_of(),
                view,
                local_log(self._store),
                self._config.slave_policy(
                    ha_sync_flush=self._store.config.ha_sync_flush,
                    segment_size=self._store.config.mapped_file_size_commit_log,
                ),
                now_ms,
                self._secret,
            )
            self._slave = SlaveShell(
                core,
                self._store,
                self._listener,
                self._now_ms,
                self._java_master,
                self._open_links,
                self._samples,
            )
            self._slave.tables_followed(self._tables_epoch)
            self._slave.start()
            log.info(
                "ha_slave failover=%s/%d master=%s",
                view.broker_name,
                view.master_epoch,
                view.master_ha_address,
            )

    async def stand_down(self) -> None:
        """No master is known: ends all HA connections, so nothing is written, acked or
        confirmed."""
        async with self._lock:
            self._end(slave=True, master=True)

    def fence(self, master_epoch: int) -> None:
        """A view of that epoch was taken, and its role change waits for the disk. From now on a
        slave sends no ack to the master of an older epoch (R2)."""
        if self._slave is not None:
            self._slave.core.fenced_epoch = master_epoch

    def adopt_view(self, view: RoleView) -> None:
        """A newer set of the same mastership (R20)."""
        if self._master is not None:
            self._master.adopt(view)
        # Views of other epochs come with a role change, which may cut the log first.
        elif self._slave is not None and view.master_epoch == self._slave.core.view.master_epoch:
            self._slave.follow(view)

    def dial_now(self) -> None:
        if self._slave is not None:
            self._slave.follow(self._slave.core.view)

    def tables_followed(self, master_epoch: int) -> None:
        """On a slave: reports to the master that the tables of that epoch are here (R42); -1: they
        are outdated."""
        self._tables_epoch = master_epoch
        if self._slave is not None:
            self._slave.tables_followed(master_epoch)

    def set_dead(self, broker_ids: frozenset[int]) -> None:
        """The group members that the controllers report dead now (R14)."""
        self._dead = broker_ids
        if self._master is not None:
            self._master.dead_changed(broker_ids)

    # -- master

    def notify_append(self, written_offset: int) -> None:
        if self._master is not None:
            self._master.appended(written_offset)

    def notify_flushed(self, flushed_offset: int) -> None:
        if self._master is not None:
            self._master.flushed(flushed_offset)
        elif self._slave is not None:
            self._slave.flushed()

    def proposal_refused(self, code: int, remark: str) -> None:
        """The controllers refused the proposal."""
        log.warning("sync_state_set_refused code=%d remark=%s", code, remark)
        if self._master is not None:
            self._master.proposal_refused(code)

    def proposal_unknown(self) -> None:
        """No answer came to the proposal. Its members stay required (R11) until the same request is
        answered or a view with a higher syncStateSetEpoch arrives."""
        log.warning("sync_state_set_unknown")

    # -- reading

    @property
    def sync_state(self) -> SyncState | None:
        """The state of this mastership; None if not master."""
        return self._master.core.sync if self._master is not None else None

    @property
    def required_set(self) -> frozenset[int]:
        """On a master: the members whose acks a write waits for, itself included (R1). Else
        empty."""
        sync = self.sync_state
        return frozenset() if sync is None else sync.required_set

    @property
    def required_set_whole(self) -> bool:
        """On a master: whether all required members are connected and following."""
        sync = self.sync_state
        return sync is not None and sync.required_set_whole

    @property
    def following_problem(self) -> str:
        return self._slave.problem if self._slave is not None else ""

    @property
    def followed(self) -> RoleView | None:
        """On a slave: the view of the master that it follows, heard within the last 2 s (R14); else
        None."""
        core = self._slave.core if self._slave is not None else None
        return core.view if core is not None and core.phase is SlavePhase.TRANSFER else None

    @property
    def in_sync_count(self) -> int:
        sync = self.sync_state
        return 0 if sync is None else len(sync.recorded)

    def runtime_info(self) -> HARuntimeInfo:
        if self._master is not None:
            return self._master.runtime_info()
        client = self._slave.runtime_info() if self._slave is not None else None
        return slave_info(self._store.max_phy_offset, client)

    # -- inside

    def _new_link(self) -> AutoSwitchLink:
        self._links_made += 1
        return SlaveLink(
            self._links_made,
            self._attach,
            self._waiting_links.remove,
            self._open_links,
            SlaveFrameReader(),
            SLAVE_OPENING_SIZE_MAX,
        )

    def _attach(self, link: AutoSwitchLink) -> None:
        if self._master is not None:
            link.adopt(self._master)
        else:
            # Slaves hear of an election at the same time as the new master, and may connect before
            # it is ready.
            self._waiting_links.add(link)

    def _end(self, *, slave: bool = False, master: bool = False) -> None:
        if slave and self._slave is not None:
            ending, self._slave = self._slave, None
            ending.close()
        if master and self._master is not None:
            deposed, self._master = self._master, None
            deposed.close()

    async def _show_confirmed(self, confirmed: int) -> None:
        """Makes confirmed messages visible, in slices. A replica that has just fetched a whole log
        may need seconds; if the loop stood still, the controllers would declare the new master
        dead."""
        store = self._store
        store.advance_confirm_offset(confirmed)
        shown, idle_turns = store.confirm_offset, 0
        while shown < confirmed and idle_turns < 3:
            await asyncio.sleep(0)
            idle_turns = idle_turns + 1 if store.confirm_offset == shown else 0
            shown = store.confirm_offset

    def _begin_mastership(self, view: RoleView, log_end: int) -> None:
        own = self._identity_of()
        store, config, now_ms = self._store, self._store.config, self._now_ms()
        policy = self._config.sync_policy(
            min_in_sync_replicas=config.min_in_sync_replicas, sync_flush=config.sync_flush
        )
        written = WrittenLog(
            written=log_end,
            flushed=store.log.flushed_offset,
            confirm_offset=max(0, store.confirm_offset),
            now_ms=now_ms,
            policy=policy,
        )
        sync = SyncState(
            own.broker_id, view.master_epoch, log_end, RecordedSet.of(view), written, now_ms, policy
        )
        core = MasterCore(
            sync,
            self._config.master_policy(segment_size=config.mapped_file_size_commit_log),
            store.epochs.entries,
            min_offset=max(0, store.min_phy_offset),
            now_ms=now_ms,
            registrations=Registrations(own, view.replicas, self._secret),
            samples=self._samples,
        )
        self._master = MasterShell(core, store, self._listener, self._now_ms)
        self._master.perform(core.dead_changed(self._dead, now_ms))
        for link in self._waiting_links.take_all():
            link.adopt(self._master)
