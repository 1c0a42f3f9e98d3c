"""A broker's store in memory: what survives a kill is in `Disk`, the rest is lost with it.

It has the surface that Replication, RoleActions and the HA service use of `MessageStore`. A record
has RECORD bytes, so a record boundary is a multiple of that.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from batonmq.epoch.entry import EpochEntry, order_fault, with_ends
from batonmq.protocol.records.codec import NewMessage
from batonmq.store.config import StoreConfig
from batonmq.store.errors import StoreStateError, TruncationRefused
from batonmq.store.health import StoreHealth
from batonmq.store.message_store import MessageStore
from batonmq.store.recovery import ConfirmedBySet
from batonmq.store.upkeep import DiskUse
from lab.sim.loop import Crash

RECORD = 16


def whole(offset: int) -> int:
    return offset - offset % RECORD


class Lineage:
    """The name of the history that a log is a part of."""

    name = ""

    def enter(self, name: str) -> None:
        self.name = name


class Disk:
    """Bytes in files. `flushed` of them outlive a loss of power."""

    def __init__(self, log_id: str) -> None:
        self.data = bytearray()
        self.entries: tuple[EpochEntry, ...] = ()
        self.checkpoint = 0
        self.flushed = 0
        self.log_id = log_id
        self.lineage = Lineage()
        self.cuts: list[tuple[int, int]] = []

    def lose_power(self) -> None:
        del self.data[self.flushed :]


class Epochs:
    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    @property
    def entries(self) -> tuple[EpochEntry, ...]:
        return self._disk.entries

    @property
    def last_epoch(self) -> int:
        return self.entries[-1].epoch if self.entries else -1

    def append(self, entry: EpochEntry) -> bool:
        last = self.entries[-1] if self.entries else None
        if last is not None and (
            entry.epoch <= last.epoch or entry.start_offset < last.start_offset
        ):
            return False
        return self.replace_all((*self.entries, entry))

    def replace_all(self, entries: Sequence[EpochEntry]) -> bool:
        assert not order_fault(entries), order_fault(entries)
        self._disk.entries = with_ends(entries)
        return True

    def drop_above(self, log_end: int) -> bool:
        return self.replace_all([e for e in self.entries if e.start_offset <= log_end])


class MemoryStore:
    def __init__(
        self, disk: Disk, rng: random.Random, flush_later: Callable[[Callable[[], None]], None]
    ) -> None:
        self.disk = disk
        self.epochs = Epochs(disk)
        # All parts of a MessageStore in one.
        self.log = self.slave_log = self.trust = self.background = self.positions = self
        self.log_id = disk.log_id
        self._rng = rng
        self._flush_later = flush_later
        self._flush_asked = False
        self._turn: list[bytes] = []
        self.disk_space = SimpleNamespace(on_space=None, reason="")  # a disk that is never full
        self.queries = SimpleNamespace(  # it has no queues
            next_offset_in_queue=lambda topic, queue_id: 0,
            max_offset_in_queue=lambda topic, queue_id: 0,
        )
        self.flushed_listeners: list[Callable[[int], None]] = []
        self.writable = False
        # Recovery: a torn tail goes, what was confirmed is known as of the last checkpoint.
        del disk.data[whole(len(disk.data)) :]
        disk.flushed = min(disk.flushed, len(disk.data))
        self.epochs.drop_above(len(disk.data))
        self.confirm_offset = whole(min(disk.checkpoint, len(disk.data)))

    @property
    def lineage(self) -> Lineage:
        return self.disk.lineage

    def end_mastership(self) -> None:
        pass

    def put_if_due(self) -> bool:
        return False

    # -- facts

    min_phy_offset = whole_from = 0
    reason = ""
    health = StoreHealth()

    @property
    def max_phy_offset(self) -> int:
        return len(self.disk.data)

    @property
    def flushed_offset(self) -> int:
        return self.disk.flushed

    # -- master

    def put(self, record: bytes) -> int:
        assert self.writable and len(record) == RECORD
        self._turn.append(record)
        return self.max_phy_offset + RECORD * len(self._turn)

    def end_turn(self) -> int:
        self.disk.data += b"".join(self._turn)
        self._turn.clear()
        return self.max_phy_offset

    def stop_writes(self, why: str = "") -> int:
        self.writable = False
        return self.end_turn()

    @property
    def end(self) -> int:
        return self.max_phy_offset

    def prepare_master(self, *, discard_damage: bool = False) -> int:
        self.stop_writes()
        end = whole(self.max_phy_offset)
        if end < self.max_phy_offset:
            self._cut(end)
        self.writable = True
        return end

    def advance_confirm_offset(self, offset: int) -> int:
        confirmed = whole(min(offset, self.max_phy_offset))
        self.confirm_offset = max(self.confirm_offset, confirmed)
        if self._rng.random() < 0.05:
            self.disk.checkpoint = self.confirm_offset
        return self.confirm_offset

    # -- slave

    def append_replicated(self, offset: int, data: Any) -> int:
        self.stop_writes()
        if offset != self.max_phy_offset:
            raise StoreStateError(f"bytes for {offset}, the log ends at {self.max_phy_offset}")
        self.disk.data += bytes(data)
        return self.max_phy_offset

    def truncate_to(
        self, offset: int, *, keep_aside: bool = True, unclean_epoch: bool = False
    ) -> None:
        self.stop_writes()
        if offset < self.confirm_offset and not unclean_epoch:
            raise TruncationRefused(offset, self.confirm_offset, "R23")
        if offset != whole(offset):
            raise TruncationRefused(offset, self.confirm_offset, "no record ends there")
        self._cut(offset)

    def _cut(self, offset: int) -> None:
        self.confirm_offset = min(self.confirm_offset, offset)
        self.disk.cuts.append((self.max_phy_offset, offset))
        del self.disk.data[offset:]
        self.disk.flushed = min(self.disk.flushed, offset)
        self.disk.checkpoint = min(self.disk.checkpoint, offset)
        self.epochs.replace_all([e for e in self.epochs.entries if e.start_offset < offset])

    must_refetch = False
    """Nothing here is ever damaged."""

    def discard_damaged_tail(self) -> int:
        return self.max_phy_offset

    def clear_suspect(self) -> None:
        pass

    def drop_unverified(self) -> int:
        return self.max_phy_offset

    def fault_at(self, offset: int) -> str:
        return ""

    def reset_for_empty_start(self, offset: int) -> None:
        assert offset == 0 and not self.disk.data, "nothing expires here"

    def view(self, offset: int, size: int) -> memoryview:
        return memoryview(bytes(self.disk.data[offset : offset + size]))

    # -- durability

    def request_flush(self) -> None:
        if not self._flush_asked:
            self._flush_asked = True
            self._flush_later(self._flush)

    def _flush(self) -> None:
        self._flush_asked = False
        self.disk.flushed = self.max_phy_offset
        for listener in self.flushed_listeners:
            listener(self.disk.flushed)

    def abandon(self) -> None:
        pass


class FileStore(MessageStore):
    """The real store on files, under the names that the simulation uses. It has no threads."""

    _HOST = b"\x7f\x00\x00\x01\x00\x00\x2a\x9f"

    def __init__(
        self, folder: Path, rng: random.Random, clock_ms: Callable[[], int], crash: Any
    ) -> None:
        super().__init__(
            StoreConfig(
                store_path_root_dir=str(folder),
                mapped_file_size_commit_log=4096,
                mapped_file_size_consume_queue=4000,
                max_hash_slot_num=50,
                max_index_num=200,
            ),
            store_host=self._HOST,
            confirm_rule=ConfirmedBySet(),
            clock_ms=clock_ms,
            disk_use_of=lambda folders: DiskUse(0.1),
        )
        self._rng = rng
        self._crash = crash
        self.open()
        self.truncation.after_step = self._step

    def _step(self, step: str) -> None:
        if self._rng.random() < 0.03:
            self._crash()
            raise Crash(step)

    @property
    def disk(self) -> Any:
        pieces, offset = [], self.min_phy_offset
        while view := self.log.view(offset, 1 << 20):
            pieces.append(bytes(view))
            offset += len(view)
        return SimpleNamespace(data=b"".join(pieces))

    @property
    def writable(self) -> bool:
        return self.appender.is_writable

    def put(self, record: bytes) -> int:
        queue = self._rng.randrange(3)
        result = self.appender.put_message(
            NewMessage(
                "T", queue, record, b"", 0, None, None, born_timestamp=1, born_host=self._HOST
            )
        )
        return result.end_offset

    def advance_confirm_offset(self, offset: int) -> int:
        if self._rng.random() < 0.03:
            self.checkpoints.flush_derived()
        return super().advance_confirm_offset(offset)
