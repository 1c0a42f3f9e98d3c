"""A broker's HA service in classic mode. The configuration sets the role of the process. Both roles
listen: a slave that connects to a slave is closed, with a line in the log. Origin: Java
DefaultHAService."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from batonmq.ha.classic.master_core import ClassicMasterCore, ClassicPolicy
from batonmq.ha.classic.master_shell import ClassicMasterShell, ReportLink
from batonmq.ha.classic.slave_core import ClassicSlaveCore, MasterAddresses
from batonmq.ha.classic.slave_shell import ClassicSlaveShell
from batonmq.ha.classic.wire import BODY_SIZE_MAX, ReportReader
from batonmq.ha.config import HAConfig
from batonmq.ha.links import SlaveLink
from batonmq.ha.shells import ClassicListener, HAService, slave_info
from batonmq.protocol.bodies import HARuntimeInfo
from batonmq.protocol.topic_name import text_problem
from batonmq.runtime.clock import boot_ms

if TYPE_CHECKING:
    from batonmq.store.message_store import MessageStore

log = logging.getLogger(__name__)


class ClassicHAService(HAService):
    """`needed_slaves`: how many slaves must have a write before it is acknowledged. `log_end_of`
    asks the broker at a remoting address for the end of its log; it raises BatonError or
    OSError."""

    _mode = "classic"

    def __init__(
        self,
        store: MessageStore,
        config: HAConfig,
        listener: ClassicListener,
        *,
        needed_slaves: int,
        log_end_of: Callable[[str], Awaitable[int]],
        clock_ms: Callable[[], int] = boot_ms,
    ) -> None:
        super().__init__(store, config, clock_ms)
        self._listener = listener
        self._needed_slaves = needed_slaves
        self._log_end_of = log_end_of
        self._master: ClassicMasterShell | None = None
        self._slave: ClassicSlaveShell | None = None
        self.master_flush_offset = 0
        """On a slave: the offset set by RESET_MASTER_FLUSH_OFFSET (908); only shown."""

    def lead(self) -> None:
        """Begins to act as master."""
        store, config = self._store, self._config
        policy = ClassicPolicy(
            segment_size=self._store.config.mapped_file_size_commit_log,
            needed_slaves=self._needed_slaves,
            gap_bytes=config.gap_bytes,
            batch_bytes=min(config.ha_transfer_batch_size, BODY_SIZE_MAX),
            window_bytes=config.ha_transfer_window_size,
            heartbeat_ms=config.classic_heartbeat_ms,
            housekeeping_ms=config.ha_housekeeping_interval,
            flow_bytes_per_s=config.flow_bytes_per_s,
        )
        begin, end = max(0, store.min_phy_offset), max(0, store.max_phy_offset)
        core = ClassicMasterCore(policy, begin, end, self._now_ms(), self._secret)
        self._master = ClassicMasterShell(core, store, self._listener, self._now_ms)

    def follow(self, master: MasterAddresses) -> None:
        """Begins to act as a slave of `master`, whose address may be unknown, and may change
        later."""
        if self._slave is None:
            # R24: everything after the damage is fetched again.
            self._store.trust.discard_damaged_tail()
            policy = self._config.slave_policy(
                ha_sync_flush=self._store.config.ha_sync_flush,
                segment_size=self._store.config.mapped_file_size_commit_log,
            )
            core = ClassicSlaveCore(
                replace(policy, keepalive_ms=self._config.classic_heartbeat_ms),
                self._now_ms(),
                self._secret,
            )
            self._slave = ClassicSlaveShell(
                core, self._store, self._listener, self._now_ms, self._log_end_of, self._open_links
            )
        self._slave.follow(master)

    def fetch_damaged_again(self, master: MasterAddresses) -> None:
        """On a slave whose log is damaged: cuts it there, keeps the cut bytes aside, and fetches
        them again (R24). Raises OSError without disk space for the cut bytes; then nothing is
        changed."""
        if self._slave is not None:
            # First: if the disk has no space for the cut bytes, the slave continues as it is.
            self._store.trust.discard_damaged_tail()
            ending, self._slave = self._slave, None
            ending.close()
            self.follow(master)

    async def close(self) -> None:
        if self._slave is not None:
            self._slave.close()
        if self._master is not None:
            self._master.close()
        await self._open_links.close()

    # -- events of the broker

    def notify_append(self, written_offset: int) -> None:
        if self._master is not None:
            self._master.appended(written_offset)

    def notify_flushed(self, flushed_offset: int) -> None:
        if self._slave is not None:
            self._slave.flushed()

    def dial_now(self) -> None:
        if self._slave is not None:
            self._slave.dial_now()

    # -- reading

    @property
    def following_problem(self) -> str:
        return self._slave.problem if self._slave is not None else ""

    @property
    def in_sync_count(self) -> int:
        return 1 if self._master is None else 1 + self._master.core.slaves_within_gap()

    def is_followed_from(self, host: str) -> bool:
        """On a master: whether a slave on that host has reported."""
        return self._master is not None and self._master.core.is_followed_from(host)

    @property
    def own_link(self) -> str:
        """On a slave: the ip:port of its end of the HA connection; "" without one."""
        return "" if self._slave is None else self._slave.own_link

    def note_slave(self, link: str, name: str) -> None:
        """On a master: notes the name of the slave at the other end of `link`; only shown."""
        if self._master is None or text_problem(name):
            return
        for slave in self._master.core.connections.values():
            if slave.address == link:
                slave.name = name

    def runtime_info(self) -> HARuntimeInfo:
        if self._master is not None:
            return self._master.runtime_info()
        slave = self._slave
        return slave_info(0, slave.runtime_info(self.master_flush_offset) if slave else None)

    def _new_link(self) -> ReportLink:
        self._links_made += 1
        return SlaveLink(
            self._links_made, self._attach, _nowhere, self._open_links, ReportReader(), 0
        )

    def _attach(self, link: ReportLink) -> None:
        if self._master is not None:
            link.adopt(self._master)
        else:
            log.warning("ha_slave_refused address=%s reason='this broker is a slave'", link.address)
            link.end()


def _nowhere(link: ReportLink) -> None:
    """Nothing to remove: in this mode connections do not wait for a mastership."""
