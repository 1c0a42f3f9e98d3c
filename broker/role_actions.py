"""What a role change does to this broker: the order of steps in which nothing acknowledged is lost.

Becoming master: refuse new writes, fail what waits for acks (R4), let HA truncate an incomplete
tail and write the epoch (R25, R26), open, tell the name servers. Becoming slave: the same first two
steps, then follow. Every step before the first await happens in one loop turn, so no ack of the old
role can slip through. Implements `replicas_manager.actions.BrokerActions`.
Origin: ReplicasManager.changeToMaster and changeToSlave in Java.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from broker.pending_acks import PendingAcks
from broker.role_gate import RoleGate
from broker.send_hold import SendHold
from broker.slave_sync import Followed, SlaveSynchronize
from ha.service import AutoSwitchHAService
from protocol.codes import ResponseCode
from protocol.role_view import RoleView
from replicas_manager.actions import LogFacts
from replicas_manager.switch import SwitchProgress
from store.consumer_offset import ConsumerOffsetManager
from store.message_store import MessageStore
from store.topic_config import TopicConfigManager

log = logging.getLogger(__name__)

ROLE_CHANGED_REMARK = "the role of this broker changed while the message waited: send it again"


class EventReport(Protocol):
    """Adds an event to the group's history."""

    def __call__(self, kind: str, **fields: object) -> None: ...


class RoleActions:
    """BrokerActions over store, HA, gate and acks. `routes_changed` tells the name servers."""

    def __init__(
        self,
        store: MessageStore,
        ha: AutoSwitchHAService,
        gate: RoleGate,
        acks: PendingAcks,
        topics: TopicConfigManager,
        offsets: ConsumerOffsetManager,
        slave_sync: SlaveSynchronize,
        *,
        routes_changed: Callable[[], None],
        role_left: Callable[[], None],
        hold: SendHold,
        end_turn: Callable[[], None],
        clock_ms: Callable[[], int],
    ) -> None:
        self._store = store
        self._clock_ms = clock_ms
        self._lease_lost_ms: int | None = None
        self._hold = hold
        self._end_turn = end_turn
        self._ha = ha
        self._gate = gate
        self._acks = acks
        self._topics = topics
        self._offsets = offsets
        self._slave_sync = slave_sync
        self._routes_changed = routes_changed
        self._role_left = role_left
        self.report: EventReport = lambda kind, **fields: None
        self.first_ack_due = False

    def log_facts(self) -> LogFacts:
        store = self._store
        return LogFacts(
            epoch=store.epochs.last_epoch,
            max_offset=store.trusted_end,
            confirm_offset=store.confirm_offset,
            min_offset=store.min_phy_offset,
            log_id=store.log_id,
            suspect=store.suspect,
        )

    async def become_master(self, view: RoleView, role_durable: Awaitable[None]) -> None:
        self._leave_role(view.master_epoch)
        self._slave_sync.follow(None)
        log_end = await self._ha.change_to_master(view)
        await role_durable  # R2: nothing is acknowledged in an epoch that a crash could forget
        self._acks.begin_epoch(view.master_epoch)
        self._topics.set_state_version(view.master_epoch)
        self._offsets.set_state_version(view.master_epoch)
        self.first_ack_due = True
        self._lease_lost_ms = None
        self._gate.open()
        self._hold.release()
        self._routes_changed()
        log.info("master_opened master_epoch=%d log_end=%d", view.master_epoch, log_end)
        self.report("opened", maxOffset=log_end, confirmOffset=self._store.confirm_offset)

    async def become_slave(self, view: RoleView) -> None:
        self._leave_role(view.master_epoch, view.master_address)
        self._store.stop_writes()
        self._role_left()
        self._slave_sync.follow(Followed(view.master_address, view.master_epoch))
        await self._ha.change_to_slave(view)
        self._gate.follow(view.master_epoch, view.master_address)
        self._hold.release()
        self._topics.set_state_version(view.master_epoch)
        self._routes_changed()

    async def stand_down(self, view: RoleView | None) -> None:
        self._leave_role(view.master_epoch if view else self._gate.master_epoch)
        self._gate.fence()
        self._store.stop_writes()
        self._role_left()
        self._slave_sync.follow(None)
        self._hold.release()
        await self._ha.stand_down(view)

    def adopt_view(self, view: RoleView) -> None:
        self._ha.adopt_view(view)

    def set_dead(self, broker_ids: frozenset[int]) -> None:
        self._ha.set_dead(broker_ids)

    def proposal_applied(self, view: RoleView) -> None:
        self._ha.proposal_applied(view)

    def proposal_refused(self, code: int, remark: str) -> None:
        log.warning("set_proposal_refused code=%d remark=%r", code, remark)
        self._ha.proposal_refused(code, remark)

    def proposal_unknown(self) -> None:
        self._ha.proposal_unknown()

    def lease_changed(self, valid: bool) -> None:
        """Tells the history, too, how a mastership went on after its lease had lapsed."""
        if not valid:
            self._lease_lost_ms = self._clock_ms()
            self._gate.was_cut_off = False
        elif self._lease_lost_ms is not None and self._gate.is_master:
            self.report(
                "lease_back",
                awayMs=self._clock_ms() - self._lease_lost_ms,
                writesRefused=self._gate.was_cut_off,
            )
            self._lease_lost_ms = None
        self._gate.standing(lease=valid, required_set_whole=self._ha.required_set_whole)

    def acked(self, waited_ms: int) -> None:
        """The first ack of a mastership is the end of a failover's story.

        `waited_ms`: how long ago that write came, so that the story can tell an outage from a time
        in which nobody wrote.
        """
        if self.first_ack_due:
            self.first_ack_due = False
            self.report("first_ack", confirmOffset=self._store.confirm_offset, waitedMs=waited_ms)

    # --- planned switch: SwitchActions (R33) ---

    def hold_sends(self) -> int:
        self._hold.begin()
        self._end_turn()
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
            confirm_offset=sync.confirm_offset,
            ack=follower.ack,
            ack_ms=follower.ack_ms,
            member=broker_id in sync.recorded,
        )

    def role_comes(self, view: RoleView, *, master: bool) -> None:
        """Clients that wait here are sent to the new master before this broker's own role change,
        which waits for the disk; those that come early to the new master wait until it opens."""
        if master:
            self._hold.begin()
        elif self._gate.is_master:
            self._leave_role(view.master_epoch, view.master_address)
            self._hold.release()

    def _leave_role(self, master_epoch: int, master_address: str = "") -> None:
        """R4: what waits is failed before a byte is cut, and nothing new is taken meanwhile.

        What was put in this very turn is written first: the log must not grow behind HA's back.
        """
        if master_address:
            self._gate.leave(master_epoch, master_address)
        else:
            self._gate.opening(master_epoch)
        self._store.end_turn()
        failed = self._acks.fail_all(ResponseCode.SERVICE_NOT_AVAILABLE, ROLE_CHANGED_REMARK)
        if failed:
            log.warning("pending_acks_failed count=%d master_epoch=%d", failed, master_epoch)
