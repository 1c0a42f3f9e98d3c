"""Which client may consume which queue of an orderly group, and `config/queueLocks.json`.

A lock is a lease: it ends LEASE_MS after its owner last asked for it. A change of the owner is a
record of the log (`broker.tables.topics`), so it is on every member of the SyncStateSet before the
owner is answered. A client gives up a lock 30 s after the last answer, half a lease.

Java keeps locks in the master's memory, and after a failover all are free. With `lockInStrictMode`
a majority grants them; here every required member does, always. Origin: Java
`RebalanceLockManager`.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from batonmq.broker.tables.config_file import ConfigManager
from batonmq.protocol.bodies import DataVersion
from batonmq.protocol.json_body import Body

log = logging.getLogger(__name__)

LEASE_MS: Final = 60_000
CHECKED_MAX: Final = 1000
LOCKS_MAX: Final = 500_000
"""Locks of all groups (R58); one takes about a quarter of a kilobyte."""
INVENTED_MAX: Final = 100_000
"""From so many locks on, only known groups get new ones, of queues that exist: clients choose the
names."""

Queue = tuple[str, int]
"""Topic and queue id, of this broker."""


class LockChange(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Queues that a client of a group gets, or with `released` gives back; unless another client
    has them by then."""

    group: str
    client_id: str
    queues: list[Queue]
    released: bool = False


class QueueLockTable(Body):
    """Group to client id to its queues."""

    data_version: DataVersion = DataVersion()
    locks: dict[str, dict[str, list[Queue]]] = msgspec.field(default_factory=dict)


@dataclass(slots=True)
class _Lock:
    client_id: str
    renewed_ms: int


class QueueLockManager(ConfigManager[QueueLockTable]):
    """One thread only. Times are ms of one monotonic clock."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, QueueLockTable)
        self._groups: dict[str, dict[Queue, _Lock]] = {}
        self._shown: dict[str, dict[str, list[Queue]]] = {}
        """As `QueueLockTable.locks`, but groups in `_changed` are as they were before."""
        self._changed: set[str] = set()
        self._renewed_all_ms = 0
        self._to_check: Iterator[tuple[str, Queue]] = iter(())
        self._count = 0  # Locks of all groups
        self._is_full = False  # Whether a queue found no place, logged for the operator

    def _take_loaded(self, body: QueueLockTable) -> None:
        self._take(body)
        self.data_version, self._dirty = body.data_version, False

    def wrapper(self) -> QueueLockTable:
        # Only what changed: to walk over 500,000 locks would stop the loop for 0.1 s, every 5 s.
        for group in self._changed:
            clients: dict[str, list[Queue]] = {}
            for queue, lock in self._groups.get(group, {}).items():
                clients.setdefault(lock.client_id, []).append(queue)
            self._shown[group] = clients
            if not clients:
                del self._shown[group]
        self._changed.clear()
        return QueueLockTable(data_version=self.data_version, locks=dict(self._shown))

    def replace_all(self, table: QueueLockTable) -> None:
        self._take(table)
        self._new_version()

    def _take(self, table: QueueLockTable) -> None:
        # Only the master knows when a lock was renewed: see `renew_all`.
        self._groups = {
            group: {
                queue: _Lock(client, 0) for client, queues in clients.items() for queue in queues
            }
            for group, clients in table.locks.items()
        }
        self._count = sum(map(len, self._groups.values()))
        self._shown, self._changed = dict(table.locks), set()

    def renew_all(self, now_ms: int) -> None:
        """This replica is master from now on: every lock counts as renewed just now."""
        # An owner may have renewed at the last master a moment ago: a failover must give no queue a
        # second owner (R30).
        self._renewed_all_ms = now_ms

    def grant(
        self,
        group: str,
        client_id: str,
        queues: Iterable[Queue],
        now_ms: int,
        is_known: Callable[[Queue], bool] = lambda queue: True,
    ) -> tuple[list[Queue], LockChange | None]:
        """Which of `queues` the client has now, their locks renewed, and the change to put into the
        log, if there is one; it is applied here already. A queue that finds no place (LOCKS_MAX,
        INVENTED_MAX) is not granted; `is_known` says whether the queue and the group exist."""
        locks = self._groups.get(group, {})
        granted, new, count = [], [], self._count
        for queue in queues:
            lock = locks.get(queue)
            # A renewal is no record: a new master counts every lock as renewed (`renew_all`).
            if lock is not None and lock.client_id == client_id:
                lock.renewed_ms = now_ms
                locks[queue] = locks.pop(queue)  # see `has_locks`
                granted.append(queue)
            elif lock is not None:
                if self._is_expired(lock, now_ms):
                    new.append(queue)
                    granted.append(queue)
            # No error: the answer names the queues that the client may consume.
            elif count < INVENTED_MAX or (count < LOCKS_MAX and is_known(queue)):
                count += 1
                new.append(queue)
                granted.append(queue)
            elif not self._is_full:  # once: strangers choose how often
                self._is_full = True
                log.warning("queue_locks_full count=%d group=%s queue=%s", count, group, queue)
        if not new:
            return granted, None
        change = LockChange(group=group, client_id=client_id, queues=new)
        self.apply(change, now_ms)
        return granted, change

    def release(self, group: str, client_id: str, queues: Iterable[Queue]) -> LockChange | None:
        """The client gives queues back; returns the change, None if none of them was its own."""
        locks = self._groups.get(group, {})
        own = [queue for queue in queues if queue in locks and locks[queue].client_id == client_id]
        if not own:
            return None
        change = LockChange(group=group, client_id=client_id, queues=own, released=True)
        self.apply(change)
        return change

    def apply(self, change: LockChange, now_ms: int = 0) -> None:
        """Applies a change of this master, or one that the log shows. Idempotent."""
        locks = self._groups.setdefault(change.group, {})
        self._changed.add(change.group)
        before = len(locks)
        for queue in change.queues:
            # A late release of the owner before must not take the lock from the present one.
            if not change.released:
                locks.pop(queue, None)
                locks[queue] = _Lock(change.client_id, now_ms)
            elif queue in locks and locks[queue].client_id == change.client_id:
                del locks[queue]
        self._count += len(locks) - before
        self._is_full = self._is_full and self._count >= INVENTED_MAX
        if not locks:
            del self._groups[change.group]
        self._new_version()

    def expired(self, now_ms: int) -> list[tuple[str, str, Queue]]:
        """Some of the expired locks, as (group, client id, queue). A call checks CHECKED_MAX locks,
        and the next one continues there (R58)."""
        found = []
        for _ in range(CHECKED_MAX):
            group, queue = next(self._to_check, ("", None))
            if queue is None:
                self._to_check = self._places()
                break
            lock = self._groups.get(group, {}).get(queue)
            if lock is not None and self._is_expired(lock, now_ms):
                found.append((group, lock.client_id, queue))
        return found

    def _places(self) -> Iterator[tuple[str, Queue]]:
        # Copies: locks change between two calls.
        for group in list(self._groups):
            for queue in list(self._groups.get(group, ())):
                yield group, queue

    def has_locks(self, group: str, now_ms: int) -> bool:
        """Whether a member of the group holds any queue: the group consumes in order."""
        # R58: each retry asks. The lock that was renewed last is the last one.
        newest = next(reversed(self._groups.get(group, {}).values()), None)
        return newest is not None and not self._is_expired(newest, now_ms)

    def _is_expired(self, lock: _Lock, now_ms: int) -> bool:
        return now_ms - max(lock.renewed_ms, self._renewed_all_ms) > LEASE_MS
