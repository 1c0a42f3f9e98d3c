"""Socket, timer and store calls of the classic slave; performs the core's effects. Bytes are
written from the receive buffer to the log. At the end of a loop turn one report is sent, then all
whole messages become visible: this mode has no later confirmation."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING

from batonmq.ha import slave_effects as fx
from batonmq.ha.classic.slave_core import (
    AskLogEnd,
    ClassicSlaveCore,
    ClassicSlaveEffect,
    MasterAddresses,
)
from batonmq.ha.classic.wire import Answer, ClassicFrameReader, FrameHead
from batonmq.ha.links import MasterLink, OpenLinks
from batonmq.ha.node_secret import Unproven
from batonmq.ha.shells import ClassicListener, MasterFollower
from batonmq.protocol.bodies import HAClientRuntimeInfo
from batonmq.protocol.errors import BatonError, CorruptLogError, RemoteProtocolError
from batonmq.runtime import disk

if TYPE_CHECKING:
    from batonmq.store.message_store import MessageStore

log = logging.getLogger(__name__)

FrameLink = MasterLink[ClassicFrameReader]


class ClassicSlaveShell(MasterFollower[ClassicFrameReader]):
    """Follows one master address after another, until `close`."""

    def __init__(
        self,
        core: ClassicSlaveCore,
        store: MessageStore,
        listener: ClassicListener,
        now_ms: Callable[[], int],
        log_end_of: Callable[[str], Awaitable[int]],
        open_links: OpenLinks,
    ) -> None:
        super().__init__(store, now_ms, open_links)
        self.core: ClassicSlaveCore = core
        self._listener = listener
        self._log_end_of = log_end_of
        self._diverged = ""

    # -- events

    def follow(self, master: MasterAddresses) -> None:
        if not self._closed:
            self._run(self.core.follow(master, self._now_ms()))

    def dial_now(self) -> None:
        """The obstacle is gone."""
        if not self._closed:
            self._run(self.core.dial_now(self._now_ms()))

    @property
    def problem(self) -> str:
        """Why this slave cannot follow its master; "" if it can."""
        return self._diverged or self.core.unproven

    @property
    def address(self) -> str:
        return self.core.master.ha

    @property
    def own_link(self) -> str:
        """The ip:port of this end of the connection; "" without one."""
        transport = self._link.transport if self._link is not None else None
        name = transport.get_extra_info("sockname") if transport is not None else None
        return f"{name[0]}:{name[1]}" if name else ""

    def _stop(self) -> None:
        self._run(self.core.stop(self._now_ms()))

    def flushed(self) -> None:
        """A flush ended: with haSyncFlush a report may have waited for it."""
        if self.core.policy.sync_flush and not self._closed:
            self._end_turn()

    def _connected(self) -> None:
        link = self._link
        assert link is not None
        self._run(
            self.core.connected(
                self._log_end, self._flushed, self._now_ms(), certified=link.is_certified
            )
        )
        link.reader.answer_first = self.core.wants_proof

    def lost(self, link: FrameLink, reason: str) -> None:
        is_current = link is self._link  # before `lost`, which forgets it
        super().lost(link, reason)
        if is_current:
            self._listener.on_master_lost()

    def received(self, link: FrameLink, data: memoryview) -> None:
        core, now_ms = self.core, self._now_ms()
        core.read_ms = now_ms  # a part of a frame counts too
        try:
            for item in link.reader.feed(data):
                if isinstance(item, FrameHead):
                    self._perform(core.frame_received(item, self._log_end, now_ms))
                elif isinstance(item, Answer):
                    ends = self._log_end, self._flushed
                    self._perform(core.answer_received(item, *ends, now_ms))
                else:
                    self._pieces.add(core.body_received(item))
                if link is not self._link:
                    break
            self._pieces.write()
        except RemoteProtocolError as error:
            self._pieces.clear()
            self._run(core.nonsense_received(str(error), now_ms))
        except (OSError, BatonError) as error:
            self._pieces.clear()
            self._store_failed(error)
        if link is self._link:
            self._schedule_turn()
        self._arm()

    # -- inside

    @property
    def _log_end(self) -> int:
        return max(0, self._store.max_phy_offset)

    @property
    def _flushed(self) -> int:
        return self._store.log.flushed_offset

    def _end_turn(self) -> None:
        self._turn_scheduled = False
        if self._closed:
            return
        # The report first: a master that waits for it should not wait for dispatch.
        self._run(self.core.turn_ended(self._log_end, self._flushed, self._now_ms()))
        try:
            self._store.advance_confirm_offset(self._store.slave_log.whole_end)
        except (OSError, BatonError) as error:
            self._store_failed(error)

    def _tick(self) -> None:
        self._run(self.core.tick(self._now_ms()))

    def _run(self, effects: Iterable[ClassicSlaveEffect]) -> None:
        try:
            self._perform(effects)
        except (OSError, BatonError) as error:
            self._store_failed(error)
        self._arm()

    def _perform(self, effects: Iterable[ClassicSlaveEffect]) -> None:
        for effect in effects:
            match effect:
                case fx.SendToMaster(data):
                    self._send(data)
                case fx.AppendLog():
                    self._pieces.add(effect)
                case fx.Dial(address):
                    self._tasks.spawn(self._dial(address))
                case AskLogEnd(address):
                    self._tasks.spawn(self._ask_log_end(address))
                case fx.Hangup(reason):
                    self._hang_up(reason)
                case fx.FlushTo():
                    self._store.background.request_flush()
                case fx.BeginAt():
                    self._begin_again(effect)
                case fx.Following(offset):
                    self._diverged = ""
                    log.info("ha_following address=%s offset=%d", self.core.master.ha, offset)
                case Unproven():
                    self._listener.on_unproven(effect)
                case fx.Diverged(reason):
                    self._diverged = reason
                    self._listener.on_diverged(reason)

    def _store_failed(self, error: Exception) -> None:
        """A damaged record is requested again, and a full disk may get space; any other failed
        write ends the process (G8)."""
        health = self._store.log.health
        if not health.has_failed:
            try:
                if isinstance(error, CorruptLogError):
                    self._store.slave_log.drop_unverified()
                    self._append_failed(f"the master sent a damaged record: {error}")
                    return
                if isinstance(error, OSError) and disk.is_short(error):
                    self._append_failed(f"cannot follow the master, the disk is full: {error}")
                    return
            except (OSError, BatonError) as failure:
                error = failure  # not even the bad bytes could be cut
        log.error("ha_store_failed", exc_info=error)
        self.close()
        self._listener.on_fatal(error)

    def _append_failed(self, reason: str) -> None:
        self._perform(self.core.append_failed(self._log_end, reason, self._now_ms()))
        self._arm()

    def _disconnected(self) -> None:
        self._run(self.core.disconnected(self._now_ms()))

    async def _dial(self, address: str) -> None:
        if await self._new_link(ClassicFrameReader()).dial(self._loop, address):
            self._disconnected()

    async def _ask_log_end(self, address: str) -> None:
        link = self._link
        try:
            master_end = await self._log_end_of(address)
        except (BatonError, OSError, ValueError) as error:
            if link is not None and link is self._link:
                reason = f"the master did not say where its log ends: {error!r}"
                self._run(self.core.log_end_unknown(reason, self._now_ms()))
            return
        if link is not None and link is self._link:
            self._run(
                self.core.log_end_received(master_end, self._log_end, self._flushed, self._now_ms())
            )

    def runtime_info(self, master_flush_offset: int) -> HAClientRuntimeInfo:
        info = self._client_info(self.core.bytes_received, self.core.read_ms, self.core.sent_ms)
        info.master_flush_offset = master_flush_offset
        return info
