"""The common parts of both modes: callbacks of the broker, shells (connections, a timer, store
calls), and the service."""

from __future__ import annotations

import asyncio
import logging
import mmap
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, ClassVar, Generic, Protocol, TypeVar

from batonmq.ha.config import HAConfig
from batonmq.ha.links import ByteRate, LinkTasks, MasterLink, OpenLinks, SlaveLink
from batonmq.ha.master_core import SendBytes, SendLog
from batonmq.ha.node_secret import NodeSecret, Unproven
from batonmq.ha.slave_effects import AppendLog, BeginAt
from batonmq.ha.slave_policy import NEVER_MS
from batonmq.ha.sync_state import SetProposal
from batonmq.protocol.bodies import HAClientRuntimeInfo, HAConnectionRuntimeInfo, HARuntimeInfo
from batonmq.runtime.clock import wall_ms
from batonmq.runtime.tls import PortTls

if TYPE_CHECKING:
    from batonmq.store.message_store import MessageStore

log = logging.getLogger(__name__)

BUFFER_SIZE = 1 << 20
_JOIN_BELOW = 32 << 10  # pieces that are smaller on average are joined into one write

R = TypeVar("R")
E = TypeVar("E")


class HAListener(Protocol):
    """The broker's callbacks in both modes. Called on the loop; must neither block nor raise."""

    def on_unproven(self, peer: Unproven) -> None:
        """A peer did not prove that it knows the secret of the nodes."""

    def on_diverged(self, reason: str) -> None:
        """Slave: an operator must act."""

    def on_fatal(self, exc: BaseException) -> None:
        """The log or the epoch file cannot be written: the process must stop."""


class AutoSwitchListener(HAListener, Protocol):
    """The broker with controllers."""

    def on_confirm_offset(self, offset: int) -> None:
        """Master: every required member has all bytes below `offset` (G1)."""

    def on_proposal(self, proposal: SetProposal) -> None:
        """Master: propose this set; `adopt_view` or `proposal_refused` ends the proposal."""

    def on_slave_following(self, broker_id: int) -> None:
        """Master: that slave accepted our history and acked."""

    def on_truncated(self, from_offset: int, to_offset: int) -> None:
        """Slave: the log was cut to follow the master."""

    def on_damage(self, reason: str) -> None:
        """Master: our log is damaged where a slave continues (G8)."""


class ClassicListener(HAListener, Protocol):
    """The broker in classic mode."""

    def on_acknowledged(self, offset: int) -> None:
        """Master: enough slaves have all bytes below `offset`."""

    def on_slaves_missing(self, wanted: int, present: int) -> None:
        """Master: no write can be acknowledged now."""

    def on_master_lost(self) -> None:
        """Slave: the connection ended; the master may have another address now."""


class Core(Protocol):
    """A core with deadlines."""

    @property
    def wakeup_ms(self) -> int: ...


class MasterEnd(Core, Protocol[E]):
    """The core of a mastership."""

    def connection_opened(
        self, connection_id: int, address: str, now_ms: int, /, *, certified: bool = False
    ) -> list[E]: ...

    def connection_closed(self, connection_id: int, now_ms: int) -> list[E]: ...

    def appended(self, end: int, now_ms: int, /) -> list[E]: ...


class Timed(ABC):
    """Calls `_tick` when the core is due, until `close`."""

    core: Core
    least_ms: ClassVar[int] = 0  # The shortest wait.

    def __init__(self, now_ms: Callable[[], int]) -> None:
        self._now_ms = now_ms
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._armed_ms = NEVER_MS
        self._closed = False

    @abstractmethod
    def _tick(self) -> None: ...

    def _due(self) -> None:
        # Before the tick, which sets it again.
        self._timer = None
        self._armed_ms = NEVER_MS
        self._tick()

    def _arm(self) -> None:
        """Sets the timer; call it if the core may be due earlier than before."""
        wakeup_ms = self.core.wakeup_ms
        if self._closed or self._armed_ms <= wakeup_ms:
            return
        self._disarm()
        self._armed_ms = wakeup_ms
        delay_ms = max(self.least_ms, wakeup_ms - self._now_ms())
        self._timer = self._loop.call_later(delay_ms / 1_000, self._due)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


class MasterLinks(Timed, Generic[R, E]):
    """The connections of one mastership. Log bytes are sent as views of the store's read-only map,
    without a copy, at most a window per transport. Implements `links.MasterSide`."""

    core: MasterEnd[E]
    least_ms = 1

    def __init__(self, store: MessageStore, now_ms: Callable[[], int]) -> None:
        super().__init__(now_ms)
        self._store = store
        self._links: dict[int, SlaveLink[R]] = {}

    @abstractmethod
    def received(self, link: SlaveLink[R], data: bytes) -> None: ...

    @abstractmethod
    def perform(self, effects: Iterable[E]) -> None: ...

    def close(self) -> None:
        """Ends every connection. Nothing is sent or confirmed afterwards."""
        self._closed = True
        self._disarm()
        # Empty first: an end must not be handled as a loss.
        links, self._links = list(self._links.values()), {}
        for link in links:
            link.end()

    def attach(self, link: SlaveLink[R]) -> None:
        self._links[link.connection_id] = link
        self.perform(
            self.core.connection_opened(
                link.connection_id, link.address, self._now_ms(), certified=link.is_certified
            )
        )

    def lost(self, link: SlaveLink[R]) -> None:
        # None if the core has closed it: then nothing is new to it.
        if self._links.pop(link.connection_id, None) is not None:
            log.info("ha_slave_lost address=%s", link.address)
            self.perform(self.core.connection_closed(link.connection_id, self._now_ms()))

    def appended(self, written: int) -> None:
        self.perform(self.core.appended(written, self._now_ms()))

    def _send_bytes(self, effect: SendBytes) -> None:
        link = self._links.get(effect.connection_id)
        if link is not None and link.transport is not None:
            link.transport.write(effect.data)

    def _send_log(self, effect: SendLog) -> None:
        link = self._links.get(effect.connection_id)
        if link is None or link.transport is None:
            return
        if not effect.size:
            link.transport.write(effect.header)
            return
        view = self._store.log.view(effect.offset, effect.size)
        # Its segment may have expired in this turn, before `log_trimmed`.
        if len(view) == effect.size:
            link.transport.writelines([effect.header, view])
        else:
            self._drop(link, f"the log has no {effect.size} bytes at {effect.offset} any more")

    def _drop(self, link: SlaveLink[R], reason: str) -> None:
        if self._links.pop(link.connection_id, None) is not None:
            log.warning("ha_slave_dropped address=%s reason=%s", link.address, reason)
            link.end()
            self.perform(self.core.connection_closed(link.connection_id, self._now_ms()))


def master_info(log_end: int, slaves: list[HAConnectionRuntimeInfo]) -> HARuntimeInfo:
    return HARuntimeInfo(
        master=True,
        master_commit_log_max_offset=log_end,
        in_sync_slave_nums=sum(slave.in_sync for slave in slaves),
        ha_connection_info=slaves,
        ha_client_runtime_info=HAClientRuntimeInfo(),
    )


def slave_info(log_end: int, client: HAClientRuntimeInfo | None) -> HARuntimeInfo:
    """`client`: of the connection to the master; None on a replica that follows none."""
    return HARuntimeInfo(
        master=False,
        master_commit_log_max_offset=log_end,
        in_sync_slave_nums=0,
        ha_connection_info=[],
        ha_client_runtime_info=client or HAClientRuntimeInfo(),
    )


class ReceivedPieces:
    """Received pieces that are not in the log yet; one write stores them."""

    def __init__(self, store: MessageStore) -> None:
        self._store = store
        self._parts: list[memoryview] = []
        self._offset = 0

    def __bool__(self) -> bool:
        return bool(self._parts)

    def add(self, piece: AppendLog) -> None:
        if not self._parts:
            self._offset = piece.offset
        self._parts.append(piece.data)

    def clear(self) -> None:
        self._parts.clear()

    def write(self) -> bool:
        """Writes the pieces; returns whether there were any. Raises what `append_replicated`
        raises."""
        parts, self._parts = self._parts, []
        if not parts:
            return False
        offset = self._offset
        # A copy costs less than a write for each small piece.
        if len(parts) > 1 and sum(map(len, parts)) < _JOIN_BELOW * len(parts):
            self._store.slave_log.append_replicated(offset, b"".join(parts))
        else:
            for part in parts:
                offset = self._store.slave_log.append_replicated(offset, part)
        return True


class MasterFollower(Timed, Generic[R]):
    """The connection to the current master. Implements `links.SlaveSide`."""

    def __init__(
        self, store: MessageStore, now_ms: Callable[[], int], open_links: OpenLinks
    ) -> None:
        super().__init__(now_ms)
        self.rate = ByteRate()
        self._store = store
        self._open_links = open_links
        self._buffer = memoryview(mmap.mmap(-1, BUFFER_SIZE))  # unused pages take no memory
        self._link: MasterLink[R] | None = None
        self._dialled: MasterLink[R] | None = None
        self._tasks = LinkTasks(self._loop)
        self._pieces = ReceivedPieces(store)
        self._turn_scheduled = False

    @property
    @abstractmethod
    def address(self) -> str:
        """The HA address of the last connection."""

    @abstractmethod
    def received(self, link: MasterLink[R], data: memoryview) -> None: ...

    @abstractmethod
    def _stop(self) -> None:
        """Stops the core and performs its last effects."""

    @abstractmethod
    def _connected(self) -> None: ...

    @abstractmethod
    def _disconnected(self) -> None: ...

    @abstractmethod
    def _end_turn(self) -> None: ...

    def close(self) -> None:
        """Ends the connection; nothing is written or acked afterwards (R1). Idempotent."""
        if not self._closed:
            self._closed = True  # first: a failure in `_stop` leads back here
            self._stop()
            self._disarm()
            self._tasks.cancel()

    def made(self, link: MasterLink[R]) -> None:
        if link is self._dialled:
            self._link = link
            self._connected()
        else:
            link.end()  # it was still connecting

    def lost(self, link: MasterLink[R], reason: str) -> None:
        if link is self._link:
            log.info("ha_master_lost address=%s reason=%s", self.address, reason)
            self._link = None
            self._disconnected()

    def _new_link(self, reader: R) -> MasterLink[R]:
        """A new link. If an older one is still connecting, it is closed once connected."""
        self._dialled = MasterLink(self, self._buffer, self._open_links, reader)
        return self._dialled

    def _schedule_turn(self) -> None:
        """Makes `_end_turn` run once at the end of this loop turn."""
        if not self._turn_scheduled:
            self._turn_scheduled = True
            self._loop.call_soon(self._end_turn)

    def _send(self, data: bytes) -> None:
        """Sends unless the log failed: acks of a failed log prove nothing (R37)."""
        link = self._link
        if self._store.log.health.has_failed or link is None or link.transport is None:
            return
        link.transport.write(data)

    def _begin_again(self, effect: BeginAt) -> None:
        log.warning("log_begins_again offset=%d reason=%s", effect.offset, effect.reason)
        self._store.slave_log.reset_for_empty_start(effect.offset)

    def _hang_up(self, reason: str) -> None:
        log.info("ha_master_left address=%s reason=%s", self.address, reason)
        link, self._link, self._dialled = self._link, None, None
        if link is not None:
            link.end()
        self._tasks.cancel()

    def _client_info(self, received: int, read_ms: int, sent_ms: int) -> HAClientRuntimeInfo:
        """`received`: the bytes so far. Times are the core's."""
        now_ms = self._now_ms()
        since_1970_ms = wall_ms() - now_ms
        return HAClientRuntimeInfo(
            master_addr=self.address,
            transferred_byte_in_second=self.rate.sample(received, now_ms),
            max_offset=self._store.max_phy_offset,
            last_read_timestamp=read_ms + since_1970_ms,
            last_write_timestamp=sent_ms + since_1970_ms,
            master_flush_offset=0,
        )


class HAService(ABC):
    """HA of a broker in either mode: the port for slaves, and the shell of its present role."""

    _mode: ClassVar[str]

    def __init__(self, store: MessageStore, config: HAConfig, clock_ms: Callable[[], int]) -> None:
        self._store = store
        self._secret: NodeSecret | None = None
        self._config = config
        self._now_ms = clock_ms
        self._links_made = 0
        self._open_links = OpenLinks()
        self.port = 0

    async def start(
        self, bind_host: str, tls: PortTls | None = None, secret: NodeSecret | None = None
    ) -> int:
        """Listens on haListenPort (see `OpenLinks.listen`); returns the port. `secret`: of the
        nodes, if they prove it to each other."""
        self._secret = secret
        self.port = await self._open_links.listen(
            self._new_link, bind_host, self._store.config.ha_listen_port, tls
        )
        log.info("ha_listening host=%s port=%d mode=%s", bind_host, self.port, self._mode)
        return self.port

    @abstractmethod
    def _new_link(self) -> asyncio.Protocol:
        """For a slave that connects."""

    @abstractmethod
    def notify_append(self, written_offset: int) -> None:
        """On a master, once per loop turn: the log ends there, at the end of a message."""

    @abstractmethod
    def notify_flushed(self, flushed_offset: int) -> None:
        """All bytes below `flushed_offset` are on this broker's disk."""

    @abstractmethod
    def dial_now(self) -> None:
        """On a slave: connects now, because the obstacle is gone."""

    @property
    @abstractmethod
    def following_problem(self) -> str:
        """Why this slave cannot follow its master; "" if it can, or if it is no slave."""

    @property
    @abstractmethod
    def in_sync_count(self) -> int:
        """On a master: the size of the recorded SyncStateSet; in classic mode itself and the slaves
        within the gap."""

    @abstractmethod
    def runtime_info(self) -> HARuntimeInfo:
        """The body of the reply to GET_BROKER_HA_STATUS (907). Times are wall clock."""
