"""What was appended to an epoch list since its file was last replaced, in slots that are written in
place: one fdatasync instead of the journal commits of two renames, in each failover.

File `<list>.redo`, text: four slots of 512 bytes, `sequence base entries crc32`, filled up with
blanks. `base` is the digest of the list file that the entries continue, `entries` are
`epoch-start` separated by commas, or `-` for none. Record n is in slots 0 and 1 if n is even, else
in 2 and 3: after a torn write the record before is left, after damage to a slot its copy.

Invariant: of the intact records the one with the highest sequence counts, and only for the list
file whose digest it has. So a replacement of that file ends the record. Before the file may get a
content that it had before, `clear` must end the record durably.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from batonmq.epoch.entry import EpochEntry
from batonmq.process import disk
from batonmq.process.durable_file import replace_file, write_all

REDO_SUFFIX: Final = ".redo"
SLOT_SIZE: Final = 512
SLOTS: Final = 4
_NONE: Final = b"-"


def digest(content: bytes) -> bytes:
    """Identifies the content of a list file."""
    return hashlib.sha256(content).hexdigest()[:32].encode()


def continuation(data: bytes, base: bytes) -> tuple[EpochEntry, ...]:
    """The entries in a redo file's bytes that continue the list file with the digest `base`."""
    records = _records(data)
    if not records:
        return ()
    _, named, entries = max(records, key=lambda record: record[0])
    return entries if named == base else ()


class RedoFile:
    """`load` comes first. Durable on return; any OSError leaves the last whole record in force."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_ready = False
        """The file is there, at its full size: `write` costs one fdatasync."""
        self._sequence = 0
        self._holds_entries = False

    def load(self, base: bytes) -> tuple[EpochEntry, ...]:
        """The entries that continue the list file with the digest `base`; empty if there are none.
        A slot that is not intact counts for nothing: `write` returns after both are."""
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
        """Writes the empty file if there is none yet."""
        if not self.is_ready:
            replace_file(self.path, bytes(SLOTS * SLOT_SIZE))
            self.is_ready = True

    def write(self, base: bytes, entries: Sequence[EpochEntry]) -> bool:
        """`entries` continue the list file `base`. False, without a change, if they do not fit."""
        slot = _encode(self._sequence + 1, base, entries)
        if not self.is_ready or len(slot) > SLOT_SIZE:
            return False
        self._holds_entries = True
        self._put(slot * 2, (self._sequence + 1) % 2 * 2 * SLOT_SIZE)
        return True

    def clear(self) -> None:
        """No record continues any list."""
        if self._holds_entries:
            self._put(_encode(self._sequence + 1, _NONE, ()) * SLOTS, 0)
            self._holds_entries = False

    def _put(self, slots: bytes, position: int) -> None:
        # What a failed call may have left must not outlive the next record: that one gets a higher
        # number, and the same slots, so the last whole record stays in the others.
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
