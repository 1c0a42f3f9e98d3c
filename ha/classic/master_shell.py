"""Sockets and timer of the classic master side. It performs the core's effects.

Log bytes go out as views of the store's read-only map, no more of them than the window of unacked
ones.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from batonmq.ha.classic.master_core import (
    Acknowledged,
    ClassicEffect,
    ClassicMasterCore,
    SlavesMissing,
)
from batonmq.ha.classic.wire import ReportReader
from batonmq.ha.links import SlaveLink
from batonmq.ha.master_core import SendLog
from batonmq.ha.ports import ClassicListener, LogStore
from batonmq.protocol.bodies import HAClientRuntimeInfo, HAConnectionRuntimeInfo, HARuntimeInfo
from batonmq.protocol.errors import RemoteProtocolError

log = logging.getLogger(__name__)

ReportLink = SlaveLink[ReportReader]


class ClassicMasterShell:
    """The HA connections of a master. Implements `batonmq.ha.links.MasterSide`."""

    def __init__(
        self,
        core: ClassicMasterCore,
        store: LogStore,
        listener: ClassicListener,
        now_ms: Callable[[], int],
    ) -> None:
        self.core = core
        self._store = store
        self._listener = listener
        self._now_ms = now_ms
        self._loop = asyncio.get_running_loop()
        self._links: dict[int, ReportLink] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self._arm()

    def close(self) -> None:
        """Ends every connection."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        links, self._links = list(self._links.values()), {}
        for link in links:
            link.end()

    def attach(self, link: ReportLink) -> None:
        self._links[link.connection_id] = link
        self.core.connection_opened(link.connection_id, link.address, self._now_ms())
        log.info("ha_slave_connected address=%s mode=classic", link.address)
        self._arm()

    def received(self, link: ReportLink, data: bytes) -> None:
        try:
            log_end = link.reader.feed(data)
        except RemoteProtocolError as error:
            self._drop(link, str(error))
            return
        if log_end is not None:
            self._poll_store()
            self._perform(self.core.reported(link.connection_id, log_end, self._now_ms()))
            self._arm()

    def lost(self, link: ReportLink) -> None:
        if self._links.pop(link.connection_id, None) is not None:
            log.info("ha_slave_lost address=%s", link.address)
            self._perform(self.core.connection_closed(link.connection_id, self._now_ms()))

    def appended(self, written: int) -> None:
        self._perform(self.core.appended(written, self._now_ms()))

    def _perform(self, effects: Iterable[ClassicEffect]) -> None:
        for effect in effects:
            if isinstance(effect, SendLog):
                self._send_log(effect)
            elif isinstance(effect, Acknowledged):
                self._listener.on_acknowledged(effect.offset)
            elif isinstance(effect, SlavesMissing):
                self._listener.on_slaves_missing(effect.wanted, effect.present)
            else:
                link = self._links.pop(effect.connection_id, None)
                if link is not None:
                    log.error("ha_slave_dropped address=%s reason=%s", link.address, effect.reason)
                    link.end()

    def _send_log(self, effect: SendLog) -> None:
        link = self._links.get(effect.connection_id)
        if link is None or link.transport is None:
            return
        if not effect.size:
            link.transport.write(effect.header)
            return
        view = self._store.log.view(effect.offset, effect.size)
        if len(view) == effect.size:
            link.transport.writelines([effect.header, view])
        else:
            self._drop(link, f"the log has no {effect.size} bytes at {effect.offset} any more")

    def _drop(self, link: ReportLink, reason: str) -> None:
        if self._links.pop(link.connection_id, None) is None:
            return
        log.error("ha_slave_dropped address=%s reason=%s", link.address, reason)
        link.end()
        self._perform(self.core.connection_closed(link.connection_id, self._now_ms()))

    def _poll_store(self) -> None:
        begin = max(0, self._store.min_phy_offset)
        if begin != self.core.begin:
            self.core.log_trimmed(begin)

    def _tick(self) -> None:
        self._timer = None
        self._poll_store()
        self._perform(self.core.tick(self._now_ms()))
        self._arm()

    def _arm(self) -> None:
        """The core's next deadline; connections that come later have later ones."""
        if self._timer is None and not self._closed:
            delay_ms = max(1, self.core.wakeup_ms - self._now_ms())
            self._timer = self._loop.call_later(delay_ms / 1_000, self._tick)

    def runtime_info(self) -> HARuntimeInfo:
        core, now_ms = self.core, self._now_ms()
        gap = core.policy.gap_bytes
        slaves = [
            HAConnectionRuntimeInfo(
                addr=slave.address,
                slave_ack_offset=slave.acked,
                diff=core.end - slave.acked,
                in_sync=slave.acked >= 0 and core.end - slave.acked < gap,
                transferred_byte_in_second=link.rate.sample(slave.bytes_sent, now_ms),
                transfer_from_where=slave.next_offset,
            )
            for connection_id, slave in core.connections.items()
            if (link := self._links.get(connection_id)) is not None
        ]
        return HARuntimeInfo(
            master=True,
            master_commit_log_max_offset=core.end,
            in_sync_slave_nums=sum(slave.in_sync for slave in slaves),
            ha_connection_info=slaves,
            ha_client_runtime_info=HAClientRuntimeInfo(),
        )
