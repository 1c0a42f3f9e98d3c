"""Socket, timer and store calls of the slave side; performs the slave core's effects. Bytes are
written from the receive buffer to the log: one write for a piece of a large frame, or for all small
frames of a read. One ack is sent per small read, or per loop turn, before dispatch, because the
master waits for it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

from batonmq.epoch.entry import EpochEntry
from batonmq.ha import slave_effects as fx
from batonmq.ha.java_peer import JavaMaster
from batonmq.ha.lineage import LogSamples
from batonmq.ha.links import MasterLink, OpenLinks
from batonmq.ha.node_secret import Unproven
from batonmq.ha.received_log import LocalLog
from batonmq.ha.shells import BUFFER_SIZE, AutoSwitchListener, MasterFollower
from batonmq.ha.slave_core import SlaveCore
from batonmq.ha.slave_policy import NEVER_MS
from batonmq.ha.wire import HAIdentity, MasterFrameReader, MasterHandshake, TransferHeader
from batonmq.protocol.bodies import HAClientRuntimeInfo
from batonmq.protocol.errors import BatonError, CorruptLogError, RemoteProtocolError
from batonmq.protocol.role_view import RoleView
from batonmq.runtime import disk
from batonmq.store.errors import TruncationRefused

if TYPE_CHECKING:
    from batonmq.store.message_store import MessageStore

log = logging.getLogger(__name__)

_SMALL_READ: Final = 32 << 10  # bytes: a smaller read has emptied the socket
UNREACHED_MS: Final = 3_000
"""A master that ends has a successor by then: this one runs, and the way to it is shut."""


def local_log(store: MessageStore, samples: LogSamples | None = None) -> LocalLog:
    """The store's state for the cores. A log without a file has offsets 0."""
    return LocalLog(
        max(0, store.min_phy_offset),
        max(0, store.max_phy_offset),
        max(0, store.confirm_offset),
        store.epochs.entries,
        samples,
    )


AutoSwitchLink = MasterLink[MasterFrameReader]


class SlaveShell(MasterFollower[MasterFrameReader]):
    """Follows one master after another, until `close`."""

    def __init__(
        self,
        core: SlaveCore,
        store: MessageStore,
        listener: AutoSwitchListener,
        now_ms: Callable[[], int],
        java_master: JavaMaster,
        open_links: OpenLinks,
        samples: LogSamples | None = None,
    ) -> None:
        super().__init__(store, now_ms, open_links)
        self.core: SlaveCore = core
        self._listener = listener
        self._samples = samples
        self._java_master = java_master
        self._address = core.view.master_ha_address
        self._may_be_suspect = True
        self._diverged = ""
        self._unproven = ""
        self._cannot_append = ""  # kept over reconnects, until it has all
        self._dials_since_ms = NEVER_MS
        self._dial_failure = ""

    @property
    def address(self) -> str:
        return self._address

    @property
    def problem(self) -> str:
        """Why this replica cannot follow its master; "" if it can."""
        known = self._cannot_append or self._diverged or self._unproven
        if known or self._now_ms() - self._dials_since_ms < UNREACHED_MS:
            return known
        return f"no connection to {self._address}: {self._dial_failure or 'no answer'}"

    def _local_log(self) -> LocalLog:
        return local_log(self._store, self._samples)

    # -- events

    def start(self) -> None:
        self._run(self.core.tick(self._now_ms()))

    def follow(self, view: RoleView) -> None:
        if not self._closed:
            self._run(self.core.follow(view, self._now_ms()))
            self._end_turn()

    def tables_followed(self, master_epoch: int) -> None:
        self._run(self.core.tables_followed(master_epoch))

    def _stop(self) -> None:
        self._run(self.core.stop())

    def _connected(self) -> None:
        link = self._link
        assert link is not None
        now_ms = self._now_ms()
        self._run(self.core.connected(self._local_log(), now_ms, certified=link.is_certified))
        link.reader.identity_first = self.core.wants_proof

    def _disconnected(self) -> None:
        self._run(self.core.disconnected(self._now_ms()))

    def received(self, link: AutoSwitchLink, data: memoryview) -> None:
        core = self.core
        now_ms = self._now_ms()
        if not core.wants_proof:  # R58: a stranger gets no time for its drops
            core.silence.read_ms = now_ms  # parts of a frame count, too
        try:
            for item in link.reader.feed(data):
                if type(item) is memoryview:
                    effects = core.log.append(item)
                elif type(item) is TransferHeader:
                    effects = core.frame_received(item, now_ms)
                elif type(item) is HAIdentity:
                    effects = core.identity_received(item, now_ms)
                else:
                    assert isinstance(item, MasterHandshake)
                    effects = core.handshake_received(item, self._local_log(), now_ms)
                if effects:
                    self._perform(effects)
                    if link is not self._link:  # hung up: the rest of this read does not count
                        break
            self._write_pieces()
        except RemoteProtocolError as error:
            self._pieces.clear()
            self._hang_up(str(error))
            core.disconnected(now_ms)
        except CorruptLogError as error:
            self._pieces.clear()
            self._refuse_record(error)
        except (OSError, BatonError) as error:
            self._pieces.clear()
            self._store_failed(error)
        if len(data) == BUFFER_SIZE:
            core.log.read_filled(now_ms)
        if link is not self._link:
            self._arm()
        elif len(data) < _SMALL_READ:
            self._end_turn()
        else:
            self._schedule_turn()

    def flushed(self) -> None:
        """A flush ended: with haSyncFlush an ack may have waited for it."""
        if self.core.policy.sync_flush:
            self._end_turn()

    def _end_turn(self) -> None:
        self._turn_scheduled = False
        self._run(self.core.turn_ended(self._store.log.flushed_offset, self._now_ms()))
        # Not when the histories fit: a member whose next byte is gone finds that each time.
        if self._diverged and self.core.is_served:
            self._diverged = ""
        if self._cannot_append and self.core.is_caught_up:
            self._cannot_append = ""  # not only an append finds a disk full
        if self._may_be_suspect and self.core.is_caught_up and not self._store.trust.must_refetch:
            # R24: the damaged part has been fetched again, so the log is trusted again.
            try:
                self._store.trust.clear_suspect()
            except OSError as error:
                self._store_failed(error)
            else:
                self._may_be_suspect = False

    def _tick(self) -> None:
        self._run(self.core.tick(self._now_ms()))
        self._end_turn()

    # -- effects

    def _run(self, effects: Iterable[fx.SlaveEffect]) -> None:
        """Performs effects outside a read."""
        try:
            self._perform(effects)
            self._write_pieces()
        except (OSError, BatonError) as error:
            self._pieces.clear()
            self._store_failed(error)
        self._arm()

    def _perform(self, effects: Iterable[fx.SlaveEffect]) -> None:
        for effect in effects:
            if type(effect) is fx.AppendLog:
                self._pieces.add(effect)
                continue
            if self._pieces:
                self._write_pieces()
            if type(effect) is fx.SendToMaster:
                self._send(effect.data)
            elif type(effect) is fx.Confirm:
                self._store.advance_confirm_offset(effect.offset)
            else:
                self._perform_rarely(effect)

    def _perform_rarely(self, effect: fx.SlaveEffect) -> None:
        match effect:
            case fx.Dial(address):
                self._tasks.spawn(self._dial(address))
            case fx.Hangup(reason):
                self._hang_up(reason)
            case Unproven(_, reason, passes):
                self._unproven = "" if passes else reason
                self._listener.on_unproven(effect)
            case fx.AppendEpoch(epoch, start):
                if not self._store.epochs.append(EpochEntry(epoch, start)):
                    raise RemoteProtocolError(f"epoch {epoch} at {start} does not fit our history")
                log.info("epoch_entered epoch=%d start_offset=%d", epoch, start)
            case fx.AdoptEpochs(entries):
                self._store.epochs.replace_all(entries)
            case fx.EnterLineage(name):
                self._store.log.lineage.enter(name)
            case fx.TruncateTo(from_offset, offset, unclean):
                self._truncate(from_offset, offset, unclean=unclean)
            case fx.BeginAt():
                self._begin_again(effect)
            case fx.FlushTo():
                self._store.background.request_flush()
            case fx.ProveMaster(view):
                self._tasks.spawn(self._prove(view))
            case fx.Following(offset):
                self._unproven = ""
                self._dials_since_ms = NEVER_MS
                log.info("ha_following address=%s offset=%d", self._address, offset)
            case fx.Diverged(reason):
                self._diverged = reason
                log.error("ha_diverged address=%s reason=%s", self._address, reason)
                self._listener.on_diverged(reason)
            case _:
                raise AssertionError(f"no way to perform {effect}")

    def _write_pieces(self) -> None:
        if self._pieces.write():
            self._cannot_append = ""

    def _truncate(self, from_offset: int, offset: int, *, unclean: bool) -> None:
        log.warning(
            "log_truncated from_offset=%d to_offset=%d unclean=%s", from_offset, offset, unclean
        )
        try:
            self._store.slave_log.truncate_to(offset, keep_aside=True, unclean_epoch=unclean)
        except TruncationRefused as error:
            self._perform(self.core.cut_refused(str(error), self._now_ms()))
            return
        self._listener.on_truncated(from_offset, offset)
        self._perform(self.core.log_changed(self._local_log(), self._now_ms()))

    def _refuse_record(self, error: CorruptLogError) -> None:
        """The master sent a damaged record: none of it is kept or acked (G8)."""
        try:
            self._store.slave_log.drop_unverified()
        except (OSError, BatonError) as failure:
            self._store_failed(failure)
            return
        reason = f"the master sent a damaged record: {error}"
        self._append_failed(error.offset, reason)

    def _append_failed(self, offset: int, reason: str) -> None:
        self._cannot_append = reason
        log_end = max(0, self._store.max_phy_offset)
        self._perform(self.core.append_failed(log_end, offset, reason, self._now_ms()))

    def _store_failed(self, error: Exception) -> None:
        """A full disk may get space. Any other failed write ends this side and the process (G8),
        and so does a cut that cannot be finished (R37)."""
        is_short = isinstance(error, OSError) and disk.is_short(error)
        if is_short and not self._store.log.health.has_failed:
            reason = f"cannot follow the master, the disk is full: {error}"
            self._append_failed(max(0, self._store.max_phy_offset), reason)
            return
        self._hang_up(f"store: {error}")
        self.core.disconnected(self._now_ms())
        # An epoch that the list does not take (R25) is the master's fault, not the disk's.
        if isinstance(error, RemoteProtocolError):
            return
        log.error("ha_store_failed", exc_info=error)
        self.close()
        self._listener.on_fatal(error)

    # -- tasks and timer

    async def _dial(self, address: str) -> None:
        link = self._new_link(MasterFrameReader())
        self._address = address or await self._address_of_java_master()
        self._dials_since_ms = min(self._dials_since_ms, self._now_ms())
        self._dial_failure = "its address is not known"
        if self._address:
            self._dial_failure = await link.dial(self._loop, self._address)
        if self._dial_failure:
            self._disconnected()

    async def _address_of_java_master(self) -> str:
        """The HA address of a Java master; "" without an answer, or if it is not master yet."""
        try:
            return await self._java_master.ha_address(self.core.view)
        except BatonError as error:
            log.debug("ha_address_unknown reason=%s", error)
            return ""

    async def _prove(self, view: RoleView) -> None:
        link = self._link  # the answer is about this connection only
        try:
            identity = await self._java_master.identity(view)
        except Exception as error:
            # Any failure means that there is no proof.
            if link is not None and link is self._link:
                self._hang_up(f"no proof that the peer is the master: {error!r}")
                self._disconnected()
            return
        if link is not None and link is self._link:
            self._run(self.core.peer_proved(identity, self._local_log(), self._now_ms()))
            self._end_turn()

    def runtime_info(self) -> HAClientRuntimeInfo:
        core = self.core
        return self._client_info(core.log.bytes_received, core.silence.read_ms, core.log.sent_ms)
