"""The path of a write through this broker, and the only place that releases acknowledgements.

A processor that stores a message checks `gate.refusal` (R36), puts the message into the store's
turn buffer and its finished reply into `acks`, and calls `schedule_flush`. At the end of the loop
turn all of it is written with one `pwrite` and replicated with one notice. When confirmOffset
passes the end of a record, its reply leaves (G1, R1). `ConfirmRule` says who confirms.

Turns are not lengthened to gather more sends. A sleep of 200 to 1500 µs was measured with the stock
Java client: it saved no processor time and cost up to a third of the rate, because a connection
with many sends in flight gathers them by itself.

`SendHold` keeps sends in order instead of refusing them: while a planned switch drains this master
(R33), and until a replica that was just elected opens. They are not in the log. After the release
each is handled as if it arrived then. The release is spread over turns of the loop, because
thousands at once would delay heartbeats (R34); a send that arrives meanwhile queues behind them.
Held sends are bounded in number, bytes and time.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

from batonmq.broker.config import BrokerConfig
from batonmq.broker.role_gate import RoleGate
from batonmq.broker.write.broker_stats import BrokerStats
from batonmq.broker.write.pending_acks import SLICE, AckPause, FlowControl, Outcome, PendingAcks
from batonmq.broker.write.put_hooks import PutHooks
from batonmq.broker.write.set_aside import SetAside
from batonmq.ha.shells import HAService
from batonmq.protocol.codes import ResponseCode
from batonmq.protocol.errors import BrokerRefusal
from batonmq.protocol.records.codec import NewMessage
from batonmq.protocol.role_view import Role
from batonmq.remoting.command import RemotingCommand
from batonmq.remoting.connection import Connection, RawHandler
from batonmq.remoting.headers import NO_FIELDS, refusal
from batonmq.runtime.clock import wall_ms
from batonmq.store.appender import PutResult
from batonmq.store.config import StoreConfig
from batonmq.store.message_store import MessageStore

HELD_MAX = 20_000
HELD_BYTES_MAX = 64 << 20
HELD_SLICE = 500
"""Handled in a turn in addition to as many as arrived in the last one; about 10 ms."""
HELD_MOST_S = 0.8
"""The limit if no role change follows; longer than a switch may hold (R33)."""

NOT_REPLICATED = "stored, but not on every required replica in time"
NOT_FLUSHED = "stored, but not on this broker's disk in time"


class SendHold:
    """The hot path reads only `active`: True from `begin` until all sends are handled."""

    def __init__(self) -> None:
        self.active = False
        self._held: deque[tuple[RawHandler, Connection, int, bytes, bytes]] = deque()
        self._bytes = 0
        self._came = 0
        self._timer: asyncio.TimerHandle | None = None
        self._next_slice: asyncio.Handle | None = None

    def __len__(self) -> int:
        return len(self._held)

    def begin(self) -> None:
        """Holds sends from now on. A second call restarts the time limit."""
        self._stop_waiting()
        self.active = True
        self._timer = asyncio.get_running_loop().call_later(HELD_MOST_S, self.release)

    def require_inactive(self) -> None:
        """Raises BrokerRefusal while sends are held, for requests that cannot be held."""
        if self.active:
            raise BrokerRefusal(
                ResponseCode.SERVICE_NOT_AVAILABLE,
                "the master of this group is changing: ask again",
            )

    def take(
        self, handler: RawHandler, connection: Connection, kind: int, header: bytes, body: bytes
    ) -> bool:
        """Holds the frame. False if the hold is full: the caller refuses the send."""
        if len(self._held) >= HELD_MAX or self._bytes + len(header) + len(body) > HELD_BYTES_MAX:
            return False
        self._held.append((handler, connection, kind, header, body))
        self._bytes += len(header) + len(body)
        self._came += 1
        return True

    def release(self) -> None:
        """Handles the held sends in order: some now, the rest in the next turns."""
        self._stop_waiting()
        self._came = 0
        self._release_slice()

    def _release_slice(self) -> None:
        self._next_slice = None
        # With a fixed number, sends that come faster than that would keep the hold from ever being
        # empty.
        count = min(len(self._held), HELD_SLICE + self._came)
        self._came = 0
        self.active = False  # else the handlers would hold these sends again
        try:
            for _ in range(count):
                handler, connection, kind, header, body = self._held.popleft()
                self._bytes -= len(header) + len(body)
                # No reply could reach this client any more, and it sends the message again
                # elsewhere.
                if not connection.closed:
                    connection.handle_again(handler, kind, header, body)
        # After an exception, too: a later send must not overtake those that are still held.
        finally:
            if self._held:
                self.active = True
                loop = asyncio.get_running_loop()
                self._next_slice = loop.call_soon(self._release_slice)

    def _stop_waiting(self) -> None:
        for waiting in (self._timer, self._next_slice):
            if waiting is not None:
                waiting.cancel()
        self._timer = self._next_slice = None


def outcome_of(future: asyncio.Future[None], what: str) -> Outcome:
    """Ends `future` by the outcome of a write; a failure is BrokerRefusal about `what`."""

    def outcome(code: int, remark: str) -> None:
        # Who awaited it may have been cancelled, and the future with it.
        if future.done():
            return
        if code == ResponseCode.SUCCESS:
            future.set_result(None)
        else:
            future.set_exception(BrokerRefusal(code, f"{what}: {remark}"))

    return outcome


class ConfirmRule(Protocol):
    """When a write is confirmed, and so acknowledged: one for each mode. Offsets are exclusive
    ends."""

    def written(self, offset: int) -> None:
        """All below is in the log file, at the end of a turn."""

    def flushed(self, offset: int) -> None:
        """All below is on this broker's disk."""

    def tick(self) -> None:
        """A pause of acks may be over."""

    def pauses(self, now_ms: int) -> bool:
        """Whether nothing may be acknowledged now."""

    def first_acked(self, waited_ms: int) -> None:
        """The first write of a mastership was acknowledged; how long it had waited."""


class OwnDiskConfirms:
    """Outside controller mode: what is written here, or flushed under SYNC_FLUSH, is confirmed, so
    readers see it. It is acknowledged at once; as SYNC_MASTER (`waits`) when enough slaves have it.
    """

    def __init__(self, path: WritePath, ha: HAService | None, *, waits: bool) -> None:
        self._path = path
        self._ha = ha
        self._own_end = 0
        self._slaves_end: int | None = 0 if waits else None

    def written(self, offset: int) -> None:
        if self._ha is not None:
            self._ha.notify_append(offset)
        if not self._path.sync_flush:
            self._on_own_disk(offset)

    def flushed(self, offset: int) -> None:
        if self._ha is not None:
            self._ha.notify_flushed(offset)
        if self._path.sync_flush and self._path.gate.is_master:
            self._on_own_disk(offset)

    def _on_own_disk(self, offset: int) -> None:
        self._own_end = offset
        if self._slaves_end is None:
            self._path.confirmed(offset)
        else:
            # Consumers see a write at once, as with Java; only its acknowledgement waits for
            # slaves.
            self._path.release(min(offset, self._slaves_end))
            self._path.store.advance_confirm_offset(offset)

    def held_by_slaves(self, offset: int) -> None:
        """As SYNC_MASTER: enough slaves have all below `offset`."""
        if self._slaves_end is not None:
            self._slaves_end = offset
            self._path.release(min(offset, self._own_end))

    def tick(self) -> None: ...

    def pauses(self, now_ms: int) -> bool:
        return False

    def first_acked(self, waited_ms: int) -> None: ...


class MembersConfirm:
    """Under controllers `ha` calls `WritePath.confirmed` when every required member has a write."""

    def __init__(
        self,
        path: WritePath,
        ha: HAService,
        lease_valid: Callable[[int], bool],
        first_acked: Callable[[int], None],
    ) -> None:
        self._path = path
        self.written = ha.notify_append
        self.flushed = ha.notify_flushed
        self.pauses = AckPause(lease_valid).holds
        self.first_acked = first_acked

    def tick(self) -> None:
        self._path.confirmed(self._path.store.confirm_offset)


class WritePath:
    """What every write passes, from the put to the acknowledgement. Times are ms of `clock_ms`.
    `rule` is that of the broker's mode."""

    def __init__(
        self,
        store: MessageStore,
        *,
        ack_wait_ms: int,
        sync_flush: bool,
        clock_ms: Callable[[], int],
        hooks: PutHooks | None = None,
        flow: FlowControl | None = None,
        gate: RoleGate | None = None,
    ) -> None:
        """`hooks` and `flow` None: those of the default settings."""
        self.store = store
        self.clock_ms = clock_ms
        self.gate = RoleGate() if gate is None else gate
        self.hold = SendHold()
        self.acks = PendingAcks(ack_wait_ms)
        self.stats = BrokerStats(clock_ms)
        self.aside = SetAside()
        self.flow = flow or FlowControl(BrokerConfig(), StoreConfig())
        self._hooks = hooks or PutHooks(StoreConfig())
        self.sync_flush = sync_flush
        # Until the broker knows its mode.
        self.rule: ConfirmRule = OwnDiskConfirms(self, None, waits=False)
        self._scheduled = False
        self._written_end = 0

    def put_message(self, message: NewMessage, *, stored: bool = False) -> PutResult:
        """Puts a message into its topic, or into the one where it waits (`put_hooks`); `message`
        is changed then. `stored`: as of `Appender.put_message`. Call `schedule_flush` next. Raises
        PutRefused, and BrokerRefusal MESSAGE_ILLEGAL for an invalid delay property; nothing is
        stored then."""
        # Two searches of the bytes: almost no message waits, and decoding properties costs more.
        if b"DELAY\x01" in message.properties or b"TIMER_" in message.properties:
            self._hooks.apply(message, wall_ms())
        result = self.store.appender.put_message(message, stored=stored)
        self.stats.put(message.topic, 1, result.size)
        return result

    def put_system_record(self, topic: str, body: bytes) -> int:
        """Appends a record of this broker's own, if it takes writes; returns its end offset."""
        # While it takes no writes, what its log says holds.
        if self.gate.refusal is not None:
            return self.store.appender.end
        result = self.store.appender.put_message(
            NewMessage(topic, 0, body, b"", 0, None, None, 0, b"\0" * 8)
        )
        self.schedule_flush()
        return result.end_offset

    def answer_when_confirmed(
        self,
        end_offset: int,
        request: RemotingCommand,
        connection: Connection,
        fields: Mapping[str, str] = NO_FIELDS,
    ) -> None:
        """Answers code 0 with `fields` when all below `end_offset` is confirmed."""
        if request.is_oneway:
            return
        reply = refusal(request.opaque, ResponseCode.SUCCESS, "", fields)
        # No further ack may come, and `acks` would hold the reply until its deadline.
        if end_offset <= self.store.confirm_offset:
            connection.write(reply)
        else:
            self.acks.add(end_offset, self.clock_ms(), connection, reply)

    def wait_confirmed(self, end_offset: int, what: str) -> Awaitable[None]:
        """Done when all below `end_offset` is confirmed; else raises BrokerRefusal about `what`."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.acks.add_waiter(end_offset, self.clock_ms(), outcome_of(future, what))
        return future

    async def answer(self, end_offset: int, request: RemotingCommand, what: str) -> RemotingCommand:
        """A reply with code 0, once all below `end_offset` is confirmed. Raises as
        `wait_confirmed`."""
        await self.wait_confirmed(end_offset, what)
        return RemotingCommand.response_to(request)

    def still_master(self, what: str) -> Awaitable[None]:
        """Done once this broker has proved that it is still the master: all that was put is
        confirmed, also what a full disk keeps from the log (R45), and no pause delays acks (R8).
        Raises BrokerRefusal, which names `what`."""
        waits = self.wait_confirmed(self.store.appender.end, what)
        # If all is confirmed already, no ack comes that would end this wait.
        self.confirmed(self.store.confirm_offset)
        return waits

    def schedule_flush(self) -> None:
        """Something was put: `end_turn` follows at the end of this loop turn."""
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._end_turn)

    def _end_turn(self) -> None:
        self.end_turn(whole=False)
        if self.store.appender.is_placing:
            self.schedule_flush()

    def end_turn(self, *, whole: bool = True) -> None:
        """Writes what this turn put into the log file, and replicates or confirms it. Without
        `whole` the rest of a large batch is left to the next turns (R58)."""
        # Before the write: if that raises, the next put must be able to schedule another turn.
        self._scheduled = False
        began_ms = self.clock_ms()
        end_offset = self._written_end = self.store.end_turn(whole=whole)
        self.flow.wrote(began_ms, self.clock_ms())
        self.rule.written(end_offset)
        if self.sync_flush:
            self.store.background.request_flush()

    def flushed(self, flushed_offset: int) -> None:
        self.rule.flushed(flushed_offset)

    def confirmed(self, offset: int) -> None:
        """All below `offset` is on every required member. Code 0 leaves only here, and only for
        the epoch in which its write was taken (R4)."""
        self.release(offset)
        self.store.advance_confirm_offset(offset)

    def release(self, offset: int) -> None:
        """Acknowledges what ends at or below `offset`, unless the rule pauses acks or the role has
        changed."""
        gate, acks, now_ms = self.gate, self.acks, self.clock_ms()
        paused = self.rule.pauses(now_ms)
        # A slave's ack may arrive after the role changed: those writes were refused already (R4).
        if not paused and gate.role is Role.MASTER and acks.master_epoch == gate.master_epoch:
            if acks.first_due:
                waited_ms = acks.waited_ms(now_ms)
                if acks.confirm(offset, now_ms):
                    acks.first_due = False
                    self.rule.first_acked(waited_ms)
            else:
                acks.confirm(offset, now_ms)

    def tick(self, now_ms: int) -> None:
        """Releases acks after a pause, and states queue positions if no write does it (R38), except
        while a planned switch drains the log."""
        if self.gate.refusal is None and not self.hold.active and self.store.positions.put_if_due():
            self.schedule_flush()
        if self.gate.is_master and self.store.max_phy_offset != self._written_end:
            self.end_turn()  # a full disk kept records of an earlier turn in memory (R45)
        self.rule.tick()

    def fail_late(self, now_ms: int) -> bool:
        """Fails writes that waited too long, and answers failed ones, a slice a call; whether there
        may be more."""
        return self.acks.expire(now_ms, self._why_late) >= SLICE or self.acks.answer_failed()

    def _why_late(self, end_offset: int) -> tuple[int, str]:
        if self.sync_flush and self.store.log.flushed_offset < end_offset:
            return ResponseCode.FLUSH_DISK_TIMEOUT, NOT_FLUSHED
        return ResponseCode.FLUSH_SLAVE_TIMEOUT, NOT_REPLICATED
