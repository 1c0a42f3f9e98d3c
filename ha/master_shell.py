"""Sockets and timer of the master side: does what the master core says, decides nothing.

Log bytes go out as `writelines([header, view])` with a view of the store's read-only map, so Python
copies none of them; a view that the kernel would not take yet is held by the transport, no longer
than the window of unacked bytes is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import cast

from ha.clock import ByteRate
from ha.master_core import (
    CloseConnection,
    MasterCore,
    MasterEffect,
    SendBytes,
    SendLog,
    SlaveConnection,
)
from ha.open_links import OpenLinks
from ha.ports import HAListener, LogStore
from ha.protocol import SlaveFrameReader
from ha.sync_state import ConfirmAdvanced, ProposeSet
from ha.unanswered import limit_unanswered
from ha.wire import SLAVE_HANDSHAKE
from protocol.errors import RemoteProtocolError

log = logging.getLogger(__name__)

_LAST_WORD_S = 1.0
"""How long a connection that we end may take to deliver what was sent on it before."""


class SlaveLink(asyncio.Protocol):
    """One accepted HA connection. `attach` gives it to the acting master, or lets it wait for one
    (`adopt`); what the slave says meanwhile is kept."""

    def __init__(
        self,
        connection_id: int,
        attach: Callable[[SlaveLink], None],
        left: Callable[[SlaveLink], None],
        open_links: OpenLinks,
    ) -> None:
        self.connection_id = connection_id
        self._open_links = open_links
        self.address = "?"
        self.rate = ByteRate()
        self.reader = SlaveFrameReader()
        self.transport: asyncio.Transport | None = None
        self._attach = attach
        self._left = left
        self._shell: MasterShell | None = None
        self._early = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclass of asyncio's.
        transport = cast(asyncio.Transport, transport)
        self._open_links.made()
        peer = transport.get_extra_info("peername")
        self.address = f"{peer[0]}:{peer[1]}" if peer else "?"
        self.transport = transport
        limit_unanswered(transport)
        self._attach(self)

    def adopt(self, shell: MasterShell) -> None:
        """The mastership that this slave dialled has begun."""
        self._shell = shell
        shell.attach(self)
        early, self._early = self._early, b""
        if early:
            shell.received(self, early)

    def data_received(self, data: bytes) -> None:
        if self._shell is not None:
            self._shell.received(self, data)
            return
        # A slave sends a handshake and waits: more than that is none.
        self._early += data
        if len(self._early) > SLAVE_HANDSHAKE.size:
            self.end()

    def connection_lost(self, exc: Exception | None) -> None:
        self._open_links.lost()
        self._left(self)
        shell, self._shell, self.transport = self._shell, None, None
        if shell is not None:
            shell.lost(self)

    def end(self) -> None:
        """Closes the socket and lets go of all views of the log. The shell hears no more of it."""
        transport, self.transport, self._shell = self.transport, None, None
        if transport is not None:
            transport.abort()

    def end_after_last_word(self) -> None:
        """Closes once the peer has taken what was sent before; `end` may still cut that short."""
        self._shell = None
        if self.transport is not None:
            self.transport.close()


class MasterShell:
    """The HA connections of one mastership."""

    def __init__(
        self,
        core: MasterCore,
        store: LogStore,
        listener: HAListener,
        now_ms: Callable[[], int],
    ) -> None:
        self.core = core
        self._store = store
        self._listener = listener
        self._now_ms = now_ms
        self._loop = asyncio.get_running_loop()
        self._links: dict[int, SlaveLink] = {}
        self._leaving: set[SlaveLink] = set()
        self._said = ""
        self._timer: asyncio.TimerHandle | None = None
        self._armed_ms = 0
        self._entries = store.epochs.entries
        self._closed = False

    def start(self, effects: Iterable[MasterEffect]) -> None:
        """Performs the mastership's first effects and starts the timer."""
        self._arm()
        self.perform(effects)

    def close(self) -> None:
        """Ends every connection. Nothing is sent or confirmed after it."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        links = [*self._links.values(), *self._leaving]
        self._links = {}
        self._leaving.clear()
        for link in links:
            link.end()

    def attach(self, link: SlaveLink) -> None:
        self._links[link.connection_id] = link
        self.core.connection_opened(link.connection_id, link.address, self._now_ms())

    def received(self, link: SlaveLink, data: bytes) -> None:
        try:
            handshake, acks = link.reader.feed(data)
        except RemoteProtocolError as error:
            log.warning("ha_slave_dropped address=%s reason=%s", link.address, error)
            self._links.pop(link.connection_id, None)
            link.end()
            self.perform(self.core.connection_closed(link.connection_id, self._now_ms()))
            return
        now_ms = self._now_ms()
        if handshake is not None:
            log.info(
                "ha_slave_connected address=%s broker_id=%d learner=%s",
                link.address,
                handshake.broker_id,
                handshake.async_learner,
            )
            self.perform(self._look_at_store(now_ms))
            self.perform(self.core.handshake_received(link.connection_id, handshake, now_ms))
        if acks:
            self.perform(self.core.acks_received(link.connection_id, acks, now_ms))

    def lost(self, link: SlaveLink) -> None:
        if self._links.pop(link.connection_id, None) is not None:
            log.info("ha_slave_lost address=%s", link.address)
            self.perform(self.core.connection_closed(link.connection_id, self._now_ms()))

    def appended(self, written: int) -> None:
        self.perform(self.core.appended(written, self._now_ms()))

    def flushed(self, flushed: int) -> None:
        self.perform(self.core.flushed(flushed, self._now_ms()))

    def epochs_changed(self) -> None:
        self._entries = self._store.epochs.entries
        self.perform(self.core.epochs_changed(self._entries, self._now_ms()))

    def perform(self, effects: Iterable[MasterEffect]) -> None:
        for effect in effects:
            if isinstance(effect, SendLog):
                self._send_log(effect)
            elif isinstance(effect, ConfirmAdvanced):
                self._listener.on_confirm_offset(effect.offset)
            elif isinstance(effect, SendBytes):
                link = self._links.get(effect.connection_id)
                if link is not None and link.transport is not None:
                    link.transport.write(effect.data)
            elif isinstance(effect, CloseConnection):
                self._close_link(effect)
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
        """A slave that was sent a bad record comes back for it: then it is ours that is bad (R24).

        Old bytes are sent as they lie on the disk, and checked by who receives them.
        """
        fault = self._store.fault_at(offset)
        if fault and fault != self._said:
            self._said = fault
            log.error("ha_own_log_damaged reason=%s", fault)
            self._listener.on_damage(fault)

    def _send_log(self, effect: SendLog) -> None:
        link = self._links.get(effect.connection_id)
        if link is None or link.transport is None:
            return
        if not effect.size:
            link.transport.write(effect.header)
            return
        view = self._store.log_view(effect.offset, effect.size)
        if len(view) == effect.size:
            link.transport.writelines([effect.header, view])
            return
        log.error(
            "ha_log_gone address=%s offset=%d wanted=%d got=%d",
            link.address,
            effect.offset,
            effect.size,
            len(view),
        )
        del self._links[effect.connection_id]
        link.end()
        self.perform(self.core.connection_closed(effect.connection_id, self._now_ms()))

    def _close_link(self, effect: CloseConnection) -> None:
        link = self._links.pop(effect.connection_id, None)
        if link is not None:
            log.warning("ha_slave_dropped address=%s reason=%s", link.address, effect.reason)
            if effect.flush:
                self._let_go(link)
            else:
                link.end()

    def _let_go(self, link: SlaveLink) -> None:
        """The peer shall hear our last word (R27), but not keep us waiting for it."""
        self._leaving.add(link)
        link.end_after_last_word()
        self._loop.call_later(_LAST_WORD_S, self._cut_off, link)

    def _cut_off(self, link: SlaveLink) -> None:
        self._leaving.discard(link)
        link.end()

    def _tick(self) -> None:
        self._timer = None
        now_ms = self._now_ms()
        effects = self._look_at_store(now_ms) + self.core.tick(now_ms)
        self._arm()
        self.perform(effects)

    def _look_at_store(self, now_ms: int) -> list[MasterEffect]:
        """Segments expire behind our back, and epochs with them: no slave is promised those."""
        effects = self.core.log_trimmed(max(0, self._store.min_phy_offset), now_ms)
        if self._store.epochs.entries is not self._entries:
            self._entries = self._store.epochs.entries
            effects += self.core.epochs_changed(self._entries, now_ms)
        return effects

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._closed:
            return
        self._armed_ms = self.core.wakeup_ms
        delay_ms = max(1, self._armed_ms - self._now_ms())
        self._timer = self._loop.call_later(delay_ms / 1_000, self._tick)

    def slaves(self) -> Iterator[tuple[SlaveConnection, int]]:
        """Each following connection with its bytes per second."""
        now_ms = self._now_ms()
        for connection_id, connection in self.core.connections.items():
            link = self._links.get(connection_id)
            if link is not None and connection.broker_id >= 0:
                yield connection, link.rate.sample(connection.bytes_sent, now_ms)


__all__ = ["MasterShell", "SlaveLink"]
