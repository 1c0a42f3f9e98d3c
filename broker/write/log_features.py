"""What delays, timers, transactions and POP have in common: they live in the log.

`LogFeature` is the shell of one. It begins and ends with the mastership, reads from the log how far
the group is, and does what is due in slices, one in a turn of the loop. It writes nothing while
this master takes no writes, within a planned switch, or while the replicas are far behind.

`SystemRecords` passes the records of system topics to the tables that they change.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import ClassVar, Final, Protocol

from batonmq.broker.role_gate import RoleGate
from batonmq.broker.tables.offset_clamp import queue_end
from batonmq.broker.write.write_path import WritePath
from batonmq.protocol.errors import CorruptLogError, RemoteProtocolError
from batonmq.protocol.records.codec import RecordHead
from batonmq.runtime.clock import wall_ms
from batonmq.store.errors import PutIllegal, PutRefused
from batonmq.store.message_store import MessageStore

log = logging.getLogger(__name__)

UNCONFIRMED_BYTES_MAX: Final = 16 << 20
MAX_PAUSE_MS: Final = 1000
"""The longest pause: the wall clock may jump."""
BLOCKED_MS: Final = 10
REFUSED_MS: Final = 100
DAMAGED_MS: Final = 10_000
FAILED_MS: Final = 1000


class LogFeature:
    """A feature of one broker, on its loop. A subclass implements `_continue`, `_forget` and
    `_slice`, and the other methods if it needs them."""

    TOPICS: ClassVar[tuple[str, ...]] = ()
    """A message that arrives in one of these topics may be due."""

    def __init__(self, path: WritePath) -> None:
        self._path = path
        self._store = path.store
        self._timer: asyncio.Handle | None = None
        self._is_running = False

    def begin(self) -> None:
        """This broker has become master."""
        self.end()  # a mastership may begin in a newer epoch without an end before it (R55)
        self._continue()
        self._is_running = True
        self._wake_in(0)

    def end(self) -> None:
        """This broker is not master any more: from now on only the log counts."""
        self._is_running = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._forget()

    def arrived(self, queue_id: int) -> None:
        """A queue of one of TOPICS has new messages."""
        if self._is_running and self._is_first(queue_id):
            self._wake_in(0)

    def now_ms(self) -> int:
        """The wall clock, which due times use."""
        return wall_ms()

    def _continue(self) -> None:
        """Finds in the log, and in the progress of the group, where this mastership continues."""

    def _forget(self) -> None:
        """Drops all that this mastership knew."""

    def _is_first(self, _queue_id: int) -> bool:
        """Whether an arrival needs a slice now."""
        return True

    def _read(self) -> bool:
        """Reads what is new in the log, also while nothing may be written; returns whether there is
        more. Raises CorruptLogError."""
        return False

    def _slice(self, now_ms: int) -> int:
        """Does some of what is due; returns the shortest pause in ms before the next slice. Raises
        CorruptLogError."""
        raise NotImplementedError

    @property
    def _next_due_ms(self) -> int:
        """When something may be due next, wall clock ms; by default `_slice` decides that."""
        return 0

    def _range_of(self, topic: str, queue_id: int) -> tuple[int, int]:
        """The queue offsets that the log has, from its first to one past its last, confirmed or
        not. What the progress names may have expired, or been cut by a failover: stay inside."""
        least = self._store.queries.min_offset_in_queue(topic, queue_id)
        return least, queue_end(self._store, topic, queue_id)

    def _is_blocked(self) -> bool:
        path, store = self._path, self._store
        behind = store.max_phy_offset - store.confirm_offset
        return path.gate.refusal is not None or path.hold.active or behind > UNCONFIRMED_BYTES_MAX

    def _carried_out(self, what: str, put: Callable[[], bool]) -> bool:
        """Whether `put` need not be tried again: it returned True, or can never succeed (R54).
        Raises PutRefused and others if it may succeed later, CorruptLogError."""
        try:
            return put()
        # A full disk gets space again, and a damaged record is fetched again from a whole replica:
        # both may succeed later.
        except (OSError, CorruptLogError):
            raise
        except Exception as error:
            # The broker takes no writes now, which ends; an illegal message is refused each time.
            if isinstance(error, PutRefused) and not isinstance(error, PutIllegal):
                raise
            self._path.aside.add(type(self).__name__, what, error)
            return True

    def _wake_in(self, delay_ms: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(delay_ms / 1000, self._wake)

    def _wake(self) -> None:
        self._timer = None
        if not self._is_running:
            return
        aside, feature = self._path.aside, type(self).__name__
        try:
            more = self._read()
            if self._is_blocked():
                self._wake_in(0 if more else BLOCKED_MS)
                return
            pause_ms = self._slice(wall_ms())
            if more:
                pause_ms = 0
            aside.turn_done(feature)
        except CorruptLogError as error:
            # Its reader has reported it to the store, which heals this replica (R24).
            log.error("waiting_message_damaged reason=%s", error)
            pause_ms = DAMAGED_MS
        except Exception as error:  # R54: the timer of a feature does not end
            aside.turn_failed(feature, error)
            pause_ms = FAILED_MS
        # An arrival within the slice may have set the timer already, to an earlier time.
        if self._timer is None:
            due_in_ms = self._next_due_ms - wall_ms()
            self._wake_in(max(pause_ms, min(due_in_ms, MAX_PAUSE_MS)))


class RecordKind(Protocol):
    """A table that records of a system topic change. Each method gets a record's body and its end
    offset, in the order of the log. Raises RemoteProtocolError if it cannot be read."""

    def take_over_record(self, body: bytes, end_offset: int) -> None:
        """A new master finds the record in its own log, not confirmed yet: it counts for this
        mastership only."""

    def own_record_confirmed(self, body: bytes, end_offset: int) -> None:
        """A record that this master put is on every required member."""

    def apply_record(self, body: bytes, end_offset: int) -> None:
        """The record is confirmed, on a slave, or is read at a start."""


class SystemRecords:
    """The registry of the system topics whose records the store passes to this broker."""

    def __init__(
        self, store: MessageStore, gate: RoleGate, kinds: Mapping[str, RecordKind]
    ) -> None:
        self._store = store
        self._gate = gate
        for topic, kind in kinds.items():
            store.on_system_record[topic] = partial(self._shown, kind)

    def _shown(self, kind: RecordKind, head: RecordHead, body: bytes) -> None:
        end_offset = head.physical_offset + head.size
        try:
            if self._store.shows_unconfirmed:
                kind.take_over_record(body, end_offset)
            elif self._gate.is_master:
                kind.own_record_confirmed(body, end_offset)
            else:
                kind.apply_record(body, end_offset)
        except RemoteProtocolError as error:
            # The records behind it matter more (R54). The text names the type of a value, never
            # the value, which may be a user's secret.
            log.error("system_record_skipped topic=%r reason=%s", head.topic, error)
