"""A broker's HA service: one listener, and whichever side the role calls for.

Role changes are serialized by one lock and take effect in the order that SAFETY.md wants: the slave
side has ended before this replica becomes master (R1), the log is whole and durable where it must
be (R26), and the epoch file ends with the new epoch (R25) before the first connection is taken.
Failing the acks of the old role is the broker's, before it calls (R4).
Origin: Java AutoSwitchHAService.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable

from epoch.entry import EpochEntry
from ha.clock import boot_ms
from ha.config import HAConfig
from ha.master_core import MasterCore, MasterEffect
from ha.master_shell import MasterShell, SlaveLink
from ha.open_links import OpenLinks
from ha.ports import HAListener, LogStore
from ha.slave_core import Phase, SlaveCore
from ha.slave_shell import ProvePeer, SlaveShell, local_log
from ha.sync_state import Proposal, SyncEffect, SyncState
from ha.waiting_links import WaitingLinks
from protocol.bodies import HAClientRuntimeInfo, HAConnectionRuntimeInfo, HARuntimeInfo
from protocol.errors import FencedError
from protocol.role_view import RoleView
from store.config import StoreConfig

log = logging.getLogger(__name__)


class AutoSwitchHAService:
    """Ships the log as master, follows it as slave, or does neither.

    All methods are called on the loop. `broker_id_of` is asked at each role change; it must be
    known (registered with the controller) by then. `prove_master` asks a broker who it is (1007);
    without it a truncation rests on the handshake's epoch alone.
    """

    def __init__(
        self,
        store: LogStore,
        config: HAConfig,
        listener: HAListener,
        *,
        store_config: StoreConfig,
        broker_id_of: Callable[[], int],
        prove_master: ProvePeer | None = None,
        bind_host: str = "0.0.0.0",
        clock_ms: Callable[[], int] = boot_ms,
    ) -> None:
        self._store = store
        self._config = config
        self._listener = listener
        self._store_config = store_config
        self._broker_id_of = broker_id_of
        self._prove_master = prove_master
        self._bind_host = bind_host
        self._now_ms = clock_ms
        self._lock = asyncio.Lock()
        self._server: asyncio.Server | None = None
        self._master: MasterShell | None = None
        self._slave: SlaveShell | None = None
        self._dead: frozenset[int] = frozenset()
        self._incarnations: dict[int, str] = {}
        self._links_made = 0
        self._open_links = OpenLinks()
        self._waiting_links: WaitingLinks[SlaveLink] = WaitingLinks()
        self.port = 0

    # -- life

    async def start(self) -> int:
        """Listens on haListenPort (0: any) and returns the port. No role yet: nobody is served."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            self._new_link, self._bind_host, self._store_config.ha_listen_port
        )
        self.port = int(self._server.sockets[0].getsockname()[1])
        log.info("ha_listening host=%s port=%d", self._bind_host, self.port)
        return self.port

    async def close(self) -> None:
        async with self._lock:
            self._end_slave()
            self._end_master()
            self._waiting_links.end_all()
            if self._server is not None:
                self._server.close()
                await self._server.wait_closed()
                self._server = None
            await self._open_links.wait_none()

    # -- role

    async def change_to_master(self, view: RoleView, *, now: int | None = None) -> int:
        """Takes mastership of `view.master_epoch`; returns where that epoch begins in the log.

        Raises FencedError if the epoch file knows this epoch or a newer one (R3: a restarted
        broker never goes on in its old epoch), and whatever the store raises if it is not fit.
        """
        async with self._lock:
            now_ms = self._now_ms() if now is None else now
            epoch = view.master_epoch
            master = self._master
            if master is not None and master.core.sync.master_epoch == epoch:
                self._adopt_as_master(master, view, now_ms)
                return master.core.sync.epoch_start_offset
            if epoch <= self._store.epochs.last_epoch:
                raise FencedError("change to master", epoch, self._store.epochs.last_epoch)
            if master is not None:
                return self._begin_next_epoch(master, view, now_ms)
            confirmed = self._slave.core.known_confirm if self._slave is not None else 0
            self._end_slave()
            await self._show_confirmed(confirmed)
            # R17: elected although suspect, by controllers or an operator that know it.
            chosen_suspect = view.unclean_epoch == epoch
            log_end = self._store.prepare_master(discard_damage=chosen_suspect)
            self._store.epochs.drop_above(log_end)
            self._append_epoch(epoch, log_end)
            self._begin_mastership(view, log_end, now_ms)
            log.info("ha_master master_epoch=%d log_end=%d", epoch, log_end)
            return log_end

    async def change_to_slave(self, view: RoleView) -> None:
        """Follows `view.master_ha_address` at once. A connection to that very master stays.

        Raises FencedError if this log has already accepted a newer epoch (R2).
        """
        async with self._lock:
            last_epoch = self._store.epochs.last_epoch
            if view.master_epoch < last_epoch:
                raise FencedError("change to slave", view.master_epoch, last_epoch)
            self._end_master()
            if self._slave is not None:
                self._slave.follow(view)
                return
            # R24: what a damaged log holds behind the damage is fetched again.
            self._store.discard_damaged_tail()
            now_ms = self._now_ms()
            core = SlaveCore(
                self._broker_id_of(),
                view,
                local_log(self._store),
                self._config.slave_policy(
                    ha_sync_flush=self._store_config.ha_sync_flush,
                    proof_needed=self._prove_master is not None,
                ),
                now_ms,
            )
            self._slave = SlaveShell(
                core,
                self._store,
                self._listener,
                self._now_ms,
                self._prove_master,
                self._open_links,
            )
            self._slave.start()
            log.info(
                "ha_slave master_epoch=%d master=%s", view.master_epoch, view.master_ha_address
            )

    async def stand_down(self, view: RoleView | None = None) -> None:
        """No master is known: every HA connection ends, nothing is written, acked or confirmed."""
        async with self._lock:
            self._end_slave()
            self._end_master()

    def adopt_view(self, view: RoleView) -> None:
        """A newer set of the same mastership (R20)."""
        if self._master is not None:
            self._adopt_as_master(self._master, view, self._now_ms())
        elif self._slave is not None and view.master_epoch == self._slave.core.view.master_epoch:
            self._slave.follow(view)

    def set_dead(self, broker_ids: frozenset[int]) -> None:
        """The members of the group that the controllers call dead right now (R14)."""
        self._dead = broker_ids
        if self._master is not None:
            now_ms = self._now_ms()
            self._settle(self._master, self._master.core.sync.set_dead(broker_ids, now_ms))

    # -- master

    def notify_append(self, written_offset: int) -> None:
        """The log ends at `written_offset` (a message end). Once per loop turn, as master."""
        if self._master is not None:
            self._master.appended(written_offset)

    def notify_flushed(self, flushed_offset: int) -> None:
        """All below `flushed_offset` is on this broker's disk."""
        if self._master is not None:
            self._master.flushed(flushed_offset)
        elif self._slave is not None:
            self._slave.flushed()

    def proposal_applied(self, view: RoleView) -> None:
        """The controller took the proposal; `view` shows the new set."""
        self.adopt_view(view)

    def proposal_refused(self, code: int, remark: str) -> None:
        """The controller answered the proposal with `code`; it was not applied."""
        log.warning("sync_state_set_refused code=%d remark=%s", code, remark)
        if self._master is not None:
            now_ms = self._now_ms()
            self._settle(self._master, self._master.core.sync.refused(code, now_ms))

    def proposal_unknown(self) -> None:
        """No answer came. The members stay required (R11) until one of the above is called for
        the same request, or a view with a higher syncStateSetEpoch arrives."""
        log.warning("sync_state_set_unknown")
        if self._master is not None:
            self._master.core.sync.unknown()

    # -- facts

    @property
    def sync_state(self) -> SyncState | None:
        """The acting mastership's set, None where this broker is not master."""
        return self._master.core.sync if self._master is not None else None

    @property
    def is_master(self) -> bool:
        return self._master is not None

    @property
    def confirm_offset(self) -> int:
        """All below is confirmed; as slave, as far as the store shows it."""
        sync = self.sync_state
        return self._store.confirm_offset if sync is None else sync.confirm_offset

    @property
    def required_set(self) -> frozenset[int]:
        """As master: whose acks a write waits for, this broker included (R1). Else empty."""
        sync = self.sync_state
        return frozenset() if sync is None else sync.required_set

    @property
    def required_set_whole(self) -> bool:
        """As master: every required member is connected and following."""
        sync = self.sync_state
        return sync is not None and sync.required_set_whole

    @property
    def in_sync_count(self) -> int:
        """As master: the size of the recorded SyncStateSet. Else 0."""
        sync = self.sync_state
        return 0 if sync is None else len(sync.recorded)

    @property
    def pending_proposal(self) -> Proposal | None:
        sync = self.sync_state
        return None if sync is None else sync.proposal

    @property
    def is_following(self) -> bool:
        """As slave: the history is settled and the log streams."""
        return self._slave is not None and self._slave.core.phase is Phase.TRANSFER

    def runtime_info(self) -> HARuntimeInfo:
        """What request 907 answers. Times are wall clock."""
        if self._master is not None:
            return self._master_info(self._master)
        info = HAClientRuntimeInfo()
        if self._slave is not None:
            core = self._slave.core
            now_ms = self._now_ms()
            wall_ms = time.time_ns() // 1_000_000
            info = HAClientRuntimeInfo(
                master_addr=core.view.master_ha_address,
                transferred_byte_in_second=self._slave.rate.sample(core.bytes_received, now_ms),
                max_offset=self._store.max_phy_offset,
                last_read_timestamp=wall_ms - (now_ms - core.read_ms),
                last_write_timestamp=wall_ms - (now_ms - core.sent_ms),
                master_flush_offset=0,
            )
        return HARuntimeInfo(
            master=False,
            master_commit_log_max_offset=self._store.max_phy_offset,
            in_sync_slave_nums=0,
            ha_connection_info=[],
            ha_client_runtime_info=info,
        )

    def _master_info(self, master: MasterShell) -> HARuntimeInfo:
        sync = master.core.sync
        slaves = [
            HAConnectionRuntimeInfo(
                addr=connection.address,
                slave_ack_offset=connection.acked,
                diff=sync.written - max(0, connection.acked),
                in_sync=connection.broker_id in sync.recorded,
                transferred_byte_in_second=rate,
                transfer_from_where=connection.start_offset,
            )
            for connection, rate in master.slaves()
        ]
        return HARuntimeInfo(
            master=True,
            master_commit_log_max_offset=sync.written,
            in_sync_slave_nums=sum(slave.in_sync for slave in slaves),
            ha_connection_info=slaves,
            ha_client_runtime_info=HAClientRuntimeInfo(),
        )

    # -- inside

    def _new_link(self) -> SlaveLink:
        self._links_made += 1
        return SlaveLink(
            self._links_made, self._attach, self._waiting_links.remove, self._open_links
        )

    def _attach(self, link: SlaveLink) -> None:
        if self._master is not None:
            link.adopt(self._master)
        else:
            self._waiting_links.add(link)

    def _end_slave(self) -> None:
        slave, self._slave = self._slave, None
        if slave is not None:
            slave.close()

    async def _show_confirmed(self, confirmed: int) -> None:
        """Lets the store show what is confirmed, in its own slices, before it counts the rest.

        A replica that has just fetched a whole log may have seconds of it to show: the loop must
        go on meanwhile, or the controllers take the new master for dead.
        """
        store = self._store
        store.advance_confirm_offset(confirmed)
        shown, idle_turns = store.confirm_offset, 0
        while shown < confirmed and idle_turns < 3:
            await asyncio.sleep(0)
            idle_turns = idle_turns + 1 if store.confirm_offset == shown else 0
            shown = store.confirm_offset

    def _end_master(self) -> None:
        master, self._master = self._master, None
        if master is not None:
            master.close()

    def _append_epoch(self, epoch: int, start_offset: int) -> None:
        appended = self._store.epochs.append(EpochEntry(epoch, start_offset))
        assert appended, f"epoch {epoch} does not fit {self._store.epochs.entries}"

    def _begin_mastership(self, view: RoleView, log_end: int, now_ms: int) -> None:
        store = self._store
        sync = SyncState(
            broker_id=self._broker_id_of(),
            master_epoch=view.master_epoch,
            recorded=view.sync_state_set,
            sync_state_set_epoch=view.sync_state_set_epoch,
            epoch_start_offset=log_end,
            written=log_end,
            flushed=store.flushed_offset,
            confirm_offset=max(0, store.confirm_offset),
            now_ms=now_ms,
            policy=self._config.sync_policy(
                min_in_sync_replicas=self._store_config.min_in_sync_replicas,
                sync_flush=self._store_config.sync_flush,
            ),
            candidates=_candidates(view),
        )
        self._incarnations = {r.broker_id: r.incarnation for r in view.replicas}
        core = MasterCore(
            sync,
            self._config.master_policy(segment_size=self._store_config.mapped_file_size_commit_log),
            store.epochs.entries,
            min_offset=max(0, store.min_phy_offset),
            now_ms=now_ms,
        )
        self._master = MasterShell(core, store, self._listener, self._now_ms)
        effects: list[MasterEffect] = list(sync.set_dead(self._dead, now_ms))
        self._master.start(effects)
        for link in self._waiting_links.take_all():
            link.adopt(self._master)

    def _begin_next_epoch(self, master: MasterShell, view: RoleView, now_ms: int) -> int:
        """The same master, elected anew: connections and acks stay, the history grows."""
        sync = master.core.sync
        self._drop_restarted(master, view, now_ms)
        log_end = self._store.max_phy_offset
        master.appended(log_end)
        self._append_epoch(view.master_epoch, log_end)
        effects = sync.begin_epoch(
            view.master_epoch,
            log_end,
            view.sync_state_set,
            view.sync_state_set_epoch,
            now_ms,
            candidates=_candidates(view),
        )
        master.epochs_changed()
        self._settle(master, effects)
        log.info("ha_master_again master_epoch=%d log_end=%d", view.master_epoch, log_end)
        return log_end

    def _adopt_as_master(self, master: MasterShell, view: RoleView, now_ms: int) -> None:
        sync = master.core.sync
        if view.master_epoch != sync.master_epoch:
            return  # another mastership: the role change that belongs to it is on its way
        self._drop_restarted(master, view, now_ms)
        effects = sync.adopt(
            view.sync_state_set,
            view.sync_state_set_epoch,
            now_ms,
            candidates=_candidates(view),
        )
        self._settle(master, effects)

    def _drop_restarted(self, master: MasterShell, view: RoleView, now_ms: int) -> None:
        """R12: what an earlier process of a replica acked may have died with it, so only acks of a
        connection made after this view count. The new process dials again at once."""
        for replica in view.replicas:
            known = self._incarnations.get(replica.broker_id, replica.incarnation)
            self._incarnations[replica.broker_id] = replica.incarnation
            if known != replica.incarnation:
                master.perform(master.core.restarted(replica.broker_id, now_ms))

    def _settle(self, master: MasterShell, effects: Iterable[SyncEffect]) -> None:
        master.perform(master.core.confirmed(list(effects), self._now_ms()))


def _candidates(view: RoleView) -> frozenset[int] | None:
    """Who may be in the set: the registered replicas that are no learners (R12)."""
    if not view.replicas:
        return None
    return frozenset(r.broker_id for r in view.replicas if not r.learner)


__all__ = ["AutoSwitchHAService"]
