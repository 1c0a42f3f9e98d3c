"""The epoch list of one replica's log, in memory and in `epochFileCheckpoint`.

File, text with LF: number of entries, CRC-32 of the text that follows (top bit cleared; 0 is not
checked), then `epoch-startOffset` per line. Byte-compatible with Java `EpochFileCache` and
`CheckpointFile`.

Invariant: a change is durable before the call returns, and visible in memory only then. An append
is written only to `.redo`; `settle` writes the list file and its `.bak` later.

File `<list>.redo` (`RedoFile`), text: four slots of 512 bytes, `sequence base entries crc32`,
filled up with blanks. `base` is the digest of the list file that the entries continue, `entries`
are `epoch-start` separated by commas, or `-` for none. Record n is in slots 0 and 1 if n is even,
else in 2 and 3. Of the intact records the one with the highest sequence counts, and only for the
list file whose digest it has.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from batonmq.epoch.entry import EpochEntry, order_fault, with_ends
from batonmq.protocol.errors import CorruptLogError
from batonmq.runtime import disk
from batonmq.runtime.durable_file import (
    backup_path,
    load_with_backup,
    replace_file,
    replace_with_twin,
    write_all,
)

log = logging.getLogger(__name__)

REDO_SUFFIX: Final = ".redo"
SLOT_SIZE: Final = 512
SLOTS: Final = 4
_NONE: Final = b"-"

_CRC_MASK = 0x7FFFFFFF


def digest(content: bytes) -> bytes:
    """The digest that identifies the content of a list file."""
    return hashlib.sha256(content).hexdigest()[:32].encode()


def continuation(data: bytes, base: bytes) -> tuple[EpochEntry, ...]:
    """The entries in a redo file that continue the list file with the digest `base`."""
    records = _records(data)
    if not records:
        return ()
    _, named, entries = max(records, key=lambda record: record[0])
    return entries if named == base else ()


def every_entry(content: bytes, redo: bytes) -> tuple[EpochEntry, ...]:
    """Those of a list file and those with which its redo file continues it. Raises ValueError."""
    return (*decode_entries(content), *continuation(redo, digest(content)))


class RedoFile:
    """Call `load` first. Durable on return; after an OSError the last whole record still counts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_ready = False
        """The file exists at its full size, so `write` costs one fdatasync."""
        self._sequence = 0
        self._holds_entries = False

    def load(self, base: bytes) -> tuple[EpochEntry, ...]:
        """Loads the entries of the newest intact record that continue the list file with the digest
        `base`."""
        try:
            data = disk.read_bytes(self.path)
        except FileNotFoundError:
            return ()
        self.is_ready = len(data) == SLOTS * SLOT_SIZE
        records = _records(data)
        if records:
            self._sequence = max(sequence for sequence, _, _ in records)
        self._holds_entries = any(entries for _, _, entries in records)
        return continuation(data, base)

    def make(self) -> None:
        """Creates the empty file if it is missing."""
        if not self.is_ready:
            replace_file(self.path, bytes(SLOTS * SLOT_SIZE))
            self.is_ready = True

    def write(self, base: bytes, entries: Sequence[EpochEntry]) -> bool:
        """Stores that `entries` continue the list file `base`. Returns False, and does nothing, if
        they do not fit."""
        slot = _encode(self._sequence + 1, base, entries)
        if not self.is_ready or len(slot) > SLOT_SIZE:
            return False
        self._holds_entries = True
        # Two copies, so damage to one slot loses nothing; not over the last record, so a torn write
        # leaves that one.
        self._put(slot * 2, (self._sequence + 1) % 2 * 2 * SLOT_SIZE)
        return True

    def clear(self) -> None:
        """Stores a record that continues no list."""
        # In all slots. The list file may get a content again that it had before (R25): an older
        # record that continues that content must not be found then.
        if self._holds_entries:
            self._put(_encode(self._sequence + 1, _NONE, ()) * SLOTS, 0)
            self._holds_entries = False

    def _put(self, slots: bytes, position: int) -> None:
        # A failed call may have left a partial record: the next one gets a higher number and the
        # same slots, so that the last whole record stays in the others.
        self._sequence += 2
        fd = disk.open(self.path, os.O_WRONLY)
        try:
            write_all(fd, slots, position)
            disk.fdatasync(fd)
        finally:
            disk.close(fd)
        self._sequence -= 1


def _records(data: bytes) -> list[tuple[int, bytes, tuple[EpochEntry, ...]]]:
    """The intact records: (sequence, base, entries)."""
    return [
        record
        for at in range(0, len(data), SLOT_SIZE)
        if (record := _decode(data[at : at + SLOT_SIZE])) is not None
    ]


def _encode(sequence: int, base: bytes, entries: Sequence[EpochEntry]) -> bytes:
    listed = b",".join(b"%d-%d" % (entry.epoch, entry.start_offset) for entry in entries)
    text = b"%d %b %b" % (sequence, base, listed or _NONE)
    return (b"%b %08x" % (text, zlib.crc32(text))).ljust(SLOT_SIZE - 1) + b"\n"


def _decode(slot: bytes) -> tuple[int, bytes, tuple[EpochEntry, ...]] | None:
    text, _, crc = slot.rstrip().rpartition(b" ")
    fields = text.split(b" ")
    if len(fields) != 3 or crc != b"%08x" % zlib.crc32(text):
        return None
    sequence, base, listed = fields
    entries = []
    for item in listed.split(b",") if listed != _NONE else []:
        epoch, _, start = item.partition(b"-")
        entries.append(EpochEntry(int(epoch), int(start)))
    return int(sequence), base, tuple(entries)


def encode_entries(entries: Sequence[EpochEntry]) -> bytes:
    """The file's bytes for a list (also for an empty one, which Java fails to write)."""
    lines = "".join(f"{entry.epoch}-{entry.start_offset}\n" for entry in entries).encode()
    return b"%d\n%d\n%s" % (len(entries), zlib.crc32(lines) & _CRC_MASK, lines)


def decode_entries(data: bytes) -> tuple[EpochEntry, ...]:
    """The list in a file's bytes. Raises ValueError."""
    head, _, rest = data.partition(b"\n")
    crc_text, _, lines = rest.partition(b"\n")
    if not head.isdigit() or not crc_text.isdigit():
        raise ValueError("the first two lines are not a count and a checksum")
    crc, count = int(crc_text), int(head)
    actual_crc = zlib.crc32(lines) & _CRC_MASK
    rows = lines.splitlines()
    if len(rows) != count:
        raise ValueError(f"{len(rows)} entries where {count} are announced")
    if crc not in (0, actual_crc):
        raise ValueError(f"checksum {actual_crc} where {crc} is announced")
    entries: list[EpochEntry] = []
    for row in rows:
        epoch, dash, start = row.strip().partition(b"-")
        if not (dash and epoch.isdigit() and start.isdigit()):
            raise ValueError(f"no entry: {row!r}")
        entries.append(EpochEntry(int(epoch), int(start)))
    fault = order_fault(entries)
    if fault:
        raise ValueError(fault)
    return with_ends(entries)


class EpochFileCache:
    """Epochs ascending; the last one is open. For one thread; any thread may call `settle`."""

    def __init__(self, path: Path) -> None:
        """Loads `path`, or `.bak` if it is missing, empty or damaged, and the continuation in
        `.redo`. Without any file the list is empty. Raises CorruptLogError if there are files but
        none is usable."""
        self.path = path
        self._entries: tuple[EpochEntry, ...] = ()
        self._writing = threading.Lock()
        self._redo = RedoFile(path.with_name(path.name + REDO_SUFFIX))
        self._base = b""
        """The digest of both files; empty where they are missing or differ."""
        self._pending: tuple[EpochEntry, ...] = ()
        """The last entries of the list, which are only in `.redo`."""
        self._load()

    def _load(self) -> None:
        loaded = load_with_backup(
            self.path, lambda data: (decode_entries(data), data), is_twin=True
        )
        if loaded is None:
            self._redo.load(b"")
            return
        (entries, content), why = loaded
        continued = self._redo.load(digest(content))
        if order_fault((*entries, *continued)):
            raise CorruptLogError(str(self._redo.path), 0, order_fault((*entries, *continued)))
        self._entries = with_ends((*entries, *continued))
        if why:
            log.warning("epoch_file_from_backup file=%s reason=%s", self.path, why)
        if why or continued:
            self._replace(self._entries)
        elif _same_content(backup_path(self.path), content):
            self._base = digest(content)

    @property
    def entries(self) -> tuple[EpochEntry, ...]:
        """All entries, oldest first."""
        return self._entries

    @property
    def last_epoch(self) -> int:
        """The newest epoch, -1 if there is none."""
        return self._entries[-1].epoch if self._entries else -1

    def append(self, entry: EpochEntry) -> bool:
        """Adds a newer epoch, which ends the one before. Returns False, and does nothing, if the
        epoch is not above the last one or starts before it; equal starts are allowed."""
        entries = (*self._entries, entry)
        return not order_fault(entries) and self._store(entries)

    def truncate_suffix_by_offset(self, offset: int) -> bool:
        """Drops the entries that start at or above `offset`, where the log was cut; the new last
        one is open. Returns whether any was dropped."""
        return self._store(tuple(e for e in self._entries if e.start_offset < offset))

    def truncate_prefix_by_offset(self, offset: int) -> bool:
        """Drops the entries that end at or below `offset`, whose bytes expired; never the last,
        which has no end."""
        return self._store(tuple(e for e in self._entries if e.end_offset > offset))

    def drop_above(self, log_end: int) -> bool:
        """Drops the entries that start above the log's end, whose bytes were never written (R25).
        Call it once, after recovery."""
        return self._store(tuple(e for e in self._entries if e.start_offset <= log_end))

    def replace_all(self, entries: Sequence[EpochEntry]) -> bool:
        """Replaces the list; raises ValueError if it is not in order."""
        fault = order_fault(entries)
        if fault:
            raise ValueError(fault)
        return self._store(tuple(entries))

    def _store(self, entries: tuple[EpochEntry, ...]) -> bool:
        closed = with_ends(entries)
        assert not order_fault(closed)
        if _starts(closed) == _starts(self._entries):
            return False
        with self._writing:
            # Each failover waits for this: one fdatasync in place instead of the journal commits of
            # two renames.
            if not self._append_redo(closed):
                self._replace(closed)
            self._entries = closed
        return True

    @property
    def is_settled(self) -> bool:
        """Whether both files have the whole list."""
        return not self._pending

    def settle(self) -> None:
        """Writes the whole list to the files; any thread may call this. Raises OSError. On a full
        disk nothing is written: the list is durable in `.redo`."""
        with self._writing:
            try:
                self._replace(self._entries)
            except OSError as error:
                if not disk.is_short(error):
                    raise
                log.warning("epoch_file_not_settled file=%s reason=%s", self.path, error)

    def _append_redo(self, entries: tuple[EpochEntry, ...]) -> bool:
        """Returns False if `entries` do not continue the files' list, or do not fit into the
        slots."""
        known = _starts(self._entries)
        if not self._base or _starts(entries)[: len(known)] != known:
            return False
        pending = (*self._pending, *entries[len(known) :])
        if not self._redo.write(self._base, pending):
            return False
        self._pending = pending
        return True

    def _replace(self, entries: tuple[EpochEntry, ...]) -> None:
        """Writes both files."""
        known = _starts(self._entries)
        # Clear the record first: the files may get an earlier content, which an old record would
        # continue.
        if not known or _starts(entries)[: len(known)] != known:
            if self._pending:
                self._put_files(self._entries)
            self._redo.clear()
        self._put_files(entries)
        self._redo.make()

    def _put_files(self, entries: tuple[EpochEntry, ...]) -> None:
        content = encode_entries(entries)
        # Both get the same list, unlike in Java: by an older `.bak` the bytes of an epoch would
        # belong to the one before, and two logs would seem equal where they differ.
        self._base = b""  # while they differ, no record may continue them
        replace_with_twin(self.path, content)
        self._base = digest(content)
        self._pending = ()


def _same_content(path: Path, content: bytes) -> bool:
    try:
        return disk.read_bytes(path) == content
    except FileNotFoundError:
        return False
    except OSError as error:
        disk.check_unreadable(error)
        return False


def _starts(entries: Sequence[EpochEntry]) -> list[tuple[int, int]]:
    return [(entry.epoch, entry.start_offset) for entry in entries]
