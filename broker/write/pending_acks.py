"""Writes that wait for confirmOffset: only this module sends their success (code 0). Pure.

Invariant (R4): all entries belong to one masterEpoch. A role change fails all of them before a byte
is cut, so the confirmOffset of one epoch never releases a reply of another.
Origin: GroupTransferService in Java, without its thread.

`FlowControl` refuses sends (SYSTEM_BUSY) that would only time out, so that their producer tries
another broker: if too many wait already, or if they queued up while the disk blocked a write.
Origin: BrokerFastFailure and the limit of the send queue in Java.
"""

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable
from typing import Final, Protocol

from batonmq.broker.config import BrokerConfig
from batonmq.protocol.codes import ResponseCode
from batonmq.protocol.errors import BrokerRefusal
from batonmq.remoting.headers import recode
from batonmq.store.config import StoreConfig

CLEAN_MS: Final = 50
"""How long sends are refused after a slow write: until what waited in the sockets is read."""
STALL_MS: Final = 400
"""A process that was stopped for so long may have lost its lease."""
PAUSE_MAX_MS: Final = 1_000
Outcome = Callable[[int, str], None]
"""Called once with (response code, remark); code 0 means confirmed."""
SLICE: Final = 512
WAIT_BOUNDS_MS: Final = (
    0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 3_000, 4_000, 5_000, 10_000,
)  # fmt: skip
"""The bounds of RocketMQ's `putMessageDistributeTime` are among them."""


class ReplySink(Protocol):
    """Where a finished frame goes (a remoting Connection)."""

    def write(self, frame: bytes) -> None: ...


_Reply = tuple[int, int, ReplySink, bytes]
"""End offset, deadline, connection, frame."""


class PendingAcks:
    """The waiting acks of one masterEpoch. Offsets are exclusive ends; times are ms."""

    def __init__(self, wait_ms: int) -> None:
        self.wait_ms = wait_ms
        self.master_epoch = 0
        self.first_due = False
        """No reply of this mastership has left yet."""
        self.waits = [0] * (len(WAIT_BOUNDS_MS) + 1)
        """How many replies were released within each bound, and beyond the last."""
        self.waited_ms_total = self.longest_ms = 0
        self.failed_by_code: Counter[int] = Counter()
        # In order of their deadlines, because all wait equally long, and almost in order of their
        # end offsets: so a deque is enough. A reply that waited for name servers is added late, and
        # leaves with those before it.
        self._replies: deque[_Reply] = deque()
        self._waiters: deque[tuple[int, int, Outcome]] = deque()
        # Failed replies that were not answered yet: replies, code, remark.
        self._failed: deque[tuple[deque[_Reply], int, str]] = deque()

    def __len__(self) -> int:
        return len(self._replies) + len(self._waiters)

    def waited_ms(self, now_ms: int) -> int:
        """How long the oldest reply has waited, 0 if none waits."""
        return now_ms - (self._replies[0][1] - self.wait_ms) if self._replies else 0

    def add(self, end_offset: int, now_ms: int, sink: ReplySink, reply: bytes) -> None:
        """Keeps `reply`, a whole frame with code 0, until all below `end_offset` is confirmed."""
        self._replies.append((end_offset, now_ms + self.wait_ms, sink, reply))

    def add_waiter(self, end_offset: int, now_ms: int, outcome: Outcome) -> None:
        """Calls `outcome` when all below `end_offset` is confirmed, or when that has failed."""
        self._waiters.append((end_offset, now_ms + self.wait_ms, outcome))

    def confirm(self, confirm_offset: int, now_ms: int) -> int:
        """Releases every reply whose end is at or below `confirm_offset`; returns how many."""
        replies, waits, began_ms = self._replies, self.waits, now_ms + self.wait_ms
        if replies and replies[0][0] <= confirm_offset:  # the oldest of those that leave now
            self.longest_ms = max(self.longest_ms, began_ms - replies[0][1])
        before = len(replies)
        while replies and replies[0][0] <= confirm_offset:
            entry = replies.popleft()
            entry[2].write(entry[3])
            waited_ms = began_ms - entry[1]
            waits[bisect_left(WAIT_BOUNDS_MS, waited_ms)] += 1
            self.waited_ms_total += waited_ms
        while self._waiters and self._waiters[0][0] <= confirm_offset:
            self._waiters.popleft()[2](0, "")
        return before - len(replies)

    def fail_all(self, code: int, remark: str) -> int:
        """Fails every entry (R4): outcomes and a slice of the replies now, the other replies by
        `answer_failed`. Returns how many there were."""
        failed = len(self)
        self.failed_by_code[code] += len(self._replies)
        waiters, self._waiters = self._waiters, deque()
        # Thousands of refusals in one turn would delay heartbeats (R34).
        self._failed.append((self._replies, code, remark))
        self._replies = deque()
        self.answer_failed()
        for _, _, outcome in waiters:
            outcome(code, remark)
        return failed

    def answer_failed(self) -> bool:
        """Answers a slice of the failed replies; whether there are more."""
        left = SLICE
        while self._failed and left:
            replies, code, remark = self._failed[0]
            for _ in range(min(left, len(replies))):
                left -= 1
                _, _, sink, reply = replies.popleft()
                sink.write(recode(reply, code, remark))
            if not replies:
                self._failed.popleft()
        return bool(self._failed)

    def begin_epoch(self, master_epoch: int) -> None:
        """Starts a mastership; `fail_all` came before."""
        assert not self._replies, "acks of an older epoch are still pending (R4)"
        self.master_epoch = master_epoch
        self.first_due = True

    def expire(self, now_ms: int, code_of: Callable[[int], tuple[int, str]]) -> int:
        """Fails up to SLICE expired entries, each with `code_of(end_offset)`; returns how many."""
        expired = 0
        replies = self._replies
        while replies and replies[0][1] <= now_ms and expired < SLICE:
            end_offset, _, sink, reply = replies.popleft()
            code, remark = code_of(end_offset)
            self.failed_by_code[code] += 1
            sink.write(recode(reply, code, remark))
            expired += 1
        while self._waiters and self._waiters[0][1] <= now_ms and expired < SLICE:
            end_offset, _, outcome = self._waiters.popleft()
            outcome(*code_of(end_offset))
            expired += 1
        return expired


class AckPause:
    """After its own process was stopped, a master acknowledges nothing until its lease is renewed
    (R8). Times are ms of the clock of `lease_valid`.

    A process that was stopped for longer than its lease finds the acks of its slaves in its sockets
    when it wakes. Every member has those bytes, so the replies would break no promise (R1). But
    another replica may be master by then, and clients must not get replies from two masters.
    """

    def __init__(self, lease_valid: Callable[[int], bool]) -> None:
        self._lease_valid = lease_valid
        self._seen_ms: int | None = None
        self._until_ms = 0

    def holds(self, now_ms: int) -> bool:
        """Whether acks wait. Call it in every turn that could release one, and in every tick."""
        # No call for so long: this process, or its loop, was stopped.
        if self._seen_ms is not None and now_ms - self._seen_ms >= STALL_MS:
            self._until_ms = now_ms + PAUSE_MAX_MS
        self._seen_ms = now_ms
        # After PAUSE_MAX_MS no controller is reachable, and a healthy group continues (R36).
        if now_ms >= self._until_ms:
            return False
        if self._lease_valid(now_ms):
            self._until_ms = 0
            return False
        return True


class FlowControl:
    """Times are ms of one monotonic clock."""

    def __init__(self, broker: BrokerConfig, store: StoreConfig) -> None:
        self._broker = broker
        self._store = store
        self._clean_until_ms = 0
        self.last_write_ms = 0
        """How long the log's last write took."""

    def wrote(self, began_ms: int, now_ms: int) -> None:
        self.last_write_ms = now_ms - began_ms
        if self.last_write_ms > self._store.os_page_cache_busy_timeout_ms:
            self._clean_until_ms = now_ms + CLEAN_MS

    def check(self, waiting: int, now_ms: int) -> None:
        """A send arrived while so many are `waiting`. Raises BrokerRefusal."""
        broker = self._broker
        if waiting >= broker.send_thread_pool_queue_capacity:
            raise BrokerRefusal(
                ResponseCode.SYSTEM_BUSY,
                f"[OVERLOAD]system busy, start flow control for a while: {waiting} sends wait for"
                " their acknowledgement (sendThreadPoolQueueCapacity)",
            )
        if now_ms < self._clean_until_ms and broker.broker_fast_failure_enable:
            raise BrokerRefusal(
                ResponseCode.SYSTEM_BUSY,
                "[PCBUSY_CLEAN_QUEUE]broker busy, start flow control for a while: the last write of"
                f" the log took {self.last_write_ms} ms (osPageCacheBusyTimeOutMills)",
            )
