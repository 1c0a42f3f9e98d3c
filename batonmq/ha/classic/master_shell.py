"""Sockets and timer of the classic master side. It performs the core's effects."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from batonmq.ha.classic.master_core import (
    Acknowledged,
    ClassicEffect,
    ClassicMasterCore,
    SlavesMissing,
)
from batonmq.ha.classic.wire import ReportReader
from batonmq.ha.links import SlaveLink
from batonmq.ha.master_core import SendBytes, SendLog
from batonmq.ha.node_secret import Unproven
from batonmq.ha.shells import ClassicListener, MasterLinks, master_info
from batonmq.protocol.bodies import HAConnectionRuntimeInfo, HARuntimeInfo
from batonmq.protocol.errors import RemoteProtocolError

if TYPE_CHECKING:
    from batonmq.store.message_store import MessageStore

log = logging.getLogger(__name__)

ReportLink = SlaveLink[ReportReader]


class ClassicMasterShell(MasterLinks[ReportReader, ClassicEffect]):
    def __init__(
        self,
        core: ClassicMasterCore,
        store: MessageStore,
        listener: ClassicListener,
        now_ms: Callable[[], int],
    ) -> None:
        super().__init__(store, now_ms)
        self.core: ClassicMasterCore = core
        self._listener = listener
        self._arm()

    def attach(self, link: ReportLink) -> None:
        super().attach(link)
        log.info("ha_slave_connected address=%s mode=classic", link.address)

    def received(self, link: ReportLink, data: bytes) -> None:
        try:
            log_end = link.reader.feed(data)
        except RemoteProtocolError as error:
            self._drop(link, str(error))
            return
        # In this order: a report counts only behind the proof.
        reader, now_ms = link.reader, self._now_ms()
        if reader.hello is not None:
            self.perform(self.core.hello_received(link.connection_id, reader.hello, now_ms))
        if reader.proof:
            self.perform(self.core.proof_received(link.connection_id, reader.proof, now_ms))
        if log_end is not None:
            self._poll_store()  # the first report may ask for bytes that have expired
            self.perform(self.core.reported(link.connection_id, log_end, now_ms))

    def perform(self, effects: Iterable[ClassicEffect]) -> None:
        for effect in effects:
            if isinstance(effect, SendLog):
                self._send_log(effect)
            elif isinstance(effect, Acknowledged):
                self._listener.on_acknowledged(effect.offset)
            elif isinstance(effect, SlavesMissing):
                self._listener.on_slaves_missing(effect.wanted, effect.present)
            elif isinstance(effect, SendBytes):
                self._send_bytes(effect)
            elif isinstance(effect, Unproven):
                self._listener.on_unproven(effect)
            else:
                link = self._links.pop(effect.connection_id, None)
                if link is not None:
                    log.error("ha_slave_dropped address=%s reason=%s", link.address, effect.reason)
                    link.end()
        if self.core.wakeup_ms < self._armed_ms:
            self._arm()

    def _poll_store(self) -> None:
        begin = max(0, self._store.min_phy_offset)
        if begin != self.core.begin:
            self.core.log_trimmed(begin)

    def _tick(self) -> None:
        self._poll_store()
        self.perform(self.core.tick(self._now_ms()))

    def runtime_info(self) -> HARuntimeInfo:
        core, now_ms = self.core, self._now_ms()
        gap = core.policy.gap_bytes
        slaves = [
            HAConnectionRuntimeInfo(
                addr=slave.address,
                slave_name=slave.name or None,
                slave_ack_offset=slave.acked,
                diff=core.end - slave.acked,
                in_sync=slave.acked >= 0 and core.end - slave.acked < gap,
                transferred_byte_in_second=link.rate.sample(slave.bytes_sent, now_ms),
                transfer_from_where=slave.next_offset,
            )
            for connection_id, slave in core.connections.items()
            if (link := self._links.get(connection_id)) is not None
        ]
        return master_info(core.end, slaves)
