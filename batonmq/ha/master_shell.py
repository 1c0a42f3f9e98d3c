"""Sockets and timer of the master side. It performs the master core's effects."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from batonmq.epoch.entry import EpochEntry
from batonmq.ha.links import SlaveLink
from batonmq.ha.master_core import CloseConnection, MasterCore, MasterEffect, SendBytes, SendLog
from batonmq.ha.node_secret import Unproven
from batonmq.ha.shells import AutoSwitchListener, MasterLinks, master_info
from batonmq.ha.sync_state import ConfirmAdvanced, ProposeSet, RecordedSet
from batonmq.ha.wire import SlaveFrameReader
from batonmq.protocol.bodies import HAConnectionRuntimeInfo, HARuntimeInfo
from batonmq.protocol.errors import RemoteProtocolError
from batonmq.protocol.role_view import RoleView

if TYPE_CHECKING:
    from batonmq.epoch.file_cache import EpochFileCache
    from batonmq.store.message_store import MessageStore

log = logging.getLogger(__name__)

_FLUSH_S = 1.0  # time to deliver what was sent before closing


AutoSwitchLink = SlaveLink[SlaveFrameReader]


class MasterShell(MasterLinks[SlaveFrameReader, MasterEffect]):
    """The HA connections of one mastership."""

    def __init__(
        self,
        core: MasterCore,
        store: MessageStore,
        listener: AutoSwitchListener,
        now_ms: Callable[[], int],
    ) -> None:
        super().__init__(store, now_ms)
        self.core: MasterCore = core
        self._listener = listener
        self._leaving: set[AutoSwitchLink] = set()
        self._reported = ""
        self._entries = store.epochs.entries

    def close(self) -> None:
        super().close()
        for link in self._leaving:
            link.end()
        self._leaving.clear()

    def received(self, link: AutoSwitchLink, data: bytes) -> None:
        try:
            handshake, acks = link.reader.feed(data)
        except RemoteProtocolError as error:
            self._drop(link, str(error))
            return
        now_ms = self._now_ms()
        if handshake is not None:
            log.info(
                "ha_slave_connected address=%s broker_id=%d learner=%s identity=%s",
                link.address,
                handshake.broker_id,
                handshake.async_learner,
                handshake.identity or "none",
            )
            # First: the answer must offer no epoch and no byte that has expired.
            self.perform(self._poll_store(now_ms))
            self.perform(self.core.handshake_received(link.connection_id, handshake, now_ms))
        # In the order in which they count: a mark is about the acks behind it.
        reader = link.reader
        if reader.proof:
            self.perform(self.core.proof_received(link.connection_id, reader.proof, now_ms))
        if reader.marked:
            self.perform(
                self.core.marks_received(
                    link.connection_id, reader.entered_epoch, reader.tables_epoch, now_ms
                )
            )
        if acks:
            self.perform(self.core.acks_received(link.connection_id, acks, now_ms))

    def flushed(self, flushed: int) -> None:
        self.perform(self.core.flushed(flushed, self._now_ms()))

    def adopt(self, view: RoleView) -> None:
        """A newer set of this mastership. Views of other ones come with a role change."""
        if view.master_epoch == self.core.sync.master_epoch:
            self.perform(self._poll_store(self._now_ms()))
            # Before the set: an ack of an earlier process must not count for a new member (R12).
            self.perform(self.core.replicas_changed(view.replicas, self._now_ms()))
            self.perform(self.core.set_adopted(RecordedSet.of(view), self._now_ms()))

    def begin_next_epoch(self, view: RoleView) -> int:
        """This master was elected again. Returns the log's end."""
        epoch = view.master_epoch
        log_end = self._store.max_phy_offset
        # The old epoch's last bytes first: they end where the new one begins.
        self.appended(log_end)
        append_epoch(self._store.epochs, epoch, log_end)
        self._entries = self._store.epochs.entries
        recorded = RecordedSet.of(view)
        self.perform(self.core.epoch_begun(epoch, recorded, self._entries, self._now_ms()))
        self.perform(self.core.replicas_changed(view.replicas, self._now_ms()))
        log.info("ha_master_again master_epoch=%d log_end=%d", epoch, log_end)
        return log_end

    def dead_changed(self, broker_ids: frozenset[int]) -> None:
        self.perform(self.core.dead_changed(broker_ids, self._now_ms()))

    def proposal_refused(self, code: int) -> None:
        self.perform(self.core.proposal_refused(code, self._now_ms()))

    def perform(self, effects: Iterable[MasterEffect]) -> None:
        for effect in effects:
            if isinstance(effect, SendLog):
                self._send_log(effect)
            elif isinstance(effect, ConfirmAdvanced):
                self._listener.on_confirm_offset(effect.offset)
            elif isinstance(effect, SendBytes):
                self._send_bytes(effect)
            elif isinstance(effect, CloseConnection):
                self._close_link(effect)
            elif isinstance(effect, Unproven):
                self._listener.on_unproven(effect)
            elif isinstance(effect, ProposeSet):
                log.info(
                    "sync_state_set_proposed add=%s remove=%s reason=%r confirm_offset=%d",
                    sorted(effect.proposal.add),
                    sorted(effect.proposal.remove),
                    effect.proposal.reason,
                    effect.proposal.confirm_offset,
                )
                self._listener.on_proposal(effect.proposal)
            else:
                log.info(
                    "ha_slave_following broker_id=%d offset=%d", effect.broker_id, effect.offset
                )
                self._listener.on_slave_following(effect.broker_id)
                self._check_record(effect.offset)
        if self.core.wakeup_ms < self._armed_ms:
            self._arm()

    def _check_record(self, offset: int) -> None:
        """A slave that received a bad record asks for it again: checks our copy (R24). Normally
        only the receiver checks."""
        fault = self._store.trust.fault_at(offset)
        if fault and fault != self._reported:  # each slave asks again, once a second and longer
            self._reported = fault
            log.error("ha_own_log_damaged reason=%s", fault)
            self._listener.on_damage(fault)

    def _close_link(self, effect: CloseConnection) -> None:
        link = self._links.pop(effect.connection_id, None)
        if link is not None:
            log.warning("ha_slave_dropped address=%s reason=%s", link.address, effect.reason)
            if effect.flush:
                self._end_after_flush(link)
            else:
                link.end()

    def _end_after_flush(self, link: AutoSwitchLink) -> None:
        """Gives the peer a second to get our last frame (R27)."""
        self._leaving.add(link)
        link.end_after_flush()
        self._loop.call_later(_FLUSH_S, self._cut_off, link)

    def _cut_off(self, link: AutoSwitchLink) -> None:
        self._leaving.discard(link)
        link.end()

    def _tick(self) -> None:
        now_ms = self._now_ms()
        self.perform(self._poll_store(now_ms) + self.core.tick(now_ms))

    def _poll_store(self, now_ms: int) -> list[MasterEffect]:
        """Segments and their epochs may have expired: stop offering them to slaves."""
        effects = self.core.log_trimmed(max(0, self._store.min_phy_offset), now_ms)
        if self._store.epochs.entries is not self._entries:
            self._entries = self._store.epochs.entries
            effects += self.core.epochs_changed(self._entries, now_ms)
        return effects

    def runtime_info(self) -> HARuntimeInfo:
        sync, now_ms = self.core.sync, self._now_ms()
        slaves = [
            HAConnectionRuntimeInfo(
                addr=connection.address,
                slave_ack_offset=connection.acked,
                diff=sync.log.written - max(0, connection.acked),
                in_sync=connection.broker_id in sync.recorded,
                transferred_byte_in_second=link.rate.sample(connection.bytes_sent, now_ms),
                transfer_from_where=connection.start_offset,
            )
            for connection_id, connection in self.core.connections.items()
            if connection.broker_id >= 0 and (link := self._links.get(connection_id)) is not None
        ]
        return master_info(sync.log.written, slaves)


def append_epoch(epochs: EpochFileCache, epoch: int, start_offset: int) -> None:
    appended = epochs.append(EpochEntry(epoch, start_offset))
    assert appended, f"epoch {epoch} does not fit {epochs.entries}"
