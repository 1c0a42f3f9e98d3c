"""`DurableJournal`: pysyncobj's log on disk, so that a node keeps everything that it answered.

File `journal`: magic, then groups. A group is `u32 length, u32 CRC-32` (big-endian) of a payload of
operations, and the payload. It is applied whole or not at all, so to cut and add is atomic:

- `1  u64 index, u64 term, u32 size, command`: an entry is added
- `2  u64 index`: entries from this index on are cut
- `3`: this node has joined

File `meta`: term and vote, replaced with fsync before the message that they allow. A bad `meta` is
damage, and so is one of the two files without the other, except in a first start (`_open_files`).

A node that begins with an empty folder is *joining*: it may have acknowledged entries in a folder
that was lost. It has joined once it led, or once it had all entries of a leader; operation 3
records that. Until then it must not make any node leader, see `messages`.

Invariant: `sync` returns true before any message about the entries is sent. On a full disk (R53),
or without a file descriptor, it returns false and is tried again. Any other OSError ends the
process, because the state of the disk is unknown.

It replaces pysyncobj's journal, which never syncs, has no checksums, and rewrites itself in place.
"""

from __future__ import annotations

import logging
import os
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn, overload

import msgspec

from batonmq.controller.raft.snapshot import LogEntry
from batonmq.protocol.errors import BatonError
from batonmq.protocol.layout import JOURNAL_GROUP, JOURNAL_MAGIC
from batonmq.runtime import disk
from batonmq.runtime.clock import wall_ms
from batonmq.runtime.durable_file import replace_file, sync_directory, write_all

log = logging.getLogger(__name__)

_MAGIC: Final = JOURNAL_MAGIC
_GROUP: Final = JOURNAL_GROUP
_OP_ADD, _OP_CUT, _OP_JOINED = 1, 2, 3
_ADD: Final = struct.Struct(">BQQI")
_CUT: Final = struct.Struct(">BQ")
_JOINED: Final = bytes([_OP_JOINED])
_NO_OP: Final = b"\x01"
"""pysyncobj's _COMMAND_TYPE.NO_OP, the whole command of a leader's first entry."""
_GROUP_BYTES_MAX: Final = 1 << 30


class JournalDamage(BatonError):
    """A file of this node's log is not what was written. `offset` is None if unknown."""

    def __init__(self, path: Path, what: str, offset: int | None = None) -> None:
        where = "" if offset is None else f" at offset {offset}"
        super().__init__(
            f"{path}{where}: {what}; this node cannot use it. While all other controllers are"
            f" healthy, empty {path.parent} and start again: it fetches the log from them"
        )


class _Meta(msgspec.Struct, frozen=True, rename="camel"):
    """The text of the file `meta`, behind its checksum."""

    term: int
    voted_for: str | None


_decode_meta: Final = msgspec.json.Decoder(_Meta).decode


class VoteFile:
    """Term and vote, in the file `meta`. While the disk is full they are only in memory."""

    def __init__(self, path: Path, refused: Callable[[str, OSError], object]) -> None:
        self.path = path
        self.term = 0
        self.voted_for: str | None = None
        self._refused = refused
        self._is_durable = True

    def set(self, term: int, voted_for: str | None) -> None:
        self.term, self.voted_for = term, voted_for
        self._is_durable = False
        self.sync()

    def sync(self) -> bool:
        """Makes them durable; false while the disk is full."""
        if self._is_durable:
            return True
        try:
            self.write()
        except OSError as error:
            self._refused("store term and vote", error)
            return False
        self._is_durable = True
        return True

    def load(self) -> bool:
        """Whether there is a file. Raises JournalDamage."""
        try:
            content = disk.read_bytes(self.path)
        except FileNotFoundError:
            return False
        checksum, _, text = content.rstrip(b"\n").partition(b" ")
        if checksum != b"%08x" % zlib.crc32(text):
            raise JournalDamage(self.path, "checksum differs")
        try:
            meta = _decode_meta(text)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise JournalDamage(self.path, f"no term and vote: {error}") from error
        self.term, self.voted_for = meta.term, meta.voted_for
        return True

    def write(self) -> None:
        """Raises OSError."""
        text = msgspec.json.encode(_Meta(self.term, self.voted_for))
        replace_file(self.path, b"%08x %s\n" % (zlib.crc32(text), text))


class DurableJournal:
    """Entries in memory, mirrored to `folder/journal` at each `sync`. One thread uses it.

    `head` are the last two entries of the snapshot beside it, older first; pysyncobj discards a
    journal that does not begin with them. Raises JournalDamage.
    """

    def __init__(
        self,
        folder: Path,
        head: tuple[LogEntry, LogEntry] | None,
        on_fatal: Callable[[str], NoReturn],
    ) -> None:
        self.folder = folder
        self._path = folder / "journal"
        self.on_fatal = on_fatal
        self.snapshot_index = head[1][1] if head else 1
        self._entries: list[LogEntry] = []
        self._durable: list[LogEntry] = []
        self._dirty_from = 0
        self._replaced = False
        self._commit_index = 0
        self._joined = self._joined_durable = False
        self._vote = VoteFile(folder / "meta", self._refused)
        self.failure = ""
        """Why the newest failed write failed; it may have succeeded since."""
        disk.makedirs(folder)
        sync_directory(folder.parent)
        sync_directory(folder)  # names that an earlier process replaced, and could not sync
        self._fd = -1
        self._end = 0
        try:
            self._open_files(is_new=head is None)
            self._begin_with(head)
        except BaseException:
            if self._fd >= 0:
                disk.close(self._fd)
            raise

    # pysyncobj's Journal interface, in its spelling.

    def add(self, command: bytes, idx: int, term: int) -> None:
        self._entries.append((command, idx, term))

    def clear(self) -> None:
        # The file is replaced by the next sync: beside a snapshot it is never without entries.
        self._entries = []
        self._dirty_from = 0
        self._replaced = True

    def deleteEntriesFrom(self, entryFrom: int) -> None:
        self._dirty_from = min(self._dirty_from, entryFrom)
        del self._entries[entryFrom:]

    def deleteEntriesTo(self, entryTo: int) -> None:
        self._entries = self._entries[entryTo:]
        if self._rewrite():
            return
        # The disk is full: the file keeps these entries for now. A start drops what is in the
        # snapshot. If the file lacks some of them, no entry can be appended: there would be a gap.
        self._replaced = self._replaced or entryTo > len(self._durable)
        del self._durable[:entryTo]
        self._dirty_from = max(0, self._dirty_from - entryTo)

    @overload
    def __getitem__(self, item: int) -> LogEntry: ...
    @overload
    def __getitem__(self, item: slice) -> list[LogEntry]: ...
    def __getitem__(self, item: int | slice) -> LogEntry | list[LogEntry]:
        return self._entries[item]

    def __len__(self) -> int:
        return len(self._entries)

    def setRaftCommitIndex(self, raftCommitIndex: int) -> None:
        if raftCommitIndex > self._commit_index:
            # What is committed is applied and answered next: it must be on this disk before.
            self._commit_index = raftCommitIndex
            self.sync()

    def getRaftCommitIndex(self) -> int:
        # Not further: entries above the snapshot may be on no majority, and Raft decides again.
        return self.snapshot_index

    def setCurrentTerm(self, term: int, votedForNodeId: str | None) -> None:
        if (term, votedForNodeId) != (self._vote.term, self._vote.voted_for):
            self._vote.set(term, votedForNodeId)

    def getCurrentTerm(self) -> int:
        return self._vote.term

    def getVotedForNodeId(self) -> str | None:
        return self._vote.voted_for

    def onOneSecondTimer(self) -> None:
        pass

    def _destroy(self) -> None:
        self.close()

    # Durability.

    def close(self) -> None:
        """Makes everything durable, if the disk takes it. May be called again."""
        if self._fd >= 0:
            self.sync()
            fd, self._fd = self._fd, -1
            _close(fd)

    def holds(self, index: int, term: int) -> bool:
        """Whether that committed entry is in the log, or in the snapshot that it begins with."""
        position = index - self._entries[0][1]
        if position >= len(self._entries):
            return False
        return position < 0 or self._entries[position][2] == term

    @property
    def joining(self) -> bool:
        """Whether this node may lack entries that it once acknowledged: see the module's text."""
        return not self._joined

    @property
    def joins(self) -> bool:
        """Whether it has joined, but that is not on disk yet."""
        return self._joined and not self._joined_durable

    def join(self) -> None:
        """The log is complete now. The next `sync` makes that durable."""
        self._joined = True

    @property
    def size_bytes(self) -> int:
        """Length of the journal file."""
        return self._end

    def sync(self) -> bool:
        """Makes term, vote and entries durable, with one group and one fdatasync; with none if
        nothing changed. False while the disk is full: then no message about them may be sent."""
        if not self._vote.sync():
            return False
        if self._replaced:
            return self._rewrite()
        first = self._first_difference()
        self._dirty_from = len(self._entries)
        joins = self._joined and not self._joined_durable
        if first == len(self._entries) == len(self._durable) and not joins:
            return True
        operations = [_JOINED] if joins else []
        if first < len(self._durable):
            operations.append(_CUT.pack(_OP_CUT, self._durable[first][1]))
        operations += map(_encode_add, self._entries[first:])
        payload = b"".join(operations)
        group = _GROUP.pack(len(payload), zlib.crc32(payload)) + payload
        if not self._append(group):
            # The next sync tries the same entries again.
            self._dirty_from = first
            return False
        self._end += len(group)
        del self._durable[first:]
        self._durable += self._entries[first:]
        self._joined_durable = self._joined
        return True

    def _first_difference(self) -> int:
        """The position from which memory and disk differ."""
        # pysyncobj cuts and adds again what did not change: such entries are not written again.
        common = min(len(self._entries), len(self._durable))
        position = min(self._dirty_from, common)
        while position < common and self._entries[position] == self._durable[position]:
            position += 1
        return position

    def _rewrite(self) -> bool:
        """Replaces the file by a new one. False while the disk is full; then the old file stays."""
        groups = [_JOINED] if self._joined else []
        # A group for each entry: damage to one is then followed by a good group, and is detected.
        groups += map(_encode_add, self._entries)
        content = _MAGIC + b"".join(_GROUP.pack(len(g), zlib.crc32(g)) + g for g in groups)
        try:
            replace_file(self._path, content)
            opened = disk.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            self._refused("write the log again", error)
            # The new file may have the name already, though it could not be opened: then nothing
            # may be appended to the old one.
            self._replaced = self._replaced or not _has_name(self._fd, self._path)
            return False
        fd, self._fd = self._fd, opened
        _close(fd)
        self._end = len(content)
        self._durable = list(self._entries)
        self._joined_durable = self._joined
        self._dirty_from = len(self._entries)
        self._replaced = False
        return True

    def _append(self, group: bytes) -> bool:
        """Writes and syncs a group behind the others. False while the disk is full."""
        try:
            try:
                write_all(self._fd, group, self._end)
            except OSError as error:
                self._refused("write the log", error)
                disk.ftruncate(self._fd, self._end)
                return False
            disk.fdatasync(self._fd)
        except OSError as error:
            self._refused("write the log", error)
            # R40: a second sync may return 0 over what this one lost, so the next one writes a new
            # file from memory.
            self._replaced = True
            return False
        return True

    def _refused(self, what: str, error: OSError) -> None:
        """The disk took less than all. Ends the process, unless it may take it later (R53)."""
        if not disk.is_short(error):
            self.on_fatal(f"cannot {what}: {disk.described(error)}")
        self.failure = disk.described(error)

    # Loading.

    def _open_files(self, *, is_new: bool) -> None:
        """Reads both files, or makes those of a new folder. `is_new`: there is no snapshot."""
        # `meta` (term 0) is written before `journal`, and a kill may leave any of the steps. In
        # term 0 nothing was voted or acknowledged, so then one file without the other is no damage.
        if self._path.exists():
            self._open_journal()
        if not self._vote.load():
            if not is_new or self._joined or any(term for _, _, term in self._entries):
                what = "is missing beside a log: this node does not know how it voted"
                raise JournalDamage(self._vote.path, what)
            self._vote.write()
        if self._fd < 0:
            if not is_new or self._vote.term:
                raise JournalDamage(self._path, "is missing beside the other files of a log")
            replace_file(self._path, _MAGIC)
            self._open_journal()

    def _open_journal(self) -> None:
        self._fd = disk.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        data = disk.read_bytes(self._path)
        content = read_journal(data, self._path)
        self._end, self._entries = content.end, content.entries
        self._durable, self._dirty_from = list(content.entries), len(content.entries)
        self._joined = self._joined_durable = content.joined
        if self._end < len(data):
            disk.ftruncate(self._fd, self._end)
        # R40: the page cache may show what is on no disk. To write the same bytes in place needs no
        # disk space, and a crash in between changes nothing.
        write_all(self._fd, data[: self._end], 0)
        disk.fsync(self._fd)

    def _begin_with(self, head: tuple[LogEntry, LogEntry] | None) -> None:
        first = self._entries[0][1] if self._entries else None
        if head is None:
            if first is not None and first > 1:
                what = f"begins with entry {first}, and no snapshot holds what came before"
                raise JournalDamage(self._path, what)
            return
        if first is None:
            raise JournalDamage(self._path, "holds no entry, but there is a snapshot beside it")
        if first > head[0][1]:
            what = f"begins with entry {first}, but the snapshot ends with {head[1][1]}"
            raise JournalDamage(self._path, what)
        position = head[0][1] - first
        if tuple(self._entries[position : position + 2]) != head:
            # The snapshot came from a leader, and the node ended before the journal was replaced.
            # What is in the journal is older than the snapshot, or was never committed.
            self.clear()  # until the file is replaced, nothing may be appended to the old one
            self._entries += head
            self.sync()
        elif position:
            self.deleteEntriesTo(position)


@dataclass(slots=True)
class JournalContent:
    """The content of a journal file. `end` is the offset after its last whole group."""

    entries: list[LogEntry]
    joined: bool
    end: int

    def add_group(self, payload: bytes) -> None:
        """Raises ValueError or struct.error for a payload that this code cannot have written."""
        position = 0
        while position < len(payload):
            operation = payload[position]
            if operation == _OP_ADD:
                _, index, term, size = _ADD.unpack_from(payload, position)
                position += _ADD.size
                if self.entries and index != self.entries[-1][1] + 1:
                    raise ValueError(f"entry {index} behind {self.entries[-1][1]}")
                self.entries.append((payload[position : position + size], index, term))
                position += size
            elif operation == _OP_CUT:
                (_, index) = _CUT.unpack_from(payload, position)
                position += _CUT.size
                while self.entries and self.entries[-1][1] >= index:
                    self.entries.pop()
            elif operation == _OP_JOINED:
                position += len(_JOINED)
                self.joined = True
            else:
                raise ValueError(f"operation {operation} is unknown")


def read_journal(data: bytes, path: Path) -> JournalContent:
    """The content of the journal at `path`. Raises JournalDamage."""
    if not data.startswith(_MAGIC):
        raise JournalDamage(path, "no journal of this version", 0)
    content = JournalContent([], False, len(_MAGIC))
    while (payload := _group_at(data, content.end)) is not None:
        try:
            content.add_group(payload)
        except (ValueError, struct.error) as error:
            raise JournalDamage(path, str(error), content.end) from error
        content.end += _GROUP.size + len(payload)
    # A torn last group is no damage: `sync` had not returned, so no message about it was sent. But
    # if a whole group follows, the bad one was once whole, and was answered for.
    later = _find_group(data, content.end + 1) if content.end < len(data) else None
    if later is not None:
        what = f"a damaged group, with a whole one after it at {later}"
        raise JournalDamage(path, what, content.end)
    return content


def _encode_add(entry: LogEntry) -> bytes:
    command, index, term = entry
    return _ADD.pack(_OP_ADD, index, term, len(command)) + command


def _group_at(data: bytes, position: int) -> bytes | None:
    """The payload of the whole group at `position`, or None."""
    if position + _GROUP.size > len(data):
        return None
    size, crc = _GROUP.unpack_from(data, position)
    payload = data[position + _GROUP.size : position + _GROUP.size + size]
    if not 0 < size <= _GROUP_BYTES_MAX or len(payload) != size or zlib.crc32(payload) != crc:
        return None
    return payload


def _find_group(data: bytes, position: int) -> int | None:
    """The next offset from `position` on where a whole group begins."""
    for candidate in range(position, len(data) - _GROUP.size):
        # The first byte of the payload, before the costly checksum.
        is_operation = data[candidate + _GROUP.size] in (_OP_ADD, _OP_CUT, _OP_JOINED)
        if is_operation and _group_at(data, candidate) is not None:
            return candidate
    return None


def has_commands(journal: DurableJournal) -> bool:
    """Whether it has, or had before its snapshot, more than the first entries of leaders."""
    entries = journal[:]
    return bool(entries) and (entries[0][1] > 1 or any(entry[0] != _NO_OP for entry in entries))


def check_log(journal: DurableJournal, name: str) -> None:
    """Raises JournalDamage for a journal that has commands of another log; `name` "": not known.
    One with a snapshot begins with its entries."""
    entries = journal[:]
    if not name or entries[0][1] > 1:
        return
    # The command that named the log was applied before the name was kept, and is never cut.
    if not any(name.encode() in command for command, _, _ in entries):
        raise JournalDamage(journal.folder / "journal", f"it is not of this folder's log {name}")


def end_aside(journal: DurableJournal, what: str) -> NoReturn:
    """Ends a node whose files cannot be used any more: the folder gets another name, and the next
    start joins with an empty one."""
    folder = journal.folder
    aside = folder.with_name(f"{folder.name}.diverged-{wall_ms()}")
    try:
        disk.rename(folder, aside)
        sync_directory(folder.parent)
    except OSError as exc:
        journal.on_fatal(f"{what}; cannot move {folder} aside: {exc}")
    journal.on_fatal(f"{what}; {aside} keeps the files, and the next start fetches the log again")


def _has_name(fd: int, path: Path) -> bool:
    """Whether `path` is the name of the open file."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except OSError:
        return False


def _close(fd: int) -> None:
    # Nothing is written to this file any more, so an error loses nothing.
    try:
        disk.close(fd)
    except OSError as error:
        log.warning("raft_file_not_closed reason=%r", str(error))
