"""The messages that each group has in flight, how far it has popped, and the records of both. Pure.

Records in the only queue of the topic rmq_sys_BATON_POP say what was popped, acknowledged or
postponed. The state is what the records say, so it is confirmed, cut and inherited with the log
(R30). A master applies a record when it puts it. A new master reads the records from
`oldest_record` on. Java keeps check points and acks as timed messages of rmq_sys_REVIVE_LOG, merges
them when they are due, and answers before they are replicated.

A message is in flight for a group at most once. If it is popped again after a reset, or gets
another invisible time, the newer handle counts and the older one acknowledges nothing. An orderly
pop blocks its queue (`is_blocked`). Times are wall clock ms.
Origin: Java `PopCheckPoint`, `PopBufferMergeService`, `ConsumerOrderInfoManager`.
"""

import heapq
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar, Final, Self

import msgspec

from batonmq.protocol.errors import RemoteProtocolError
from batonmq.protocol.system_record import SystemRecord

NO_POSITION: Final = -1
Key = tuple[str, str, int]
"""Group, topic, queue id; the topic may be a retry topic of POP."""

NEVER: Final = 1 << 62
_BUCKET_BITS: Final = 7
"""Due times are rounded up to buckets of 128 ms."""
ORDER_KEPT_MS: Final = 24 * 3600 * 1000
"""How long an abandoned orderly pop is remembered, as in Java."""


class Popped(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Messages that a consumer has until `due` (ms, wall clock).

    `next`: where the group continues in this queue; NO_POSITION if only the time changes.
    `last_phy`: the physical offset of the last one; after a cut, or a deletion and new creation of
    the topic, another message is there. `order`: the queue is blocked until they are acknowledged.
    """

    key: Key
    pop_time: int
    due: int
    offsets: list[int]
    last_phy: int
    next: int = NO_POSITION
    order: bool = False
    attempt: str = ""


class Acked(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Messages that are settled: acknowledged, or put into a retry topic."""

    key: Key
    pop_time: int
    offsets: list[int]


class PutOff(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One message of an orderly pop becomes visible again at `visible`."""

    key: Key
    pop_time: int
    offset: int
    visible: int


class PopRecord(SystemRecord, frozen=True, kw_only=True, omit_defaults=True):
    """`reset`: queues whose position an operator has set; earlier pops no longer count for them."""

    KIND: ClassVar = "POP"
    popped: list[Popped] = msgspec.field(default_factory=list)
    acked: list[Acked] = msgspec.field(default_factory=list)
    put_off: list[PutOff] = msgspec.field(default_factory=list)
    reset: list[Key] = msgspec.field(default_factory=list)

    @classmethod
    def decode(cls, body: bytes) -> Self:
        record = super().decode(body)
        if not all(one.offsets for one in record.popped):
            raise RemoteProtocolError("POP record: popped without offsets")
        return record


@dataclass(slots=True, eq=False)
class CheckPoint:
    """Messages of one queue that were popped together. `open`: the offsets that are not settled.
    `record`: the queue offset of its record. For orderly pops: `visible`: when an offset is visible
    again, if not at `due`; `counts`: how often it was delivered before."""

    key: Key
    pop_time: int
    due: int
    offsets: list[int]
    last_phy: int
    record: int
    open: set[int]
    order: bool = False
    attempt: str = ""
    visible: dict[int, int] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)
    wakes_at: int = 0

    @property
    def first_open(self) -> int:
        """The first offset that is not settled, or one past the last."""
        return min(self.open, default=self.offsets[-1] + 1)

    def visible_at(self) -> int:
        """When all open offsets are visible again."""
        return max((self.visible.get(one, self.due) for one in self.open), default=0)


@dataclass(frozen=True, slots=True)
class Position:
    """Where a group continues in a queue according to the records. It is valid only if the message
    at `last_offset` is still at `last_phy` of the log."""

    next_offset: int
    last_offset: int
    last_phy: int


class PopTable:
    """`next_record` is the queue offset of the record to read next."""

    def __init__(self, next_record: int = 0) -> None:
        # Queue to offset to its newest pop; orderly pops are in `_orders` only.
        self._in_flight: dict[Key, dict[int, CheckPoint]] = {}
        self._orders: dict[Key, CheckPoint] = {}
        # Queue offset of a record to its open check points. The oldest record comes first: the log
        # must keep it. The inner dicts serve as ordered sets.
        self._records: OrderedDict[int, dict[CheckPoint, None]] = OrderedDict()
        self._buckets: dict[int, dict[CheckPoint, None]] = {}
        self._heap: list[int] = []  # the numbers of `_buckets`
        self._count = 0
        self.positions: dict[Key, Position] = {}
        self.collects = False
        """Whether `positions` is filled; only a new master needs it."""
        self.next_record = next_record

    def __len__(self) -> int:
        """How many messages are in flight."""
        return self._count

    def in_flight_of(self, key: Key) -> int:
        return len(self._in_flight.get(key, ()))

    def apply(self, record: PopRecord, at: int) -> None:
        """Applies the record at queue offset `at`, which this master has put or read."""
        self.next_record = at + 1
        for key in record.reset:
            self.positions.pop(key, None)
            # A reset also frees a queue that an orderly pop blocks.
            if (order := self._orders.get(key)) is not None:
                self.forget(order)
        for popped in record.popped:
            self._pop(popped, at)
        for acked in record.acked:
            self._ack(acked)
        for put_off in record.put_off:
            self._put_off(put_off)

    def _pop(self, popped: Popped, at: int) -> None:
        point = CheckPoint(
            popped.key,
            popped.pop_time,
            popped.due,
            popped.offsets,
            popped.last_phy,
            at,
            set(popped.offsets),
            popped.order,
            popped.attempt,
        )
        if popped.order:
            self._replace_order(point)
        else:
            queue = self._in_flight.setdefault(popped.key, {})
            for offset in popped.offsets:
                older = queue.get(offset)
                if older is not None:
                    # Popped again: the older handle may no longer acknowledge this message.
                    self._close(older, (offset,))
                queue = self._in_flight.setdefault(popped.key, queue)  # `_close` may drop it
                queue[offset] = point
        if self.collects and popped.next != NO_POSITION:
            self.positions[popped.key] = Position(popped.next, popped.offsets[-1], popped.last_phy)
        self._count += len(point.open)
        self._records.setdefault(at, {})[point] = None
        self.wake(point, popped.due)

    def _replace_order(self, point: CheckPoint) -> None:
        older = self._orders.pop(point.key, None)
        if older is not None:
            is_repeated = older.pop_time == point.pop_time or (
                point.attempt and point.attempt == older.attempt
            )
            again = 0 if is_repeated else 1  # the same attempt id: the reply was lost
            for offset in point.open & set(older.offsets):
                point.counts[offset] = older.counts.get(offset, 0) + again
            # In an orderly queue only the newest pop counts.
            self._close(older, tuple(older.open))
        self._orders[point.key] = point

    def _ack(self, acked: Acked) -> None:
        if (order := self.order_by_handle(acked.key, acked.pop_time)) is not None:
            self._close(order, acked.offsets)
            # The acknowledged offset may have been the last one to become visible.
            if order.open:
                self.wake(order, order.visible_at())
            if self.collects:
                # An orderly group gets nothing behind the first message that is not settled.
                self.positions[acked.key] = Position(
                    order.first_open, order.offsets[-1], order.last_phy
                )
            return
        queue = self._in_flight.get(acked.key, {})
        for offset in acked.offsets:
            point = queue.get(offset)
            if point is not None and point.pop_time == acked.pop_time:
                self._close(point, (offset,))

    def _put_off(self, put_off: PutOff) -> None:
        if (order := self.order_by_handle(put_off.key, put_off.pop_time)) is not None:
            order.visible[put_off.offset] = put_off.visible
            self.wake(order, order.visible_at())

    def _close(self, point: CheckPoint, offsets: Iterable[int]) -> None:
        """Settles these offsets; drops a check point that has no open ones left."""
        queue = self._in_flight.get(point.key, {})
        for offset in offsets:
            if offset not in point.open:
                continue
            point.open.discard(offset)
            self._count -= 1
            if queue.get(offset) is point:  # not if it was popped again
                del queue[offset]
        if point.open:
            return
        if not queue:
            self._in_flight.pop(point.key, None)
        if self._orders.get(point.key) is point:
            del self._orders[point.key]
        self._leave_bucket(point)
        # Without open check points of this record `oldest_record` moves, and the log may expire.
        record = self._records[point.record]
        del record[point]
        if not record:
            del self._records[point.record]

    # Who has what.

    def open_offsets(self, acked: Acked) -> list[int]:
        """Which of the offsets are in flight by exactly that pop."""
        if (order := self.order_by_handle(acked.key, acked.pop_time)) is not None:
            return [offset for offset in acked.offsets if offset in order.open]
        queue = self._in_flight.get(acked.key, {})
        return [
            offset
            for offset in acked.offsets
            if (point := queue.get(offset)) is not None and point.pop_time == acked.pop_time
        ]

    def order_of(self, key: Key) -> CheckPoint | None:
        """The orderly pop that blocks a queue."""
        return self._orders.get(key)

    def order_by_handle(self, key: Key, pop_time: int) -> CheckPoint | None:
        """The same, if it has this pop time; an older handle changes nothing."""
        order = self._orders.get(key)
        return order if order is not None and order.pop_time == pop_time else None

    def is_blocked(self, key: Key, attempt: str, now_ms: int) -> bool:
        """Whether an orderly pop has to wait. The same attempt does not wait: it gets the same
        messages again."""
        order = self._orders.get(key)
        if order is None or (attempt and attempt == order.attempt):
            return False
        return order.visible_at() > now_ms

    # What is due.

    def wake(self, point: CheckPoint, at_ms: int) -> None:
        """`next_due` returns the check point from `at_ms` on, not earlier."""
        self._leave_bucket(point)
        point.wakes_at = at_ms
        # Buckets keep the heap small: thousands of pops share one entry.
        number = at_ms >> _BUCKET_BITS
        bucket = self._buckets.get(number)
        if bucket is None:
            bucket = self._buckets[number] = {}
            heapq.heappush(self._heap, number)
        bucket[point] = None

    def _leave_bucket(self, point: CheckPoint) -> None:
        bucket = self._buckets.get(point.wakes_at >> _BUCKET_BITS)
        if bucket is not None:
            bucket.pop(point, None)

    @property
    def wake_ms(self) -> int:
        """When to look next, NEVER if nothing is in flight."""
        # Acknowledged check points leave empty buckets behind.
        while self._heap and not self._buckets[self._heap[0]]:
            del self._buckets[heapq.heappop(self._heap)]
        # The end of the bucket, so that no message is revived early.
        return (self._heap[0] + 1) << _BUCKET_BITS if self._heap else NEVER

    def next_due(self, now_ms: int) -> CheckPoint | None:
        """A check point that is due. It stays due until its offsets are settled or `wake` postpones
        it."""
        if self.wake_ms > now_ms:
            return None
        return next(iter(self._buckets[self._heap[0]]))

    def forget(self, point: CheckPoint) -> None:
        """Drops an abandoned orderly pop and frees its queue."""
        self._close(point, tuple(point.open))

    # What the log has to keep.

    @property
    def oldest_record(self) -> int:
        """The first record that a new master must read."""
        return next(iter(self._records), self.next_record)

    def of_oldest_record(self) -> list[CheckPoint]:
        """The check points of the oldest record that are still open."""
        return list(next(iter(self._records.values()), ()))
