"""The records of transactions, which transactions are open, and which are due for a check. Pure.

The records are half message, op, committed message, and the copy for a check. Committed message and
copy are made from the half message, so body, properties and birth time stay.

A half message is open from its confirmation until an op record names its queue offset. A new master
reads both queues from the recorded progress on, and so knows what is open (`TransactionTable`). A
check writes the half again with a higher count, and ends its first copy. A half with the key of an
earlier one replaces that one, whether a check or a producer's retry wrote it.

Times are wall clock ms. Origin: Java `TransactionalMessageBridge`, `EndTransactionProcessor`,
`TransactionalMessageServiceImpl.check`, which reads both queues again in each round.
"""

import hashlib
import heapq
from collections import deque
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from batonmq.protocol.codes import ResponseCode
from batonmq.protocol.errors import BrokerRefusal
from batonmq.protocol.numbers import INT_MAX, whole_number
from batonmq.protocol.properties import (
    CHECK_IMMUNITY_TIME_IN_SECONDS,
    PGROUP,
    REAL_QID,
    REAL_TOPIC,
    TAGS,
    TRAN_MSG,
    TRANSACTION_CHECK_TIMES,
    TRANSACTION_ID,
    decode_properties,
    encode_properties,
    find_property,
)
from batonmq.protocol.records.codec import Buffer, NewMessage, message_to_store, scan_record
from batonmq.protocol.sysflag import TRANSACTION_COMMIT, TRANSACTION_MASK
from batonmq.protocol.tags import tags_code
from batonmq.protocol.topic_name import (
    CLIENT_ID_LENGTH_MAX,
    DLQ_PREFIX,
    RETRY_PREFIX,
    TRANS_HALF_TOPIC,
    TRANS_OP_HALF_TOPIC,
)

NEVER: Final = 1 << 62

OUTDATED_MAX: Final = 1024
"""Entries of halves that have ended, which one call may meet; there may be so many more than halves
that are open."""
OPS_MAX: Final = 1 << 16
QUEUE: Final = 0
OP_TAG: Final = "d"
IMMUNITY_DEFAULT_MS: Final = 6000
_KEY_MAX: Final = 256
"""Bytes of a key in memory; a longer one is hashed (R58)."""
_DELAYS: Final = ("DELAY", "TIMER_DELAY_SEC", "TIMER_DELAY_MS", "TIMER_DELIVER_MS")


class Half(NamedTuple):
    """An open half message. `checks`: how often it was checked. `immunity_ms`: no check before this
    time has passed since it was stored; None: the broker's setting. `key`: its
    `transaction_key`."""

    queue_offset: int
    phy_offset: int
    size: int
    key: bytes
    group: str
    stored_ms: int
    checks: int = 0
    immunity_ms: int | None = None


@dataclass(frozen=True, slots=True)
class CheckRules:
    """A half is checked `timeout_ms` after it was stored, then every `interval_ms`. After
    `check_max` checks, or if it is older than `age_max_ms`, it is given up."""

    timeout_ms: int
    interval_ms: int
    check_max: int
    age_max_ms: int


class Due(NamedTuple):
    """What to do with a half now. "end": another one replaced it, and its op was not read yet."""

    half: Half
    action: Literal["check", "give up", "end"]


class TransactionTable:
    """What one mastership knows. `next_half` and `next_op` are the queue offsets to read next."""

    def __init__(self, rules: CheckRules, next_half: int = 0, next_op: int = 0) -> None:
        self.rules = rules
        self.next_half, self.next_op = next_half, next_op
        self._open: dict[int, Half] = {}
        self._by_key: dict[bytes, int] = {}
        self._ending: set[int] = set()
        self._replaced: set[int] = set()
        self._ops: deque[tuple[int, int]] = deque()
        self._due: list[tuple[int, int]] = []
        self._due_ms: dict[int, int] = {}
        """Open half -> the time of its valid entry in `_due`; its other entries are outdated."""
        self._without_producer: dict[str, dict[int, None]] = {}
        self._came: dict[int, None] = {}
        """Halves that waited for a producer, of which one is there now."""

    def __len__(self) -> int:
        return len(self._open)

    def half_seen(self, half: Half) -> int | None:
        """Takes the next half message of the queue; returns the offset of the one that it
        replaces."""
        # Set, not incremented: units may have been skipped before this half.
        self.next_half = half.queue_offset + 1
        replaced = self._by_key.get(half.key) if half.key else None
        if replaced is not None:
            # The previous master's log may end between a copy and the op of the original.
            self._replaced.add(replaced)
        self._open[half.queue_offset] = half
        if half.key:
            self._by_key[half.key] = half.queue_offset
        rules = self.rules
        wait_ms = rules.interval_ms if half.checks else rules.timeout_ms
        # The producer's own limit applies to the first check only; later ones follow the interval.
        if half.immunity_ms is not None and not half.checks:
            wait_ms = half.immunity_ms
        # Due before the log that holds it expires, also if it is to be immune for longer.
        self._due_at(half.stored_ms + min(wait_ms, rules.age_max_ms), half.queue_offset)
        return replaced

    def _due_at(self, due_ms: int, offset: int) -> None:
        # It may have ended since the caller took it up.
        if offset in self._open:
            # One valid entry for a half: each one is checked, and leads to another one.
            self._due_ms[offset] = due_ms
            heapq.heappush(self._due, (due_ms, offset))
            # R58: a producer says for how long a half is not checked, and may end it at once.
            if len(self._due) > 2 * len(self._due_ms) + OUTDATED_MAX:
                self._due = [(ms, each) for each, ms in self._due_ms.items()]
                heapq.heapify(self._due)

    def half_gone(self, queue_offset: int) -> None:
        """The next half message has expired, or cannot be read."""
        self.next_half = queue_offset + 1

    def skip_to(self, least_half: int, least_op: int) -> None:
        """The queues begin at these offsets now: earlier entries have expired."""
        self.next_half = max(self.next_half, least_half)
        self.next_op = max(self.next_op, least_op)

    def op_seen(self, op_offset: int, ended: list[int]) -> None:
        """Takes the next op record of the queue. `ended`: the half messages that it names."""
        self.next_op = op_offset + 1
        for offset in ended:
            half = self._open.pop(offset, None)
            self._due_ms.pop(offset, None)
            self._ending.discard(offset)
            self._replaced.discard(offset)
            # A newer half of this key stays open: only the named one has ended.
            if half is None:
                continue
            if self._by_key.get(half.key) == offset:
                del self._by_key[half.key]
            if waiting := self._without_producer.get(half.group):
                waiting.pop(offset, None)
                if not waiting:
                    del self._without_producer[half.group]
        # A new master needs this op as long as a half at or below its highest offset is open.
        self._ops.append((op_offset, max(ended, default=-1)))
        if len(self._ops) >= OPS_MAX:  # a half may be open for days: a new master reads some more
            pairs = zip(*[iter(self._ops)] * 2, strict=True)
            self._ops = deque((first, max(end, last)) for (first, end), (_, last) in pairs)

    def to_end(self, queue_offset: int, key: bytes) -> list[int]:
        """The open halves of a transaction, named by the offset that its producer knows. Empty if
        it has ended or is being ended. From now on they count as being ended."""
        offsets = self._open_of(queue_offset, key)
        # An end must not overtake a check, or the copy that the check writes would stay open.
        if any(offset in self._ending for offset in offsets):
            return []
        self._ending.update(offsets)
        return offsets

    def is_ending(self, queue_offset: int, key: bytes) -> bool:
        """Whether a half of that transaction is being ended, by a check or by its producer."""
        return any(offset in self._ending for offset in self._open_of(queue_offset, key))

    def _open_of(self, queue_offset: int, key: bytes) -> list[int]:
        latest = self._by_key.get(key)
        return [
            offset
            # The producer knows only its first offset; checks may have written newer copies since.
            for offset in dict.fromkeys((queue_offset, latest))
            if offset is not None and offset in self._open
        ]

    def not_ended(self, offsets: list[int], now_ms: int) -> None:
        """Ending the halves from `to_end` or `next_due` failed. They are due again after the
        interval."""
        self._ending.difference_update(offsets)
        for offset in offsets:
            # Its earlier heap entry may be gone.
            self._due_at(now_ms + self.rules.interval_ms, offset)

    def is_open(self, queue_offset: int) -> bool:
        """Whether the half message was read and no op names it."""
        return queue_offset in self._open

    def place_of(self, queue_offset: int) -> int:
        return self._open[queue_offset].phy_offset

    def is_waiting(self, key: bytes) -> bool:
        """Whether a half message of this unique key is open."""
        return key in self._by_key

    @property
    def wake_ms(self) -> int:
        """When the next half is due, NEVER if none is open."""
        if self._came:
            return 0
        return self._due[0][0] if self._due else NEVER

    def next_due(self, now_ms: int, believed_ms: int) -> Due | None:
        """The next half to check or to give up; until `later` it counts as being ended. `now_ms`
        (wall clock, may have leaped) decides about checks, `believed_ms` (from the monotonic clock)
        about giving up."""
        rules = self.rules
        if self._came:
            self._due_at(0, self._came.popitem()[0])  # first: its check was due already
        for _ in range(OUTDATED_MAX):  # R58: the rest in another turn
            if not self._due or self._due[0][0] > now_ms:
                break
            due_ms, offset = heapq.heappop(self._due)
            if offset in self._ending or self._due_ms.get(offset) != due_ms:
                continue
            half = self._open[offset]
            self._ending.add(offset)
            if offset in self._replaced:
                return Due(half, "end")
            # Give it up before the log that holds it expires.
            too_old = believed_ms - half.stored_ms >= rules.age_max_ms
            return Due(half, "give up" if half.checks >= rules.check_max or too_old else "check")
        return None

    def later(self, half: Half, now_ms: int, pause_ms: int | None = None) -> None:
        """The check was not possible: due again after the interval, or after `pause_ms`."""
        self._ending.discard(half.queue_offset)
        wait_ms = self.rules.interval_ms if pause_ms is None else pause_ms
        self._due_at(now_ms + wait_ms, half.queue_offset)

    def no_producer(self, half: Half, now_ms: int) -> None:
        """No producer of its group is connected: as `later`, but also due when one connects."""
        self.later(half, now_ms)
        self._without_producer.setdefault(half.group, {})[half.queue_offset] = None

    def group_came(self, group: str) -> bool:
        """A producer of the group connected: halves that waited for one are due now. Returns
        whether there are any."""
        waited = self._without_producer.pop(group, None)
        # One call of `next_due` takes up one of them: there may be a million (R58).
        self._came |= waited or {}
        return waited is not None

    def progress(self) -> tuple[int, int]:
        """(half offset, op offset) from which a new master must read."""
        # _open is in order of the queue, so its first entry is the oldest half.
        half = next(iter(self._open), self.next_half)
        ops = self._ops
        while ops and ops[0][1] < half:
            ops.popleft()
        return half, ops[0][0] if ops else self.next_op


def parse_op(body: bytes) -> list[int]:
    """The queue offsets of half messages in an op record's body, each followed by a comma. Anything
    but numbers is skipped."""
    numbers = map(whole_number, body.split(b","))
    return [number for number in numbers if number is not None and number >= 0]


def op_body(offsets: list[int]) -> bytes:
    return b"".join(b"%d," % offset for offset in offsets)


def is_half(message: NewMessage) -> bool:
    """Whether a sent message belongs to a transaction. Raises BrokerRefusal MESSAGE_ILLEGAL if it
    is delayed as well."""
    found = decode_properties(message.properties)
    # Java's consumers before 4.6.1 leave TRAN_MSG in what they send back. As a half message it
    # could be rolled back, and be lost.
    is_sent_back = message.topic.startswith((RETRY_PREFIX, DLQ_PREFIX))
    if is_sent_back or found.get(TRAN_MSG, "").lower() != "true":
        return False
    waits = [name for name in _DELAYS if found.get(name, "0") not in ("0", "-1")]
    if waits:
        raise BrokerRefusal(
            ResponseCode.MESSAGE_ILLEGAL,
            f"property TRAN_MSG together with {waits[0]}: a message of a transaction cannot be"
            " delayed; it was not stored",
        )
    return True


def make_half(message: NewMessage) -> None:
    """Turns a sent message into its half message, in place."""
    properties = decode_properties(message.properties)
    properties |= {
        TRANSACTION_ID: (message.uniq_key or b"").decode(),
        REAL_TOPIC: message.topic,
        REAL_QID: str(message.queue_id),
    }
    message.properties = encode_properties(properties).encode()
    # Clear the mark of Java producers: a prepared message gets no unit in its queue.
    message.sys_flag &= ~TRANSACTION_MASK
    message.topic, message.queue_id = TRANS_HALF_TOPIC, QUEUE


def half_of(record: Buffer) -> Half:
    head = scan_record(record)
    assert head is not None, "units point to whole records"
    properties = head.properties
    immunity = find_property(properties, CHECK_IMMUNITY_TIME_IN_SECONDS.encode())
    checks = find_property(properties, TRANSACTION_CHECK_TIMES.encode()) or b"0"
    return Half(
        head.queue_offset,
        head.physical_offset,
        head.size,
        transaction_key(properties),
        # R58: no producer has a longer name.
        (find_property(properties, PGROUP.encode()) or b"")[: CLIENT_ID_LENGTH_MAX + 1].decode(
            "utf-8", "replace"
        ),
        head.store_timestamp,
        max(0, whole_number(checks, INT_MAX) or 0),
        immunity_ms(immunity.decode("utf-8", "replace")) if immunity is not None else None,
    )


def transaction_key(properties: bytes) -> bytes:
    """The identity of a transaction; empty without UNIQ_KEY. UNIQ_KEY alone is not enough, because
    another send of the same message keeps it (R56)."""
    names = (b"UNIQ_KEY", REAL_TOPIC.encode(), REAL_QID.encode(), PGROUP.encode())
    parts = [find_property(properties, name) or b"" for name in names]
    key = b"\x01".join(parts) if parts[0] else b""
    return key if len(key) <= _KEY_MAX else hashlib.blake2b(key).digest()


def immunity_ms(text: str) -> int:
    """How long after its birth a half is not checked; 6 s for -1 and for anything but a number."""
    seconds = whole_number(text.strip(), INT_MAX)
    return seconds * 1000 if seconds is not None and seconds >= 0 else IMMUNITY_DEFAULT_MS


def real_place(properties: bytes) -> tuple[str, int] | None:
    """The real topic and queue of a half message; None if its properties lack them."""
    topic, queue_id = (find_property(properties, name.encode()) for name in (REAL_TOPIC, REAL_QID))
    number = whole_number(queue_id or b"", INT_MAX)
    if topic is None or number is None or number < 0:
        return None
    return topic.decode("utf-8", "replace"), number


def committed(record: Buffer, phy_offset: int, place: tuple[str, int]) -> NewMessage:
    """The message that a commit puts into its own topic and queue."""
    message = message_to_store(record)
    message.topic, message.queue_id = place
    message.sys_flag = message.sys_flag & ~TRANSACTION_MASK | TRANSACTION_COMMIT
    # By this field a new master sees that the half was committed (`recent_commits`).
    message.prepared_transaction_offset = phy_offset
    return message


def checked_once_more(record: Buffer, checks: int) -> NewMessage:
    """The copy of a half message that is checked now, for the `checks`-th time."""
    message = message_to_store(record)
    properties = decode_properties(message.properties)
    properties[TRANSACTION_CHECK_TIMES] = str(checks)
    message.properties = encode_properties(properties).encode()
    return message


def op(offsets: list[int], now_ms: int) -> NewMessage:
    """The record that ends the half messages at these queue offsets."""
    properties = encode_properties({TAGS: OP_TAG}).encode()
    body = op_body(offsets)
    return NewMessage(
        TRANS_OP_HALF_TOPIC,
        QUEUE,
        body,
        properties,
        tags_code(OP_TAG),
        None,
        None,
        now_ms,
        bytes(8),
    )
